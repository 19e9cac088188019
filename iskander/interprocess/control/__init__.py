"""Messages and channels between the gateway and its workers."""
