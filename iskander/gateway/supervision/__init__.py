"""Worker processes: placement, start, registration, loading, watchdog, recycling."""
