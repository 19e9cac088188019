"""The worker processes: where they run, how they start, live, hang, are replaced and end."""
