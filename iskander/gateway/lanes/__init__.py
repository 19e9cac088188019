"""What waits, in which order it runs, and what runs together."""
