"""Prediction log: sampled requests as Parquet files, by model and hour.

`log` is the consumer; it turns samples into rows (`columns`, `hashing`), which a thread writes into
files (`writer`, `files`, `layout`) and brings to their folder or object store (`delivery`).
"""
