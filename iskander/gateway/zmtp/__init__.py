"""ZMTP 3: what ZeroMQ's sockets speak, as far as a server of DEALER and REQ sockets needs it."""
