"""Benchmarks of Iskander against other model servers: `python -m benchmarks`."""
