"""Sources: queries, signed tickets, and the processes that read files for Flight clients."""
