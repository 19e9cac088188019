"""Checks by subject: pure functions of facts, probes and demand."""
