"""Histograms, counters and recent values, for the packages that measure."""
