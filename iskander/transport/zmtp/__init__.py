"""ZMTP 3 for a server of DEALER and REQ sockets."""
