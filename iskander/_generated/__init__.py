"""Protobuf modules made by scripts/gen_proto.py."""
