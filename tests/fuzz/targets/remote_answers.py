"""Answers of remote servers, with protobuf and NumPy as the references.

Layout of an input: kind (1 byte: response, metadata), then the message.
"""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from iskander_worker.remote.messages import decode_response, graph_of, parse
from iskander_worker.remote.statuses import error_of, retry_after_ms

from fuzz import mutation
from iskander._generated import oip_pb2
from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import Graph, GraphTensor

ITERATIONS = 2000
NUMBERS = tuple(range(1, 9))
ROWS = 2
GRAPH = Graph(
    (GraphTensor("x", "tensor(float)", ("rows", 3)),),
    (
        GraphTensor("score", "tensor(float)", ("rows", 2)),
        GraphTensor("small", "tensor(int8)", ("rows", None)),
        GraphTensor("flag", "tensor(bool)", ("rows",)),
        GraphTensor("word", "tensor(string)", ("rows",)),
    ),
)
OUTPUTS = tuple(tensor.name for tensor in GRAPH.outputs)
FIELDS = {"score": "fp32_contents", "small": "int_contents", "flag": "bool_contents"}
FIELDS |= {"word": "bytes_contents"}
DATATYPES = {"score": "FP32", "small": "INT8", "flag": "BOOL", "word": "BYTES"}
SHAPES = {"score": [2, 2], "small": [2, 3], "flag": [2], "word": [2]}
VALUES: dict[str, list[Any]] = {
    "score": [0.5, 1.0, -1.0, 2.5], "small": [1, -128, 127, 0, 5, 6], "flag": [True, False],
    "word": ["é".encode(), b""],
}  # fmt: skip
RAW = [
    np.arange(4, dtype=np.float32).tobytes(), bytes(6), b"\1\0", b"\2\0\0\0hi\0\0\0\0",
]  # fmt: skip


def seeds() -> list[bytes]:
    raw, typed = oip_pb2.ModelInferResponse(id="1"), oip_pb2.ModelInferResponse()
    for name in OUTPUTS:
        tensor = {"name": name, "datatype": DATATYPES[name], "shape": SHAPES[name]}
        raw.outputs.add(**tensor)
        typed.outputs.add(**tensor, contents={FIELDS[name]: VALUES[name]})
    raw.raw_output_contents.extend(RAW)
    wide = oip_pb2.ModelInferResponse.FromString(typed.SerializeToString())
    wide.outputs[1].contents.int_contents[0] = 300
    metadata = oip_pb2.ModelMetadataResponse(name="m", platform="p")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 3])
    metadata.outputs.add(name="word", datatype="TYPE_STRING", shape=[-1])
    responses = [b"\0" + each.SerializeToString() for each in (raw, typed, wide)]
    return [
        *responses,
        b"\1" + metadata.SerializeToString(),
        b"\2UNAVAILABLE\nfailed to connect to all addresses\nretry-after: 3",
        b"\2RESOURCE_EXHAUSTED\nTraceback (most recent\n  File x\nE: y\niskander-code: draining",
    ]


def mutate(raw: bytes, other: bytes, random: Random) -> bytes:
    if raw[:1] == b"\2":
        return mutation.flip(raw, other, random)
    return raw[:1] + mutation.protobuf(raw[1:], other[1:], random, NUMBERS)


def run(raw: bytes) -> None:
    kind, message = raw[:1], raw[1:]
    if kind == b"\2":
        check_status(message.decode(errors="replace"))
    elif kind == b"\1":
        check_metadata(message)
    else:
        check_response(message)


def check_response(raw: bytes) -> None:
    try:
        expected = oip_pb2.ModelInferResponse.FromString(raw)
    except DecodeError:
        expected = None
    try:
        arrays = decode_response(raw, OUTPUTS, GRAPH, ROWS)
    except ValueError as error:
        assert str(error)
        return
    assert expected is not None, "accepted, but protobuf rejects it"
    contents = {tensor.name: at for at, tensor in enumerate(expected.outputs)}
    for name in OUTPUTS:
        at, array = contents[name], arrays[name]
        tensor = expected.outputs[at]
        assert tensor.datatype == DATATYPES[name] and array.shape == tuple(tensor.shape)
        assert array.shape[0] == ROWS
        if not expected.raw_output_contents:
            values = list(getattr(tensor.contents, FIELDS[name]))
            decoded = [each.decode() for each in values] if name == "word" else values
            assert array.reshape(-1).tolist() == decoded or np.isnan(decoded).any()
        elif name == "word":
            joined = b"".join(
                len(text.encode()).to_bytes(4, "little") + text.encode()
                for text in array.reshape(-1)
            )
            assert joined == expected.raw_output_contents[at]
        else:
            assert array.nbytes == prod(array.shape) * array.itemsize
            assert array.tobytes() == expected.raw_output_contents[at]


def check_metadata(raw: bytes) -> None:
    try:
        metadata = parse(oip_pb2.ModelMetadataResponse, raw)
        graph = graph_of(metadata, GRAPH)
    except ValueError as error:
        assert str(error)
        return
    for tensors, side, declared in (
        (metadata.inputs, graph.inputs, GRAPH.inputs),
        (metadata.outputs, graph.outputs, GRAPH.outputs),
    ):
        if not tensors:
            assert side == declared
        for sent, read in zip(tensors, side if tensors else (), strict=True):
            assert read.name == sent.name and read.element in BY_ONNX
            assert [isinstance(size, int) for size in read.shape] == [n >= 0 for n in sent.shape]


def check_status(text: str) -> None:
    status, _, rest = text.partition("\n")
    lines = [line.partition(": ") for line in rest.split("\n")]
    trailers = {name: value for name, _, value in lines}
    error = error_of(status, rest, trailers, "remote model `m` at h:1")
    assert error.code and len(str(error)) < 1000
    wait_ms = retry_after_ms(trailers)
    assert wait_ms is None or 0 <= wait_ms <= 60_000
