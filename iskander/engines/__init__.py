"""Shared parts of engines with several machines: columns, addresses, scoring in processes.

Imports `iskander.client`, the rules for rejected rows and pyarrow; no engine.
Runs in: drivers and processes of engines.
"""
