"""Endurance test: hours of mixed load, faults and reloads, with checked answers and limits."""
