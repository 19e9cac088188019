"""Contract of a model: manifest, pre-processing, post-processing.

A check that fails raises a `ManifestError`, which names the entry, the rule and the actual value.
"""
