"""Histograms, counters and recent values."""
