"""Who is at the door, and what they may ask: tokens and grants, TLS and its handshakes."""
