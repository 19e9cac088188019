"""Rows before and after a model: steps, strings, buckets, and the relation of rows."""
