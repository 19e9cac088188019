"""Metrics, statistics, logs and the admin port."""
