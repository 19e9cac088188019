"""The worker process: models, cores and nothing that listens on a network."""
