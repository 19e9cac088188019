"""Protobuf modules, made by `scripts/gen_proto.py`; their messages are in a pool of our own."""

from google.protobuf.descriptor_pool import DescriptorPool

POOL = DescriptorPool()
