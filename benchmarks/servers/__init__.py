"""Start scripts of the other servers; each runs in that server's own environment."""
