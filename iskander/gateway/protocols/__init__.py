"""Protocols: each translates requests to tensors and results to responses."""
