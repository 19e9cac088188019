"""Iskander beside the servers that people would otherwise choose: `python -m benchmarks`."""
