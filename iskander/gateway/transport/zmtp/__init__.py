"""ZMTP 3 server for DEALER, REQ and ROUTER peers."""
