"""Contract of a model: manifest, pre-processing, post-processing."""
