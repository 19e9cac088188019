"""Benchmarks of scheduling: fleets in virtual time and over real streams, and overload."""
