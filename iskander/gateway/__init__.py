"""The gateway process: one event loop between clients and workers."""
