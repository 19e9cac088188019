"""Shared memory: segments, arenas, leases, NUMA policy."""
