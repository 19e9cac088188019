"""Shared helpers of tests: servers, workers, raw calls, small models."""
