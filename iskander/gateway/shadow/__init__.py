"""Shadow versions: requests that candidates run too, and comparison of their results.

`routes` selects the pairs of versions, `runner` runs the batches within the limits of `admission`,
and `comparison` has the statistics of the outputs that `contract` found comparable.
"""
