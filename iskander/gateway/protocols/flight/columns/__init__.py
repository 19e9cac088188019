"""Columns of a batch as inputs of a model, and results as columns."""
