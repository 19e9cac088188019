"""Limits of connections: number, memory, time of the event loop, descriptors."""
