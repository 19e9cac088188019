"""Sockets, TLS, HTTP/1.1, HTTP/2 and ZMTP, and the limits of a connection."""
