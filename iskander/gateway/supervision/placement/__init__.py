"""Processes on cores, NUMA nodes and devices of the machine."""
