"""Memory that two processes share: segments by descriptor, leases by generation."""
