"""Calls of the client: connection, credentials, retries, shared memory, errors."""
