"""Streams of Flight messages, their columns and their decoding with the codec."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.manifest import Passthrough
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import IskanderError
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.data import read_flight_data
from iskander.gateway.protocols.flight.plan import Plan
from support.codecs import decode

LIMITS = LimitsConfig()
ROWS = 5

END_OF_STREAM = ipc.CONTINUATION + bytes(4)
APP_METADATA = b"what the caller sends along"


def spec(name: str, type_text: str) -> TensorSpec:
    column_type = parse_column_type(type_text)
    return TensorSpec(name, name, column_type, column_type.shape)


OUTPUTS = (spec("score", "float32"), spec("mask", "fixed_size_list<bool>[3]"))


def contract_of(
    *inputs: TensorSpec, passthrough: Passthrough = "all", rows_fixed: int | None = None
) -> Contract:
    return Contract(inputs or (spec("x", "int64"),), OUTPUTS, passthrough, rows_fixed)


def output_of(rows: int) -> bytes:
    """Returns results in the arena layout: ascending scores, a mask pattern, non-zero padding."""
    (score, mask), end = body_layout(OUTPUTS, rows)
    output = bytearray(b"\xaa" * end)
    output[score : score + 4 * rows] = np.arange(rows, dtype=np.float32).tobytes()
    output[mask : mask + OUTPUTS[1].buffer_bytes(rows)] = np.packbits(
        np.arange(3 * rows) % 2 == 0, bitorder="little"
    ).tobytes()
    return bytes(output)


def results_of(rows: int) -> list[pa.Array]:
    """Returns the same results as arrays."""
    return [
        pa.array(np.arange(rows, dtype=np.float32)),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * rows) % 2 == 0), 3),
    ]


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


def x_of(rows: int = ROWS) -> pa.Array:
    return pa.array(range(rows), pa.int64())


def messages(*batches: pa.RecordBatch, **options: Any) -> list[tuple[bytes, bytes]]:
    """Returns header and body of every message of a stream, the schema first."""
    sink = pa.BufferOutputStream()
    write_options = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batches[0].schema, options=write_options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return [
        (bytes(each.metadata), bytes(each.body) if each.body else b"")
        for each in pa.ipc.MessageReader.open_stream(sink.getvalue())
    ]


def unaligned(raw: bytes) -> memoryview:
    """Returns the bytes at an odd address, as gRPC delivers them."""
    return memoryview(b"." + raw)[1:]


class Stream:
    """One stream and its codec.

    Args:
        limits: Limits that replace the defaults, by name.
    """

    def __init__(self, contract: Contract, schema_header: bytes, **limits: int) -> None:
        settings_ = msgspec.structs.replace(LIMITS, **limits)
        self.plan = Plan(schema_header, contract, settings_)
        self.codec = StreamCodec(self.plan, settings_)

    def decode(self, messages: Iterable[tuple[bytes, bytes]]) -> list[ParsedBatch]:
        decoded = (
            decode(self.codec, memoryview(h), unaligned(b), APP_METADATA) for h, b in messages
        )
        return [parsed for parsed in decoded if parsed is not None]

    def respond(self, messages: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """Returns the frames of all responses."""
        frames = []
        for parsed in self.decode(messages):
            prepared = self.codec.prepare(parsed, memoryview(output_of(parsed.rows)))
            frames += map(b"".join, self.codec.frames(prepared))
        return frames

    def read(self, frames: Iterable[bytes]) -> list[pa.RecordBatch]:
        """Returns the batches that pyarrow reads from the frames."""
        stream = [ipc.encapsulate(self.plan.response_header)]
        for frame in frames:
            data = read_flight_data(frame)
            stream.append(ipc.encapsulate(data.header, data.body))
        reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*stream, END_OF_STREAM))))
        batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
        return batches


def buffer_of(parsed: ParsedBatch, index: int) -> memoryview:
    """Returns one buffer of a request, from its portion or its body."""
    if parsed.portions:
        return parsed.portions[0].tensors[index]
    start, stop = parsed.tensors[index]
    return parsed.body[start:stop]


def tensor_of(parsed: ParsedBatch, index: int, column_type: ColumnType) -> np.ndarray:
    """Returns the elements of one input as a flat array."""
    raw = np.frombuffer(buffer_of(parsed, index), np.uint8)
    count = parsed.rows * int(np.prod(column_type.shape))
    if column_type.dtype_name == "bool":
        return np.unpackbits(raw, count=count, bitorder="little").astype(bool)
    return raw.view(column_type.dtype.numpy)


def fixed_list(values: pa.Array, *sizes: int) -> pa.Array:
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def numbers(count: int, arrow: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(arrow):
        return pa.array([index % 3 == 0 for index in range(count)])
    return pa.array(np.arange(count) % 100).cast(pa.int8()).cast(arrow)


# Columns of five rows that a response returns unchanged.
FIXED_WIDTH = {
    "int32 with nulls": pa.array([1, None, 3, None, 5], pa.int32()),
    "bool with nulls": pa.array([True, None, False, None, True]),
    "all null": pa.array([None] * ROWS, pa.int16()),
    "timestamp": pa.array([1, None, 3, 4, 5], pa.timestamp("us", "UTC")),
    "decimal": pa.array([1, 2, None, 4, 5], pa.decimal128(9, 2)),
    "fixed size binary": pa.array([b"abc", None, b"ghi", b"jkl", b"mno"], pa.binary(3)),
    "list of nulls and numbers": pa.array(
        [[1, None], None, [3, 4], [5, 6], [None, None]], pa.list_(pa.int16(), 2)
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.float32(), [2, 2]),
        fixed_list(numbers(4 * ROWS, pa.float32()), 4),
    ),
    "month day nano": pa.array([(1, 2, 3)] * ROWS, pa.month_day_nano_interval()),
}

STRINGS = {
    "string": pa.array(["", "a", None, "ccc", "é"]),
    "large string": pa.array(["", "a", None, "ccc", "é"], pa.large_string()),
    "binary": pa.array([b"", b"\xff", None, b"ccc", b""], pa.binary()),
    "large binary": pa.array([b"", b"\xff", None, b"ccc", b""], pa.large_binary()),
    "list of strings": pa.array(
        [["a", ""], None, ["é", None]] + [["b"] * 2] * 2, pa.list_(pa.string(), 2)
    ),
    "strings without nulls": pa.array(["x", "yy", "", "zzz", "w"]),
}

OTHER = {
    "null": pa.nulls(ROWS),
    "list": pa.array([[1], [], None, [2, None], [4]]),
    "struct": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": None}] + [{"a": 2}] * 2),
    "map": pa.array([[("a", 1)], [], None, [("b", 2)], []], pa.map_(pa.string(), pa.int8())),
    "dictionary": pa.array(["a", "b", "a", None, "b"]).dictionary_encode(),
    "list of string views": pa.array([["a", "b"]] * ROWS, pa.list_(pa.string_view(), 2)),
    "string view": pa.array(["a", None, "c" * 40, "d", ""], pa.string_view()),
    "list view": pa.array([[1], [2, 3], [], None, [4]], pa.list_view(pa.int32())),
    "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), ["a", None]),
    "dense union": pa.UnionArray.from_dense(
        pa.array([0, 1, 0, 0, 1], pa.int8()),
        pa.array([0, 0, 1, 2, 1], pa.int32()),
        [pa.array([1, 2, 3]), pa.array(["a", "b"])],
    ),
    "dictionary in a struct": pa.StructArray.from_arrays(
        [pa.array(["a", "b", "a", None, "b"]).dictionary_encode()], ["d"]
    ),
    "dictionary of lists": pa.DictionaryArray.from_arrays(
        pa.array([0, 1, 0, None, 1], pa.int8()), pa.array([[1], [2, 3]])
    ),
    "empty binary": pa.array([b"", None, b"", b"", b""], pa.binary(0)),
}

PASSTHROUGH_COLUMNS = FIXED_WIDTH | STRINGS | OTHER

CODECS = [None, "lz4", "zstd"]


def schema_error(kind: type[IskanderError], *arguments: Any, **limits: int) -> str:
    with pytest.raises(kind) as caught:
        Stream(*arguments, **limits)
    assert type(caught.value) is kind
    return caught.value.message


def header_of(schema: pa.Schema) -> bytes:
    return ipc.header_of(schema.serialize())


def nested(levels: int) -> pa.DataType:
    arrow = pa.int8()
    for _ in range(levels - 1):
        arrow = pa.list_(arrow)
    return arrow


def decode_error(
    stream: Stream, messages: Iterable[tuple[bytes, bytes]], kind: type[IskanderError]
) -> IskanderError:
    with pytest.raises(kind) as caught:
        stream.decode(messages)
    assert type(caught.value) is kind
    return caught.value


FORGED = batch_of(x=x_of(), s=STRINGS["string"], n=FIXED_WIDTH["int32 with nulls"])
(FORGED_SCHEMA, _), (FORGED_HEADER, FORGED_BODY) = messages(FORGED)


def patched(header: bytes, old: tuple[int, int], new: tuple[int, int]) -> bytes:
    """Returns a header with one pair of numbers replaced, for headers no template can render."""
    before = struct.pack("<qq", *old)
    assert header.count(before) == 1
    return header.replace(before, struct.pack("<qq", *new))
