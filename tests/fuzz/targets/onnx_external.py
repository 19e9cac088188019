"""External tensors of an ONNX file, with protobuf's parser as the reference.

If both accept a file, they find the same references. The worker's parser may also reject
encodings that parsers read in different ways.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

from google.protobuf.message import DecodeError
from iskander_worker.loading.onnx_external import external_tensors
from onnx import GraphProto, ModelProto, TensorProto

from fuzz import mutation
from iskander.errors import ManifestError

ITERATIONS = 1500


def tensor(**entries: str) -> TensorProto:
    proto = TensorProto(dims=[2], data_type=1, name="w")
    for key, value in entries.items():
        proto.external_data.add(key=key, value=value)
    return proto


def seeds() -> list[bytes]:
    model = ModelProto(ir_version=8)
    model.graph.initializer.extend([tensor(location="w.bin"), tensor()])
    deep = ModelProto(ir_version=8)
    inner = GraphProto(initializer=[tensor(location="a/b", offset="64", length="8")])
    deep.graph.node.add(op_type="If").attribute.add(name="then", g=inner, type=5)
    deep.graph.node.add(op_type="Constant").attribute.add(name="v", t=tensor(location="c"))
    deep.functions.add(name="f").node.add().attribute.add(tensors=[tensor(location="d")])
    deep.graph.sparse_initializer.add(values=tensor(location="e", checksum="0"))
    deep.training_info.add(algorithm=inner)
    return [b"", *(each.SerializeToString() for each in (ModelProto(), model, deep))]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    return mutation.flip(raw, other, random)


def run(raw: bytes) -> None:
    try:
        external = external_tensors(memoryview(raw), "model.onnx")
    except ManifestError:
        return
    model = ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError:
        return  # Invalid in a message without tensors; ONNX Runtime rejects it too.
    assert Counter(each.location for each in external) == Counter(locations(model))


def locations(message: Any) -> list[str]:
    """Location of each tensor with external data."""
    if isinstance(message, TensorProto):
        entries = {entry.key: entry.value for entry in message.external_data}
        return [entries["location"]] if "location" in entries else []
    external: list[str] = []
    for field, value in message.ListFields():
        if field.message_type is not None:
            each = value if field.is_repeated else [value]
            external += [name for part in each for name in locations(part)]
    return external
