"""Load generator of `iskander bench`: schedules, generated batches, runs and their figures."""
