"""Queues, policies, admission, batching and dispatch."""
