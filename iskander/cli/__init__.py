"""The `iskander` command: checks, samples, manifests, tokens, statistics."""
