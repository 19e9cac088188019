"""One call of the client: connection, credentials, retries, regions, errors."""
