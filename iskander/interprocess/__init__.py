"""Memory that the gateway and its workers share, and their messages."""
