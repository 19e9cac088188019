"""Iskander: Arrow record batches in, predictions out, over Arrow Flight."""

__version__ = "0.2.0"
