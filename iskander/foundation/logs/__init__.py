"""Log events: their declarations, and their lines on stderr.

`workers`, `models`, `requests`, `gateway`, `network` and `tracing` declare every event that this
program logs. A module imports the one of its subject and calls the event; nothing else logs.
"""
