"""Messages of the tests, made by `scripts/gen_proto.py` from `tests/interop/protos`."""
