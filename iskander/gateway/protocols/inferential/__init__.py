"""Inferential over ZeroMQ (ZMTP): sessions, wire format, terms."""
