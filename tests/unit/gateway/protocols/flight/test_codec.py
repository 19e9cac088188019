"""Batches of a Flight stream, with pyarrow as the client, and malformed messages.

Pyarrow writes the requests, and the tests write the results in the layout of a worker. Pyarrow
reads and validates the responses, joined into an IPC stream.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import tracemalloc
import weakref
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrow_memory import peak_of

from iskander.arrow import ipc
from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.manifest import InputColumn, Passthrough
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.codec import LongMessage, ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.columns import dictionaries as flight_dictionaries
from iskander.gateway.protocols.flight.columns.dictionaries import REPEATED_BYTES, REPEATED_PER_BYTE
from iskander.gateway.protocols.flight.data import data_head, read_flight_data
from iskander.gateway.protocols.flight.plan import Plan

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
            self.codec.decode(memoryview(h), unaligned(b), APP_METADATA) for h, b in messages
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


def flat(array: pa.Array) -> np.ndarray:
    """Returns the innermost values of a column without nulls, from its Python values."""
    nested = (
        array.storage.to_pylist() if isinstance(array, pa.ExtensionArray) else array.to_pylist()
    )
    return np.array(nested).reshape(-1)


def fixed_list(values: pa.Array, *sizes: int) -> pa.Array:
    for size in reversed(sizes):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values


def numbers(count: int, arrow: pa.DataType) -> pa.Array:
    if pa.types.is_boolean(arrow):
        return pa.array([index % 3 == 0 for index in range(count)])
    return pa.array(np.arange(count) % 100).cast(pa.int8()).cast(arrow)


FLOAT_16 = pa.array(np.arange(ROWS, dtype=np.float16) + np.float16(0.5))

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


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("rows", [0, 1, ROWS, 9])
def test_response_without_passthrough_has_only_results(rows: int, compression: str | None) -> None:
    contract = contract_of(passthrough="none")
    schema, *rest = messages(batch_of(x=x_of(rows)), compression=compression)
    stream = Stream(contract, schema[0])

    (batch,) = stream.read(stream.respond(rest))

    assert batch.schema.names == ["score", "mask"]
    assert batch.columns == results_of(rows)


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", PASSTHROUGH_COLUMNS)
def test_passthrough_column_is_returned_unchanged(name: str, compression: str | None) -> None:
    """The whole column, slices of it, and zero rows, between two other columns."""
    other = pa.array([1, None, 3, 4, None], pa.int8())
    whole = batch_of(before=other, column=PASSTHROUGH_COLUMNS[name], x=x_of(), after=other)
    for batch in (whole, whole.slice(1, 3), whole.slice(2, 1), whole.slice(0, 0)):
        schema, *rest = messages(batch, compression=compression)
        stream = Stream(contract_of(), schema[0])

        (response,) = stream.read(stream.respond(rest))

        assert response.schema.names == ["before", "column", "after", "score", "mask"]
        assert response.schema.field("column") == batch.schema.field("column")
        expected = [batch.column(index) for index in (0, 1, 3)]
        for actual, original in zip(
            response.columns, expected + results_of(batch.num_rows), strict=True
        ):
            assert actual.to_pylist() == original.to_pylist()


@pytest.mark.parametrize("name", [*FIXED_WIDTH, *STRINGS])
def test_common_column_types_take_the_fast_path(name: str) -> None:
    """The response reuses the bytes of the request."""
    schema, *rest = messages(batch_of(x=x_of(), column=PASSTHROUGH_COLUMNS[name]))
    stream = Stream(contract_of(), schema[0])

    (parsed,) = stream.decode(rest)

    assert stream.plan.is_response_plain and not stream.plan.is_converted
    assert parsed.passthrough == []
    assert bytes(parsed.body) == rest[0][1]


@pytest.mark.parametrize("name", OTHER)
def test_other_column_types_are_converted_by_pyarrow(name: str) -> None:
    schema, *_ = messages(batch_of(x=x_of(), column=PASSTHROUGH_COLUMNS[name]))
    stream = Stream(contract_of(), schema[0])

    assert stream.plan.is_converted and not stream.plan.is_response_plain


def test_response_buffers_are_aligned() -> None:
    """Also with passthrough columns of odd lengths."""
    columns = {str(index): column for index, column in enumerate((FIXED_WIDTH | STRINGS).values())}
    schema, *rest = messages(batch_of(x=x_of(), **columns))
    stream = Stream(contract_of(), schema[0])

    (frame,) = stream.respond(rest)

    data = read_flight_data(frame)
    message = ipc.read_message(data.header)
    read = ipc.read_batch(data.header, message)
    assert message.body_bytes == len(data.body)
    ranges = sorted(zip(read.buffers[::2], read.buffers[1::2], strict=True))
    end = 0
    for start, length in ranges:
        assert start % ALIGNMENT == 0
        assert length == 0 or start >= end
        end = max(end, start + length)
    assert end <= len(data.body)


@pytest.mark.parametrize("name", ["int32 with nulls", "string", "list", "dictionary"])
def test_app_metadata_is_returned_with_its_batch(name: str) -> None:
    schema, *rest = messages(batch_of(x=x_of(), column=PASSTHROUGH_COLUMNS[name]))
    stream = Stream(contract_of(), schema[0])

    frames = [read_flight_data(frame) for frame in stream.respond(rest)]

    assert [frame.app_metadata for frame in frames] == [b""] * (len(frames) - 1) + [APP_METADATA]


@pytest.mark.parametrize("passthrough", ["all", ("id", "other"), ("other",), (), "none"])
def test_contract_selects_the_passthrough_columns(passthrough: Passthrough) -> None:
    """In the order of the request's columns; inputs too, if they are named."""
    contract = contract_of(spec("id", "int64"), passthrough=passthrough)
    other = {"other": x_of()} if "other" in passthrough or passthrough == "all" else {}
    schema, *rest = messages(batch_of(**other, id=x_of()))
    stream = Stream(contract, schema[0])

    (response,) = stream.read(stream.respond(rest))

    expected = (
        ["other"] if passthrough == "all" else [n for n in ("other", "id") if n in passthrough]
    )
    if passthrough == "none":
        expected = []
    assert response.schema.names == [*expected, "score", "mask"]


@pytest.mark.parametrize("name", ["n", "o", "one", "none", "non"])
def test_passthrough_none_is_not_a_list_of_letters(name: str) -> None:
    """An input is not passed through if its name is a substring of `none`."""
    schema, *rest = messages(batch_of(**{name: x_of()}))
    stream = Stream(contract_of(spec(name, "int64"), passthrough="none"), schema[0])

    (response,) = stream.read(stream.respond(rest))

    assert response.schema.names == ["score", "mask"]


def test_missing_passthrough_column_is_ignored() -> None:
    schema, *rest = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(passthrough=("id",)), schema[0])

    (response,) = stream.read(stream.respond(rest))

    assert response.schema.names == ["score", "mask"]


def test_fields_keep_their_metadata_and_nullability() -> None:
    """The metadata of the schema itself is dropped."""
    schema = pa.schema(
        [pa.field("x", pa.int64(), False), pa.field("id", pa.int8(), False, {"unit": "m"})],
        metadata={"pandas": "{}"},
    )
    batch = pa.RecordBatch.from_arrays([x_of(), pa.array(range(ROWS), pa.int8())], schema=schema)
    (header, _), *rest = messages(batch)
    stream = Stream(contract_of(), header)

    (response,) = stream.read(stream.respond(rest))

    assert response.schema.field("id").equals(schema.field("id"), check_metadata=True)
    assert response.schema.metadata is None


# Batches with a header identical to an earlier one.


@pytest.mark.parametrize("name", [*FIXED_WIDTH, *STRINGS])
def test_batches_with_equal_headers_use_their_own_bodies(name: str) -> None:
    first = batch_of(x=x_of(), column=PASSTHROUGH_COLUMNS[name])
    (schema, _), (header, body) = messages(first)
    read = ipc.read_batch(header, ipc.read_message(header))
    offset = read.buffers[2]
    bodies = [
        body[:offset] + np.arange(n, n + ROWS).tobytes() + body[offset + 8 * ROWS :]
        for n in range(3)
    ]
    stream = Stream(contract_of(), schema)

    parsed = stream.decode([(header, each) for each in bodies])
    responses = stream.read(stream.respond([(header, each) for each in bodies]))

    assert [tensor_of(each, 0, ColumnType("int64"))[0] for each in parsed] == [0, 1, 2]
    assert [response.column("column").to_pylist() for response in responses] == [
        PASSTHROUGH_COLUMNS[name].to_pylist()
    ] * 3


def test_batches_with_equal_headers_return_their_own_columns() -> None:
    batches = [batch_of(x=x_of(), id=pa.array(range(n, n + ROWS))) for n in range(3)]
    (schema, _), *rest = messages(*batches)
    assert len({header for header, _ in rest}) == 1
    stream = Stream(contract_of(), schema)

    responses = stream.read(stream.respond(rest))

    assert [response.column("id") for response in responses] == [
        batch.column("id") for batch in batches
    ]


def test_cached_header_is_checked_against_a_shorter_body() -> None:
    (schema, _), (header, body) = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(), schema)
    stream.decode([(header, body)])

    for length in (0, 8, len(body) - 1):
        with pytest.raises(MalformedInput, match=f"bytes, got {length}"):
            stream.decode([(header, body[:length])])


def test_cached_header_does_not_skip_offset_validation() -> None:
    """String offsets are in the body, so every body is validated."""
    (schema, _), (header, body) = messages(batch_of(x=x_of(), s=STRINGS["string"]))
    read = ipc.read_batch(header, ipc.read_message(header))
    offsets = read.buffers[6]
    invalid = body[:offsets] + struct.pack("<6i", 0, 1 << 30, -1, 7, 7, 7) + body[offsets + 24 :]
    stream = Stream(contract_of(), schema)
    stream.decode([(header, body)])

    with pytest.raises(MalformedInput, match="column `s`"):
        stream.decode([(header, invalid)])


# Inputs.

INPUTS = {
    "int8": ("int8", numbers(ROWS, pa.int8())),
    "uint64": ("uint64", numbers(ROWS, pa.uint64())),
    "float16": ("float16", FLOAT_16),
    "float64": ("float64", numbers(ROWS, pa.float64())),
    "bool": ("bool", numbers(ROWS, pa.bool_())),
    "list": ("fixed_size_list<float32>[3]", fixed_list(numbers(3 * ROWS, pa.float32()), 3)),
    "list of bools": ("fixed_size_list<bool>[3]", fixed_list(numbers(3 * ROWS, pa.bool_()), 3)),
    "list of lists": (
        "fixed_size_list<fixed_size_list<int16>[3]>[2]",
        fixed_list(numbers(6 * ROWS, pa.int16()), 2, 3),
    ),
    "tensor": (
        "fixed_shape_tensor<float16>[2, 3]",
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float16(), [2, 3]),
            fixed_list(numbers(6 * ROWS, pa.float16()), 6),
        ),
    ),
    "tensor of two bools": (
        "fixed_shape_tensor<bool>[2]",
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.bool_(), [2], permutation=[0]),
            fixed_list(numbers(2 * ROWS, pa.bool_()), 2),
        ),
    ),
}


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", INPUTS)
def test_input_tensor_has_the_values_of_its_column(name: str, compression: str | None) -> None:
    """Also for slices, whose buffers begin before the values."""
    type_text, column = INPUTS[name]
    whole = batch_of(before=x_of(), x=column)
    for batch in (whole, whole.slice(1, 3), whole.slice(3), whole.slice(0, 0)):
        schema, *rest = messages(batch, compression=compression)
        stream = Stream(contract_of(spec("x", type_text)), schema[0])

        (parsed,) = stream.decode(rest)

        assert parsed.rows == batch.num_rows
        actual = tensor_of(parsed, 0, parse_column_type(type_text))
        np.testing.assert_array_equal(actual, flat(batch.column("x")).astype(actual.dtype))


@pytest.mark.parametrize("name", INPUTS)
def test_input_with_metadata_v4_is_read(name: str) -> None:
    type_text, column = INPUTS[name]
    schema, *rest = messages(
        batch_of(x=column, s=STRINGS["string"]), metadata_version=pa.ipc.MetadataVersion.V4
    )
    stream = Stream(contract_of(spec("x", type_text)), schema[0])

    (parsed,) = stream.decode(rest)
    (response,) = stream.read(stream.respond(rest))

    actual = tensor_of(parsed, 0, parse_column_type(type_text))
    np.testing.assert_array_equal(actual, flat(column).astype(actual.dtype))
    assert response.column("s").equals(STRINGS["string"])


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_columns_are_accepted_in_any_order(order: tuple[str, ...]) -> None:
    """Tensors follow the contract's order; the passthrough column keeps its position."""
    columns = {"a": x_of(), "b": numbers(ROWS, pa.bool_()), "c": STRINGS["string"]}
    contract = contract_of(spec("b", "bool"), spec("a", "int64"))
    schema, *rest = messages(batch_of(**{name: columns[name] for name in order}))
    stream = Stream(contract, schema[0])

    (parsed,) = stream.decode(rest)
    (response,) = stream.read(stream.respond(rest))

    assert tensor_of(parsed, 0, ColumnType("bool")).tolist() == columns["b"].to_pylist()
    assert tensor_of(parsed, 1, ColumnType("int64")).tolist() == columns["a"].to_pylist()
    assert response.column("c").equals(columns["c"])


@pytest.mark.parametrize("compression", CODECS)
def test_dictionary_encoded_input_is_decoded(compression: str | None) -> None:
    """Three batches, one of them sliced, with a dictionary that changes."""
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), pa.array([7, 8]))
    second = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([1, 2, 3]))
    batches = [batch_of(x=first), batch_of(x=first).slice(1, 1), batch_of(x=second)]
    schema, *rest = messages(*batches, compression=compression)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7, 8], [7], [3, 1]]


def test_dictionary_deltas_are_appended() -> None:
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array([7, 8]))
    grown = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([7, 8, 9]))
    schema, *rest = messages(batch_of(x=first), batch_of(x=grown), emit_dictionary_deltas=True)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7], [9, 7]]


def test_dictionary_encoded_list_is_decoded() -> None:
    values = fixed_list(numbers(6, pa.float32()), 3)
    column = pa.DictionaryArray.from_arrays(pa.array([1, 1, 0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    stream = Stream(contract_of(spec("x", "fixed_size_list<float32>[3]")), schema[0])

    (parsed,) = stream.decode(rest)

    actual = tensor_of(parsed, 0, ColumnType("float32", (3,)))
    assert actual.tolist() == [3, 4, 5, 3, 4, 5, 0, 1, 2]


def test_dictionaries_are_sent_only_after_a_change() -> None:
    """The second of three batches has the dictionary of the first."""
    first, second = (
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(values))
        for values in (["a", "b"], ["c", "d"])
    )
    batches = [batch_of(x=x_of(2), d=column) for column in (first, first, second)]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(), schema[0])

    frames = stream.respond(rest)

    kinds = [ipc.read_message(read_flight_data(frame).header).kind for frame in frames]
    batch, dictionary = ipc.RECORD_BATCH, ipc.DICTIONARY_BATCH
    assert kinds == [dictionary, batch, batch, dictionary, batch]
    responses = stream.read(frames)
    assert [response.column("d").to_pylist() for response in responses] == [
        ["a", "b"],
        ["a", "b"],
        ["c", "d"],
    ]


LARGE_TEXTS = [f"{index:032d}" for index in range(200_000)]
"""More bytes than are decoded on the event loop."""


def large_dictionary(kind: pa.DataType | None = None) -> pa.DictionaryArray:
    values = pa.array(LARGE_TEXTS, kind)
    return pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), values)


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8(), pa.string_view()])
@pytest.mark.parametrize("is_input", [True, False])
def test_dictionary_is_decoded_and_sent_once(
    is_input: bool, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that uses the dictionary has only 200 bytes."""
    validations = []
    original = flight_dictionaries._Validated
    monkeypatch.setattr(
        flight_dictionaries,
        "_Validated",
        lambda array, limits: validations.append(1) or original(array, limits),
    )
    column = large_dictionary(kind=kind)
    contract = contract_of(spec("d", "utf8")) if is_input else contract_of()
    columns = {"d": column} if is_input else {"x": x_of(2), "d": column}
    schema, dictionary, batch = messages(batch_of(**columns))
    stream = Stream(contract, schema[0])
    assert not stream.decode([dictionary])
    assert validations == [1]

    before = pa.total_allocated_bytes()
    parsed = stream.decode([batch] * 20)
    assert validations == [1] and pa.total_allocated_bytes() - before < 1 << 20

    if not is_input:
        frames = stream.respond([batch] * 20)
        assert sum(map(len, frames[2:])) < 20_000
        assert stream.read(frames)[19].column("d").to_pylist() == LARGE_TEXTS[:2]
    assert len(parsed) == 20


def test_invalid_batch_does_not_affect_the_next_one() -> None:
    """The dictionaries are kept, and the reader is at the beginning of a message."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    schema, dictionary, batch = messages(batch_of(x=x_of(3), d=column))
    out_of_range = messages(batch_of(x=x_of(3), d=pa.array(["a", "b", "c"]).dictionary_encode()))[2]
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    frames: list[bytes] = []
    cut = (batch[0], batch[1][:-8])
    for invalid in (out_of_range, cut, out_of_range):
        decode_error(stream, [invalid], MalformedInput)
        frames += stream.respond([batch])

    responses = stream.read(frames)
    assert [response.column("d").to_pylist() for response in responses] == [["a", "b", "a"]] * 3


def test_long_decoding_is_not_done_on_the_loop() -> None:
    """A small message that expands; an error changes nothing."""
    zeros = pa.array(np.zeros(1 << 20, np.int64))
    schema, bomb = messages(batch_of(x=zeros), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    assert len(bomb[1]) < 1 << 16
    with pytest.raises(LongMessage):
        stream.codec.decode(memoryview(bomb[0]), memoryview(bomb[1]), b"", is_on_loop=True)
    assert len(stream.decode([bomb])) == 1


@pytest.mark.parametrize("kind", ["struct", "list", "map", "dictionary of structs"])
def test_dictionary_inside_a_type_is_validated_once(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of 200 bytes validated all of its values; they cost as much as their own bytes."""
    validated = []
    original = flight_dictionaries.require_valid
    monkeypatch.setattr(
        flight_dictionaries,
        "require_valid",
        lambda array, limits: validated.append(len(array)) or original(array, limits),
    )
    words = large_dictionary()
    inner = pa.StructArray.from_arrays([words], ["d"])
    columns = {
        "struct": inner,
        "list": pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), words),
        "map": pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), words, words),
        "dictionary of structs": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), inner),
    }
    column = columns[kind]
    schema, *dictionaries, batch = messages(batch_of(x=x_of(2), d=column))
    stream = Stream(contract_of(), schema[0], string_bytes=1 << 30)
    assert not stream.decode(dictionaries)
    counts = len(validated)
    assert counts
    for _ in range(20):
        header, body = map(memoryview, batch)
        parsed = stream.codec.decode(header, body, b"", is_on_loop=True)
        assert parsed is not None
    assert len(validated) == counts
    (response,) = stream.read(stream.respond([batch]))
    assert response.column("d").to_pylist() == column.to_pylist()


@pytest.mark.parametrize("kind", ["struct", "list", "map", "union", "view of lists", "large list"])
def test_index_outside_a_dictionary_inside_a_type_is_rejected(kind: str) -> None:
    """Also after batches with valid indices, and before others."""

    def column_of(index: int, *values: str) -> pa.Array:
        words = pa.DictionaryArray.from_arrays(
            pa.array([0, index], pa.int8()), pa.array(values), safe=False
        )
        offsets = pa.array([0, 1, 2], pa.int32())
        if kind == "struct":
            return pa.StructArray.from_arrays([words], ["d"])
        if kind == "map":
            return pa.MapArray.from_arrays(offsets, pa.array(["a", "b"]), words)
        if kind == "union":
            return pa.UnionArray.from_sparse(pa.array([0, 0], pa.int8()), [words])
        if kind == "view of lists":
            return pa.ListViewArray.from_arrays(
                pa.array([0, 1], pa.int32()), pa.array([1, 1], pa.int32()), words
            )
        if kind == "large list":
            return pa.LargeListArray.from_arrays(offsets.cast(pa.int64()), words)
        return pa.ListArray.from_arrays(offsets, words)

    schema, dictionary, valid = messages(batch_of(x=x_of(2), d=column_of(1, "a", "b")))
    _, _, invalid = messages(batch_of(x=x_of(2), d=column_of(2, "a", "b", "c")))
    stream = Stream(contract_of(), schema[0])

    assert len(stream.decode([dictionary, valid, valid])) == 2
    decode_error(stream, [invalid], MalformedInput)
    assert len(stream.decode([valid])) == 1


def runs_of(rows: int, values: pa.Array) -> pa.Array:
    """One run of `rows` equal values."""
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), values)


def repeated(rows: int, values: pa.Array) -> pa.Array:
    """Rows with the only entry of a dictionary."""
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), values)


def view_of(rows: int, text: bytes, kind: pa.DataType | None = None) -> pa.Array:
    """Views of the same bytes."""
    views = np.zeros((rows, 4), np.int32)
    views[:, 0] = len(text)
    views[:, 1] = int.from_bytes(text[:4], "little")
    buffers = [None, pa.py_buffer(views.tobytes()), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind or pa.string_view(), rows, buffers)


ROW = fixed_list(pa.array(np.zeros(64, np.float32)), 64)
WORD = pa.array(["w" * 1000])
EXPANDING = {
    "runs": ("fixed_size_list<float32>[64]", lambda rows: runs_of(rows, ROW)),
    "dictionary": ("fixed_size_list<float32>[64]", lambda rows: repeated(rows, ROW)),
    "runs of numbers": ("int64", lambda rows: runs_of(64 * rows, x_of(1))),
    "runs of text": ("utf8", lambda rows: runs_of(rows, WORD)),
    "dictionary of text": ("utf8", lambda rows: repeated(rows, WORD)),
    "views": ("utf8", lambda rows: view_of(rows, b"w" * 1000)),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_small_batch_that_becomes_large_is_decoded_on_a_thread(name: str) -> None:
    """Its decoded size counts, and not that of its message; a small one is decoded at once."""
    type_text, column_of = EXPANDING[name]
    contract = contract_of(spec("x", type_text))
    for rows, is_long in ((100, False), (5000, True)):
        schema, *dictionaries, (header, body) = messages(batch_of(x=column_of(rows)))
        stream = Stream(contract, schema[0])
        assert not stream.decode(dictionaries)
        parts = memoryview(header), memoryview(body), b""
        if is_long:
            with pytest.raises(LongMessage):
                stream.codec.decode(*parts, is_on_loop=True)
            assert stream.decode([(header, body)])
        else:
            assert stream.codec.decode(*parts, is_on_loop=True) is not None


@pytest.mark.parametrize("name", EXPANDING)
def test_temporary_memory_of_a_batch_is_known_before_it_is_decoded(name: str) -> None:
    """Of Arrow and of NumPy: at most the charged bytes, and not many times less than them."""
    type_text, column_of = EXPANDING[name]
    schema, *rest = messages(batch_of(x=column_of(15_000)))
    *dictionaries, (header, body) = rest
    stream = Stream(contract_of(spec("x", type_text)), schema[0])
    stream.decode(dictionaries)
    charged = stream.codec.work_bytes(data_head(header, b"", len(body)) + body)

    def decode() -> int:
        tracemalloc.start()
        try:
            assert len(stream.decode([(header, body)])) == 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    python_peak, arrow_peak = peak_of(decode)

    assert python_peak + arrow_peak <= charged + (1 << 16)


CASTS = {
    "decimal": ("float64", "decimal", pa.array([1.5]).cast(pa.decimal128(38, 9))),
    "wide decimal": ("float32", "decimal", pa.array([1.5]).cast(pa.decimal256(76, 9))),
    "integer": ("float64", "int8", pa.array([1], pa.int8())),
    "nulls": ("float32", "int8", pa.array([None], pa.int8())),
}


@pytest.mark.parametrize("name", CASTS)
@pytest.mark.parametrize("kind", ["runs", "dictionary"])
def test_temporary_memory_of_a_cast_is_known_before_it(name: str, kind: str) -> None:
    tensor, type_text, values = CASTS[name]
    entry = InputColumn(
        tensor="x",
        column="x",
        type=type_text,
        conversion="number" if type_text == "decimal" else None,
        cast=type_text != "decimal",
        nulls="fill",
        fill=0.0,
    )
    contract = msgspec.structs.replace(contract_of(spec("x", tensor)), sources=(entry,))
    column = (runs_of if kind == "runs" else repeated)(200_000, values)
    schema, *dictionaries, (header, body) = messages(batch_of(x=column))
    stream = Stream(contract, schema[0])
    stream.decode(dictionaries)
    charged = stream.codec.work_bytes(data_head(header, b"", len(body)) + body)

    def decode() -> int:
        tracemalloc.start()
        try:
            assert len(stream.decode([(header, body)])) == 1
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    python_peak, arrow_peak = peak_of(decode)

    assert python_peak + arrow_peak <= charged + (1 << 16)


@pytest.mark.parametrize("place", ["column", "list", "struct", "input", "dictionary"])
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_views_of_the_same_bytes_are_limited(place: str, kind: pa.DataType) -> None:
    """Validation reads the bytes of each view: 65,536 views of 1 MiB are 64 GiB."""
    views = view_of(65_536, b"v" * (1 << 20), kind)
    rows = len(views)
    columns: dict[str, pa.Array] = {"x": x_of(rows)}
    contract = contract_of()
    if place == "list":
        columns["v"] = fixed_list(views, 1)
    elif place == "struct":
        columns["v"] = pa.StructArray.from_arrays([views], ["v"])
    elif place == "dictionary":
        columns["v"] = pa.DictionaryArray.from_arrays(x_of(rows).cast(pa.int32()), views)
    else:
        columns["v"] = views
    if place == "input":
        contract = contract_of(spec("x", "int64"), spec("v", "utf8"))
        if kind == pa.binary_view():
            contract = contract_of(spec("x", "int64"), spec("v", "binary"))
    schema, *rest = messages(batch_of(**columns))
    stream = Stream(contract, schema[0])

    error = decode_error(stream, rest, LimitExceeded)

    words = "string views of a dictionary" if place == "dictionary" else "string bytes, limit"
    assert words in error.message


def delta_messages(bytes_first: int, count: int) -> list[tuple[bytes, bytes]]:
    """A schema, a large dictionary, a batch, and deltas of one value."""
    first = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(bytes_first // 8))
    small = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(1))
    grown = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), x_of(2))
    schema, dictionary, batch = messages(batch_of(x=first))
    *_, delta, _ = messages(batch_of(x=small), batch_of(x=grown), emit_dictionary_deltas=True)
    return [schema, dictionary, batch, *[delta, batch] * count]


def test_deltas_of_a_large_dictionary_are_limited_by_received_bytes() -> None:
    """Each copies and validates the whole dictionary: 170 bytes would cost 56 MiB."""
    decoded = 0
    size = 1 << 22
    schema, *rest = delta_messages(size, 250)
    stream = Stream(contract_of(), schema[0])

    with pytest.raises(LimitExceeded, match="send larger deltas, or whole dictionaries"):
        for message in rest:
            decoded += not stream.decode([message])

    received = sum(map(len, itertools.chain(*rest)))
    assert 4 <= decoded <= (REPEATED_BYTES + REPEATED_PER_BYTE * received) // size + 2


def test_small_dictionary_may_have_many_deltas() -> None:
    schema, *rest = delta_messages(800, 250)

    assert len(Stream(contract_of(), schema[0]).decode(rest)) == 251


def test_delta_of_a_large_dictionary_is_not_decoded_on_the_loop() -> None:
    schema, dictionary, batch, delta, *_ = delta_messages(1 << 20, 1)
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary, batch])

    with pytest.raises(LongMessage):
        stream.codec.decode(memoryview(delta[0]), memoryview(delta[1]), b"", is_on_loop=True)
    assert stream.codec.work_bytes(data_head(delta[0], b"", len(delta[1])) + delta[1]) > 1 << 21


def test_dictionaries_decoded_again_after_errors_are_limited() -> None:
    """An invalid batch leaves the reader at an undefined position."""
    schema, dictionary, (header, body), *_ = delta_messages(1 << 22, 1)
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary, (header, body)])
    read = ipc.read_batch(header, ipc.read_message(header))
    forged = patched(header, (read.buffers[2], read.buffers[3]), (0, 1 << 20))

    with pytest.raises(LimitExceeded, match=r"decode .* of dictionaries again"):
        for _ in range(100):
            decode_error(stream, [(forged, body)], MalformedInput)
            stream.decode([(header, body)])


def test_memory_of_decoded_dictionaries_is_counted() -> None:
    """In addition to the messages: decompressed dictionaries and joined deltas."""
    schema, dictionary, _ = messages(batch_of(x=x_of(2), d=large_dictionary()))
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes == 0

    columns = {"x": x_of(2), "d": large_dictionary()}
    schema, dictionary, _ = messages(batch_of(**columns), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes > 32 * len(LARGE_TEXTS)


def test_streams_of_one_plan_do_not_share_dictionaries() -> None:
    """Plans are cached by schema, so several streams use one plan."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", "b"]))
    (header, _), *rest = messages(batch_of(x=x_of(2), d=column))
    first = Stream(contract_of(), header)
    second = Stream(contract_of(), header)
    second.codec = StreamCodec(first.plan, LIMITS)

    first.respond(rest)
    (response,) = second.read(second.respond(rest))

    assert response.column("d").to_pylist() == ["a", "b"]


def test_responses_of_many_lengths_are_correct() -> None:
    """More lengths than cached headers, each twice."""
    batches = [batch_of(x=x_of(rows)) for rows in [*range(70), *range(70)]]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(passthrough="none"), schema[0])

    responses = stream.read(stream.respond(rest))

    assert [response.columns for response in responses] == [results_of(b.num_rows) for b in batches]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_passthrough_columns_are_returned_unchanged(data: st.DataObject) -> None:
    """Columns of any kind and order, sliced, compressed or not."""
    names = data.draw(st.lists(st.sampled_from(sorted(PASSTHROUGH_COLUMNS)), max_size=4))
    columns = [("x", x_of())] + [
        (f"{name} {i}", PASSTHROUGH_COLUMNS[name]) for i, name in enumerate(names)
    ]
    columns = data.draw(st.permutations(columns))
    start = data.draw(st.integers(0, ROWS))
    batch = batch_of(**dict(columns)).slice(start, data.draw(st.integers(0, ROWS - start)))
    compression = data.draw(st.sampled_from(CODECS))
    schema, *rest = messages(batch, compression=compression)
    stream = Stream(contract_of(), schema[0])

    (response,) = stream.read(stream.respond(rest))

    passed = [name for name, _ in columns if name != "x"]
    assert response.schema.names == [*passed, "score", "mask"]
    for name in passed:
        assert response.column(name).to_pylist() == batch.column(name).to_pylist()
    assert response.columns[-2:] == results_of(batch.num_rows)


# Invalid schemas.


def schema_error(kind: type[IskanderError], *arguments: Any, **limits: int) -> str:
    with pytest.raises(kind) as caught:
        Stream(*arguments, **limits)
    assert type(caught.value) is kind
    return caught.value.message


def header_of(schema: pa.Schema) -> bytes:
    return ipc.header_of(schema.serialize())


def permuted(name: str, shape: list[int]) -> pa.Field:
    return pa.field(name, pa.fixed_shape_tensor(pa.float32(), shape, permutation=[1, 0]))


WRONG_COLUMNS = [
    ([("y", pa.int64())], "x: int64", ["column `x` is missing: wanted int64"]),
    ([("x", pa.int32())], "x: int64", ["column `x`: wanted int64, got int32"]),
    ([("x", pa.string())], "x: int64", ["column `x`: wanted int64, got string"]),
    (
        [("x", pa.list_(pa.int64(), 2))],
        "x: fixed_size_list<int64>[3]",
        ["column `x`: wanted fixed_size_list<int64>[3], got fixed_size_list<item: int64>[2]"],
    ),
    ([("x", pa.list_(pa.int64(), 1))], "x: int64", ["column `x`: wanted int64, got fixed_size"]),
    ([("x", pa.int64())], "x: fixed_size_list<int64>[1]", ["wanted fixed_size_list<int64>[1]"]),
    (
        [("x", pa.list_(pa.int64()))],
        "x: fixed_size_list<int64>[3]",
        ["column `x`", "got list<item: int64>"],
    ),
    (
        [("x", pa.fixed_shape_tensor(pa.float32(), [3, 2]))],
        "x: fixed_shape_tensor<float32>[2, 3]",
        ["column `x`: wanted fixed_shape_tensor<float32>[2, 3]", "shape=[3,2]"],
    ),
    (
        [permuted("x", [2, 3])],
        "x: fixed_shape_tensor<float32>[2, 3]",
        ["column `x`", "permutation=[1,0]"],
    ),
    (
        [("x", pa.dictionary(pa.int8(), pa.string()))],
        "x: int64",
        ["column `x`: wanted int64, got dictionary<values=string"],
    ),
    (
        [("x", pa.int64()), ("b", pa.int8()), ("a", pa.int8())],
        "x: int64",
        ["columns `a`, `b` are neither model inputs nor passed through"],
    ),
    (
        [("x", pa.int32()), ("q", pa.int8())],
        "x: int64; z: bool",
        ["column `x`: wanted int64, got int32", "column `z` is missing: wanted bool", "`q`"],
    ),
]


@pytest.mark.parametrize(
    ("fields", "inputs", "words"), WRONG_COLUMNS, ids=[row[2][0] for row in WRONG_COLUMNS]
)
def test_schema_that_violates_the_contract_is_rejected(
    fields: list[Any], inputs: str, words: list[str]
) -> None:
    """One error names all columns, with the expected and the actual types."""
    specs = [spec(*part.split(": ", 1)) for part in inputs.split("; ")]
    contract = contract_of(*specs, passthrough=())

    message = schema_error(ContractError, contract, header_of(pa.schema(fields)))

    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("arrow", "type_text"),
    [
        (pa.fixed_shape_tensor(pa.float32(), [2, 3]), "fixed_shape_tensor<float32>[2, 3]"),
        (
            pa.list_(pa.field("whatever", pa.float32(), False), 3),
            "fixed_size_list<float32>[3]",
        ),
        (pa.fixed_shape_tensor(pa.float32(), [3]), "fixed_size_list<float32>[3]"),
        (pa.list_(pa.list_(pa.float32(), 3), 2), "fixed_shape_tensor<float32>[2, 3]"),
    ],
)
def test_equivalent_tensor_types_are_accepted(arrow: pa.DataType, type_text: str) -> None:
    """The elements are in the same order."""
    Stream(contract_of(spec("x", type_text)), header_of(pa.schema([("x", arrow)])))


def test_duplicate_column_is_rejected() -> None:
    schema = pa.schema([("x", pa.int64()), ("a", pa.int8()), ("a", pa.int8())])

    assert "duplicate columns `a`" in schema_error(ContractError, contract_of(), header_of(schema))


def test_passthrough_column_with_a_result_name_is_rejected() -> None:
    schema = pa.schema([("x", pa.int64()), ("score", pa.int8())])

    message = schema_error(ContractError, contract_of(), header_of(schema))

    assert "columns `score` would be passed through and are also results" in message


def test_input_can_have_a_result_name_without_passthrough() -> None:
    schema, *rest = messages(batch_of(score=x_of()))
    stream = Stream(contract_of(spec("score", "int64"), passthrough="none"), schema[0])

    (response,) = stream.read(stream.respond(rest))

    assert response.columns == results_of(ROWS)


def big_endian(schema: pa.Schema) -> bytes:
    """Returns a schema header with the byte order set; pyarrow omits the native byte order.

    The new vtable entry points to an existing 1 in the header.
    """
    header = bytearray(header_of(schema))
    table = ipc.read_message(header).table
    vtable = table - struct.unpack_from("<i", header, table)[0]
    struct.pack_into("<H", header, vtable + 4, header.index(b"\x01\x00", table) - table)
    return bytes(header)


def test_big_endian_stream_is_rejected() -> None:
    schema = pa.schema([("x", pa.int64())])
    Stream(contract_of(), header_of(schema))

    assert "big-endian" in schema_error(MalformedInput, contract_of(), big_endian(schema))


def test_stream_without_a_schema_is_rejected() -> None:
    (_, (header, _)) = messages(batch_of(x=x_of()))

    assert "begin with a schema" in schema_error(MalformedInput, contract_of(), header)


@pytest.mark.parametrize("header", [b"", b"\x00" * 64, b"\xff" * 64, b"schema"])
def test_invalid_schema_header_is_rejected(header: bytes) -> None:
    schema_error(MalformedInput, contract_of(), header)


def nested(levels: int) -> pa.DataType:
    arrow = pa.int8()
    for _ in range(levels - 1):
        arrow = pa.list_(arrow)
    return arrow


@pytest.mark.parametrize(
    ("name", "limit", "accepted", "rejected"),
    [
        ("columns", 3, [pa.int8()] * 2, [pa.int8()] * 3),
        ("nesting", 4, [nested(4)], [nested(5)]),
        ("nesting", 2, [pa.list_(pa.int8(), 3)], [pa.struct([("a", nested(2))])]),
        ("nesting", 64, [nested(64)], [nested(65)]),
    ],
)
def test_schema_above_a_limit_is_rejected(
    name: str, limit: int, accepted: list[pa.DataType], rejected: list[pa.DataType]
) -> None:
    """At each limit and above it."""

    def header(types: list[pa.DataType]) -> bytes:
        fields = [(f"column {index}", arrow) for index, arrow in enumerate(types)]
        return header_of(pa.schema([("x", pa.int64()), *fields]))

    Stream(contract_of(), header(accepted), **{name: limit})

    message = schema_error(LimitExceeded, contract_of(), header(rejected), **{name: limit})
    assert str(limit) in message
    assert name == "columns" or "`column 0`" in message


HUGE = 1 << 30
HUGE_VALUES = {
    "list": pa.list_(pa.int8(), HUGE),
    "tensor": pa.fixed_shape_tensor(pa.int8(), [HUGE]),
    "tensor of lists": pa.list_(pa.fixed_shape_tensor(pa.int8(), [1 << 15]), 1 << 15),
    "binary": pa.binary(1 << 26),
    "runs": pa.run_end_encoded(pa.int32(), pa.list_(pa.int8(), HUGE)),
    "dictionary": pa.dictionary(pa.int8(), pa.list_(pa.int8(), HUGE)),
    "dense union": pa.dense_union([pa.field("a", pa.list_(pa.int8(), HUGE))]),
    "sparse union": pa.sparse_union([pa.field("a", pa.list_(pa.int8(), HUGE))]),
    "struct": pa.struct([("a", pa.list_(pa.int8(), HUGE))]),
    "map": pa.map_(pa.string(), pa.list_(pa.int8(), HUGE)),
    "variable list": pa.large_list(pa.list_(pa.int8(), HUGE)),
    "list view": pa.list_view(pa.list_(pa.int8(), HUGE)),
}


@pytest.mark.parametrize("name", HUGE_VALUES)
def test_values_of_a_huge_type_are_never_built(name: str) -> None:
    """Not for the plan, an error in place of a result, or a dictionary of another column."""
    kind = HUGE_VALUES[name]
    schema = pa.schema([("x", pa.int64()), ("column", kind), ("d", OTHER["dictionary"].type)])
    dictionary = messages(batch_of(d=OTHER["dictionary"]))[1]
    has_own = "dictionary" in name

    def serve() -> tuple[Stream, list[bytes]]:
        stream = Stream(contract_of(), header_of(schema))
        if not has_own:  # Otherwise the column's dictionary would have to come first.
            assert not stream.decode([dictionary])
        error = MalformedInput("invalid")
        return stream, [b"".join(parts) for parts in stream.codec.error_frames(error)]

    (stream, frames), peak = peak_of(serve)

    assert peak < 1 << 16
    (response,) = stream.read(frames)
    assert response.num_rows == 0 and response.schema.field("column").type == kind


@pytest.mark.parametrize("scale", [16_777_216, 2**31 - 1, -(2**31)])
def test_schema_with_a_huge_scale_is_rejected(scale: int) -> None:
    header = header_of(pa.schema([("x", pa.int64()), ("d", pa.decimal128(38, 7))]))
    before = struct.pack("<ii", 38, 7)
    assert header.count(before) == 1
    header = header.replace(before, struct.pack("<ii", 38, scale))

    assert f"scale {scale}" in schema_error(MalformedInput, contract_of(), header)


# Invalid batches.


def test_app_metadata_is_limited() -> None:
    """It is kept until the response."""
    schema, (header, body) = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(), schema[0], app_metadata_bytes=100)
    for size in (0, 100):
        parsed = stream.codec.read(data_head(header, b"m" * size, len(body)) + body)
        assert parsed is not None and len(parsed.app_metadata) == size

    for header_bytes, body_bytes in ((header, body), (FORGED_SCHEMA, b"")):
        message = data_head(header_bytes, b"m" * 101, len(body_bytes)) + body_bytes
        with pytest.raises(LimitExceeded, match=r"101 bytes, limit 100 \(`limits\.app_"):
            stream.codec.read(message)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("is_dictionary", [False, True])
def test_compression_with_metadata_v4_is_rejected(is_dictionary: bool, compression: str) -> None:
    """pyarrow writes it, and reads the compressed bytes as values."""
    column = x_of(1000)
    columns = {"x": column, "d": column.dictionary_encode()} if is_dictionary else {"x": column}
    version = pa.ipc.MetadataVersion.V4
    schema, *rest = messages(batch_of(**columns), compression=compression, metadata_version=version)
    stream = Stream(contract_of(), schema[0])

    assert "version V4" in decode_error(stream, rest, MalformedInput).message


WRITER_OPTIONS = {
    "metadata_version": [pa.ipc.MetadataVersion.V4, pa.ipc.MetadataVersion.V5],
    "allow_64bit": [False, True],
    "use_legacy_format": [False, True],
    "compression": CODECS,
    "emit_dictionary_deltas": [False, True],
    "unify_dictionaries": [False, True],
}


@pytest.mark.parametrize("names", list(itertools.combinations(WRITER_OPTIONS, 2)), ids="-".join)
def test_options_of_the_writer_change_no_value(names: tuple[str, str]) -> None:
    """All pairs of options of pyarrow's writer: the same inputs and columns, or an error."""
    grown = pa.DictionaryArray.from_arrays(
        pa.array([0, 4, 1, None, 3], pa.int32()), pa.array(["a", "b", "c", "d", "e"])
    )
    columns = [OTHER["dictionary"], grown]
    batches = [batch_of(x=x_of(), d=each, s=STRINGS["string"], l=OTHER["list"]) for each in columns]
    for values in itertools.product(*(WRITER_OPTIONS[name] for name in names)):
        options = dict(zip(names, values, strict=True))
        schema, *rest = messages(*batches, **options)
        stream = Stream(contract_of(), schema[0])
        is_v4 = options.get("metadata_version") == pa.ipc.MetadataVersion.V4
        if is_v4 and options.get("compression"):
            decode_error(stream, rest, MalformedInput)
            continue
        for parsed, response, batch in zip(
            stream.decode(rest), stream.read(stream.respond(rest)), batches, strict=True
        ):
            assert tensor_of(parsed, 0, ColumnType("int64")).tolist() == list(range(ROWS))
            for name in ("d", "s", "l"):
                assert response.column(name).to_pylist() == batch.column(name).to_pylist()


def decode_error(
    stream: Stream, messages: Iterable[tuple[bytes, bytes]], kind: type[IskanderError]
) -> IskanderError:
    with pytest.raises(kind) as caught:
        stream.decode(messages)
    assert type(caught.value) is kind
    return caught.value


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize(
    ("type_text", "column"),
    [
        ("int64", pa.array([1, None, 3])),
        ("bool", pa.array([True, None, None])),
        ("fixed_size_list<int64>[2]", pa.array([[1, 2], None, [5, 6]], pa.list_(pa.int64(), 2))),
        ("fixed_size_list<int64>[2]", pa.array([[1, 2], [3, None]], pa.list_(pa.int64(), 2))),
        ("int64", pa.array([1, None, 3]).dictionary_encode()),
        (
            "int64",
            pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array([7, None])),
        ),
    ],
    ids=["int64", "bool", "list", "list item", "dictionary index", "dictionary value"],
)
def test_nulls_in_an_input_are_rejected(
    type_text: str, column: pa.Array, compression: str | None
) -> None:
    schema, *rest = messages(batch_of(column=column), compression=compression)
    stream = Stream(contract_of(spec("column", type_text)), schema[0])

    error = decode_error(stream, rest, ContractError)

    assert "column `column` has" in error.message and "null" in error.message
    assert error.column == "column"
    # The number of the header, or the first row of converted values.
    assert error.fields.keys() - {"column"} in ({"nulls"}, {"row"})


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8])
def test_model_with_fixed_rows_accepts_any_row_count(rows: int) -> None:
    """The lane splits and pads the rows."""
    schema, *rest = messages(batch_of(x=x_of(rows)))
    stream = Stream(contract_of(rows_fixed=4), schema[0])

    assert stream.decode(rest)[0].rows == rows


FORGED = batch_of(x=x_of(), s=STRINGS["string"], n=FIXED_WIDTH["int32 with nulls"])
(FORGED_SCHEMA, _), (FORGED_HEADER, FORGED_BODY) = messages(FORGED)
FORGED_BATCH = ipc.read_batch(FORGED_HEADER, ipc.read_message(FORGED_HEADER))
TEMPLATE = ipc.BatchTemplate(FORGED.schema)
# Indices in FORGED's header, checked by `test_forge_without_changes_keeps_the_header`.
X_LENGTH, X_NULLS, S_LENGTH, S_NULLS, N_LENGTH, N_NULLS = range(6)
X_VALUES, S_VALID, S_OFFSETS, S_DATA, N_VALID, N_VALUES = 1, 2, 3, 4, 5, 6
START, LENGTH = 0, 1
LONG = len(FORGED_BODY)


def forge(
    rows: int = ROWS,
    *,
    nodes: dict[int, int] | None = None,
    buffers: dict[tuple[int, int], int] | None = None,
    body_bytes: int = LONG,
) -> bytes:
    """Returns the real header with some numbers replaced."""
    node_numbers, buffer_numbers = list(FORGED_BATCH.nodes), list(FORGED_BATCH.buffers)
    for index, number in (nodes or {}).items():
        node_numbers[index] = number
    for (buffer, part), number in (buffers or {}).items():
        buffer_numbers[2 * buffer + part] = number
    return bytes(TEMPLATE.render(rows, node_numbers, buffer_numbers, body_bytes))


def test_forge_without_changes_keeps_the_header() -> None:
    """The index constants are correct, and the unchanged header is accepted."""
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (response,) = stream.read(stream.respond([(forge(), FORGED_BODY)]))

    assert response.column("s").equals(FORGED.column("s"))
    assert response.column("n").equals(FORGED.column("n"))
    assert FORGED_BATCH.nodes == (ROWS, 0, ROWS, 1, ROWS, 2)
    lengths = FORGED_BATCH.buffers[1::2]
    assert [lengths[index] for index in (X_VALUES, S_OFFSETS, S_DATA, N_VALUES)] == [40, 24, 6, 20]
    assert len(lengths) == 7


FORGERIES: list[tuple[str, dict[str, Any], str]] = [
    ("one row more", {"rows": ROWS + 1}, "`x`"),
    ("one row less", {"rows": ROWS - 1}, "`x`"),
    ("no rows", {"rows": 0}, "`x`"),
    ("a shorter input", {"nodes": {X_LENGTH: 4}}, "`x` has 4 values"),
    ("a negative input length", {"nodes": {X_LENGTH: -5}}, "`x` has -5 values"),
    ("a huge input length", {"nodes": {X_LENGTH: 2**63 - 1}}, "`x` has"),
    ("negative nulls in an input", {"nodes": {X_NULLS: -1}}, "`x` has 5 values with -1 nulls"),
    ("more nulls than values", {"nodes": {X_NULLS: 6}}, "`x` has 5 values with 6 nulls"),
    ("a longer passthrough column", {"nodes": {N_LENGTH: 6}}, "`n` has 6 values"),
    ("negative nulls in a passthrough column", {"nodes": {N_NULLS: -1}}, "`n`"),
    ("a longer string column", {"nodes": {S_LENGTH: 6}}, "`s` has 6 values"),
    (
        "an input buffer too short",
        {"buffers": {(X_VALUES, LENGTH): 39}},
        "39 bytes at 0, requires 40",
    ),
    ("an input buffer of negative length", {"buffers": {(X_VALUES, LENGTH): -40}}, "`x`"),
    ("an input buffer at a negative offset", {"buffers": {(X_VALUES, START): -8}}, "`x`"),
    ("an input buffer at the minimum offset", {"buffers": {(X_VALUES, START): -(2**63)}}, "`x`"),
    ("an input buffer beyond the body", {"buffers": {(X_VALUES, START): LONG}}, "`x`"),
    ("an input buffer across the end", {"buffers": {(X_VALUES, START): LONG - 39}}, "`x`"),
    ("an input buffer at a huge offset", {"buffers": {(X_VALUES, START): 2**63 - 1}}, "`x`"),
    ("a passthrough buffer too short", {"buffers": {(N_VALUES, LENGTH): 19}}, "`n`"),
    ("a passthrough buffer of negative length", {"buffers": {(N_VALUES, LENGTH): -1}}, "`n`"),
    ("a passthrough buffer at a negative offset", {"buffers": {(N_VALUES, START): -64}}, "`n`"),
    ("a passthrough buffer across the end", {"buffers": {(N_VALUES, LENGTH): LONG + 1}}, "`n`"),
    ("a passthrough buffer of huge length", {"buffers": {(N_VALUES, LENGTH): 2**63 - 1}}, "`n`"),
    ("a validity buffer too short", {"buffers": {(N_VALID, LENGTH): 0}}, "`n`"),
    ("a validity buffer beyond the body", {"buffers": {(N_VALID, START): LONG}}, "`n`"),
    ("string offsets too short", {"buffers": {(S_OFFSETS, LENGTH): 20}}, "`s`"),
    ("string offsets at a negative offset", {"buffers": {(S_OFFSETS, START): -1}}, "`s`"),
    ("string offsets in other bytes", {"buffers": {(S_OFFSETS, START): 0}}, "`s`"),
    ("string data too short", {"buffers": {(S_DATA, LENGTH): 5}}, "`s`"),
    ("string data beyond the body", {"buffers": {(S_DATA, LENGTH): 2**40}}, "`s`"),
    ("string data that is not UTF-8", {"buffers": {(S_DATA, START): LONG - 6}}, "`s`"),
    ("a string validity buffer too short", {"buffers": {(S_VALID, LENGTH): 0}}, "`s`"),
    ("a body longer than received", {"body_bytes": LONG + 8}, f"{LONG + 8} bytes, got {LONG}"),
    ("a negative body", {"body_bytes": -8}, "a body of -8 bytes"),
]


@pytest.mark.parametrize(
    ("changes", "words"), [row[1:] for row in FORGERIES], ids=[row[0] for row in FORGERIES]
)
def test_forged_header_is_rejected(changes: dict[str, Any], words: str) -> None:
    """The body is complete and ends with invalid UTF-8; only the header is wrong."""
    body = FORGED_BODY[:-6] + b"\xff" * 6
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(forge(**changes), body)], MalformedInput)

    assert words in error.message


@pytest.mark.parametrize("rows", [-1, -(2**63), 2**63 - 1])
def test_impossible_row_count_is_rejected(rows: int) -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    assert str(rows) in decode_error(stream, [(forge(rows), FORGED_BODY)], LimitExceeded).message


def test_buffer_longer_than_its_values_is_accepted() -> None:
    header = forge(buffers={(X_VALUES, LENGTH): 64, (0, LENGTH): 8})
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (parsed,) = stream.decode([(header, FORGED_BODY)])

    assert tensor_of(parsed, 0, ColumnType("int64")).tolist() == list(range(ROWS))


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", ["string", "list"])
def test_truncated_body_is_rejected(name: str, compression: str | None) -> None:
    """Without its last byte, its second half, or most of it."""
    schema, (header, body) = messages(
        batch_of(x=x_of(), s=PASSTHROUGH_COLUMNS[name]), compression=compression
    )
    stream = Stream(contract_of(), schema[0])
    stream.decode([(header, body)])

    for length in (len(body) - 1, len(body) // 2, 8, 0):
        assert "bytes" in decode_error(stream, [(header, body[:length])], MalformedInput).message


def test_trailing_body_bytes_are_ignored() -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (parsed,) = stream.decode([(FORGED_HEADER, FORGED_BODY + b"more")])

    assert parsed.rows == ROWS


@pytest.mark.parametrize("other", [["x"], ["x", "s", "n", "n"]])
def test_batch_of_another_schema_is_rejected(other: list[str]) -> None:
    columns = [FORGED.column(name) for name in other]
    _, message = messages(pa.record_batch(columns, names=[str(i) for i in range(len(other))]))
    stream = Stream(contract_of(), FORGED_SCHEMA)

    assert "its schema requires 3 in 7" in decode_error(stream, [message], MalformedInput).message


def test_second_schema_is_rejected() -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(FORGED_SCHEMA, b"")], MalformedInput)

    assert "a second schema" in error.message


def test_tensor_message_is_rejected() -> None:
    """The IPC format has tensor messages; a stream of batches does not."""
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.zeros(3)), sink)
    header = ipc.header_of(sink.getvalue())
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(header, bytes(24))], MalformedInput)

    assert "wanted a record batch, got kind 4" in error.message


def test_lists_of_negative_size_are_rejected() -> None:
    """At any depth. Pyarrow accepts such a schema and fails later."""
    kind = pa.list_(pa.int8(), 77)
    for arrow in (kind, pa.struct([("a", kind)]), pa.map_(pa.int8(), kind)):
        header = ipc.header_of(pa.schema([("x", pa.int64()), ("y", arrow)]).serialize())
        size, wrong = struct.pack("<i", 77), struct.pack("<i", -77)
        assert header.count(size) == 1

        with pytest.raises(MalformedInput, match="`y` has lists of a negative size"):
            Stream(contract_of(), header.replace(size, wrong))


def test_buffer_longer_than_the_body_is_rejected() -> None:
    """Even if the values need only the bytes of the body."""
    schema, (header, body) = messages(batch_of(x=x_of()))
    claims = struct.pack("<qq", 0, 8 * ROWS)
    assert header.count(claims) == 1
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header.replace(claims, struct.pack("<qq", 0, 1 << 40)), body)],
                 MalformedInput)  # fmt: skip


def test_batch_without_its_dictionary_is_rejected() -> None:
    schema, _, batch = messages(batch_of(x=x_of(), d=OTHER["dictionary"]))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [batch], MalformedInput)


def test_index_outside_its_dictionary_is_rejected() -> None:
    """The dictionary is from another batch and has one value less."""
    short = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a"]))
    long = pa.DictionaryArray.from_arrays(pa.array([1], pa.int8()), pa.array(["a", "b"]))
    schema, dictionary, _ = messages(batch_of(x=x_of(1), d=short))
    _, _, batch = messages(batch_of(x=x_of(1), d=long))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [dictionary, batch], MalformedInput)


# Overlapping buffers: one body declared as the data of every column.

SHARED_ROWS = 1000
SHARED = {f"c{index}": x_of(SHARED_ROWS) for index in range(50)}


def overlapping(batch: pa.RecordBatch, length: int) -> tuple[bytes, bytes]:
    """Returns a header in which many buffers are the whole of one short body."""
    header = ipc.header_of(batch.serialize())
    read = ipc.read_batch(header, ipc.read_message(header))
    buffers = list(read.buffers)
    for index in range(0, len(buffers), 2):
        if length > 8 * SHARED_ROWS or buffers[index + 1] == 8 * SHARED_ROWS:
            buffers[index : index + 2] = 0, length
        else:
            buffers[index : index + 2] = 0, 0
    rendered = ipc.BatchTemplate(batch.schema).render(
        SHARED_ROWS, list(read.nodes), buffers, length
    )
    return bytes(rendered), bytes(length)


@pytest.mark.parametrize("length", [8 * SHARED_ROWS, 64 * SHARED_ROWS], ids=["values", "more"])
@pytest.mark.parametrize("name", ["plain", "empty binary"])
def test_overlapping_columns_do_not_amplify_the_response(name: str, length: int) -> None:
    """Otherwise a response could have fifty times the bytes of its request."""
    other = {} if name == "plain" else {"b": pa.array([b""] * SHARED_ROWS, pa.binary(0))}
    batch = batch_of(x=x_of(SHARED_ROWS), **other, **SHARED)
    stream = Stream(contract_of(), header_of(batch.schema), bytes=length)
    frames: list[bytes] = []

    with contextlib.suppress(LimitExceeded, MalformedInput):
        frames = stream.respond([overlapping(batch, length)])

    padding = 2 * ALIGNMENT * batch.num_columns
    answered = sum(len(read_flight_data(frame).body) for frame in frames)
    assert answered <= length + len(output_of(SHARED_ROWS)) + padding


def test_overlapping_inputs_do_not_amplify_the_batch() -> None:
    """The arena has a copy of each input; their sum might never fit."""
    contract = contract_of(*(spec(name, "int64") for name in SHARED))
    batch = batch_of(**SHARED)
    length = 8 * SHARED_ROWS
    stream = Stream(contract, header_of(batch.schema), bytes=length)
    parsed: list[ParsedBatch] = []

    with contextlib.suppress(LimitExceeded, MalformedInput):
        parsed = stream.decode([overlapping(batch, length)])

    assert sum(stop - start for each in parsed for start, stop in each.tensors) <= length


def test_columns_without_overlap_are_accepted() -> None:
    """The same columns, each with its own bytes."""
    batch = batch_of(x=x_of(SHARED_ROWS), **SHARED)
    schema, message = messages(batch)
    stream = Stream(contract_of(), schema[0], bytes=len(message[1]))

    (response,) = stream.read(stream.respond([message]))

    assert response.columns[:-2] == batch.columns[1:]


# Limits of a batch, at each limit and above it.


@pytest.mark.parametrize("compression", CODECS)
def test_rows_are_limited(compression: str | None) -> None:
    schema, fits, exceeds = messages(
        batch_of(x=x_of(ROWS)), batch_of(x=x_of(ROWS + 1)), compression=compression
    )
    stream = Stream(contract_of(), schema[0], rows=ROWS)

    stream.decode([fits])
    error = decode_error(stream, [exceeds], LimitExceeded)

    assert f"{ROWS + 1} rows, limit {ROWS}" in error.message
    assert error.fields == {"wanted": ROWS}


def test_bytes_are_limited() -> None:
    schema, message = messages(batch_of(x=x_of(100)))
    body_bytes = len(message[1])

    Stream(contract_of(), schema[0], bytes=body_bytes).decode([message])
    stream = Stream(contract_of(), schema[0], bytes=body_bytes - 1)

    error = decode_error(stream, [message], LimitExceeded)
    assert f"{body_bytes} bytes, limit {body_bytes - 1}" in error.message


def test_headers_are_limited() -> None:
    """Headers of schemas and batches are cached, and padding can give them any length.

    The limit is the space that the configuration reserves for the header of a message.
    """
    (schema, _), (header, body) = messages(batch_of(x=x_of()))
    fits, exceeds = bytes(HEADER_BYTES_MAX - 1024), bytes(HEADER_BYTES_MAX)

    Stream(contract_of(), schema + fits).decode([(header + fits, body)])
    schema_error(LimitExceeded, contract_of(), schema + exceeds)
    stream = Stream(contract_of(), schema)

    decode_error(stream, [(header + exceeds, body)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bomb_is_rejected_by_its_declared_size(compression: str) -> None:
    """A small message declares one megabyte; it is counted before decompression."""
    column = pa.array(np.zeros(1 << 17, np.int64))
    schema, message = messages(batch_of(x=column), compression=compression)
    assert len(message[1]) < 1 << 14

    Stream(contract_of(), schema[0], bytes=1 << 20).decode([message])
    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    assert str(1 << 20) in decode_error(stream, [message], LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_bomb_in_a_dictionary_is_rejected(compression: str) -> None:
    values = pa.array(np.zeros(1 << 17, np.int64))
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column), compression=compression)

    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    decode_error(stream, rest, LimitExceeded)


def declared_in_metadata(header: bytes) -> bytes:
    """Returns the header of a zstd batch or dictionary as of Arrow 0.17.

    Version V4, with the codec in the custom metadata. pyarrow writes no such dictionaries.
    """
    message = ipc.read_message(header)
    changed = bytearray(header)
    batch = message.table
    if message.kind == ipc.DICTIONARY_BATCH:
        batch = ipc._target_at(header, batch, ipc._DICTIONARY_DATA)
    compression = 4 + 2 * ipc._BATCH_COMPRESSION
    struct.pack_into(
        "<H", changed, batch - struct.unpack_from("<i", header, batch)[0] + compression, 0
    )
    key, value = (
        struct.pack("<I", len(text)) + text + bytes(4 - len(text) % 4)
        for text in (b"ARROW:experimental_compression", b"zstd")
    )
    texts = key + value
    texts += bytes(-(76 + len(texts)) % 8)
    metadata = struct.pack("<II4HiII", 1, 12, 8, 12, 4, 8, 8, 8, 4 + len(key)) + texts
    table = 48 + len(metadata) + message.table - 28
    root = struct.pack("<I7H6x", 24, 14, 24, 20, 22, 4, 8, 16)
    fields = (20, table, message.body_bytes, 8, ipc.METADATA_V5 - 1, message.kind)
    return root + struct.pack("<iIqIhBx", *fields) + metadata + bytes(changed)


@pytest.mark.parametrize("is_dictionary", [False, True])
def test_compression_declared_in_custom_metadata_is_rejected(is_dictionary: bool) -> None:
    """Its buffers would be decompressed without a check of their declared sizes."""
    column = pa.array(np.zeros(1 << 17, np.int64))
    if is_dictionary:
        column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), column)
    schema, (header, body), *rest = messages(batch_of(x=column), compression="zstd")
    stream = Stream(contract_of(), schema[0])

    error = decode_error(stream, [(declared_in_metadata(header), body), *rest], MalformedInput)

    assert "ARROW:experimental_compression" in error.message


def test_dictionary_input_is_limited_after_decoding() -> None:
    """Short indices of one long value exceed the limit only when decoded."""
    values = fixed_list(numbers(1000, pa.int64()), 1000)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    contract = contract_of(spec("x", "fixed_size_list<int64>[1000]"))

    Stream(contract, schema[0], bytes=800_000).decode(rest)
    stream = Stream(contract, schema[0], bytes=799_999)

    assert "has 800000 bytes" in decode_error(stream, rest, LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 1 << 27])
def test_compressed_buffer_with_a_huge_declared_length_is_rejected(
    length: int, compression: str
) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    forged = struct.pack("<q", length) + body[8:]
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, forged)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [0, 1, 7999, 8001, 65536, -2, -(2**63)])
def test_compressed_buffer_with_a_wrong_declared_length_is_rejected(
    length: int, compression: str
) -> None:
    """The buffer has 8000 bytes. Below the limit, decompression detects the difference."""
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    assert struct.unpack_from("<q", body)[0] == 8000
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, struct.pack("<q", length) + body[8:])], MalformedInput)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("declared", [8, 8000, 1 << 20])
def test_bomb_expands_only_to_its_declared_size(declared: int, compression: str) -> None:
    """64 MiB in a small message, with a smaller declared size."""
    zeros = pa.array(np.zeros(8 << 20, np.int64))
    (schema, _), (header, body) = messages(batch_of(x=zeros), compression=compression)
    assert struct.unpack_from("<q", body)[0] == 64 << 20 and len(body) < 1 << 20
    stream = Stream(contract_of(), schema, rows=1 << 24)
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        decode_error(stream, [(header, struct.pack("<q", declared) + body[8:])], MalformedInput)
    finally:
        pa.set_memory_pool(default)
    assert declared <= pool.max_memory() <= declared + (1 << 16)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_invalid_compressed_bytes_are_rejected(compression: str) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, body[:8] + bytes(len(body) - 8))], MalformedInput)


def patched(header: bytes, old: tuple[int, int], new: tuple[int, int]) -> bytes:
    """Returns a header with one pair of numbers replaced, for headers no template can render."""
    before = struct.pack("<qq", *old)
    assert header.count(before) == 1
    return header.replace(before, struct.pack("<qq", *new))


@pytest.mark.parametrize("start", [-8, 1 << 20, 2**63 - 1])
@pytest.mark.parametrize("length", [4, 600, 2**62])
def test_compressed_buffer_outside_the_body_is_rejected(start: int, length: int) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression="zstd")
    read = ipc.read_batch(header, ipc.read_message(header))
    forged = patched(header, (read.buffers[2], read.buffers[3]), (start, length))
    stream = Stream(contract_of(), schema[0])

    error = decode_error(stream, [(forged, body)], MalformedInput)

    assert "a compressed buffer is not inside the body" in error.message


STRING_BATCH = batch_of(x=x_of(), s=pa.array(["abcd", "", "ef", None, "g"]))


@pytest.mark.parametrize("compression", CODECS)
def test_string_bytes_are_limited(compression: str | None) -> None:
    """The text has seven bytes, compressed or not."""
    schema, message = messages(STRING_BATCH, compression=compression)

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    assert "string bytes, limit 6" in decode_error(stream, [message], LimitExceeded).message


def test_string_bytes_are_limited_in_converted_batches() -> None:
    """The list column makes pyarrow convert the batch."""
    columns = {"x": x_of(), "s": STRING_BATCH.column("s"), "l": OTHER["list"]}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    decode_error(stream, [message], LimitExceeded)


def test_string_bytes_of_all_columns_are_added() -> None:
    columns = {"x": x_of(), "a": STRING_BATCH.column("s"), "b": STRING_BATCH.column("s")}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=14).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=13)

    decode_error(stream, [message], LimitExceeded)


def test_total_dictionary_bytes_of_a_stream_are_limited() -> None:
    """Deltas add up; a replaced dictionary is not counted."""
    grown = [list(range(100 * n)) for n in range(1, 30)]
    batches = [
        batch_of(x=pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(values)))
        for values in grown
    ]
    schema, *deltas = messages(*batches, emit_dictionary_deltas=True)
    replaced = [message for batch in batches[:4] * 20 for message in messages(batch)[1:]]

    Stream(contract_of(), schema[0], bytes=8000).decode(replaced)
    stream = Stream(contract_of(), schema[0], bytes=8000)

    message = decode_error(stream, deltas, LimitExceeded).message
    assert "dictionaries of the stream too large" in message and "bytes, limit 8000" in message


def test_dictionaries_of_unknown_ids_are_rejected() -> None:
    """A schema has as many dictionaries as columns and nested values of this type."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    _, first, second, _ = messages(batch_of(x=x_of(3), d=column, e=column))
    for columns, accepted in (({}, []), ({"d": column}, [first, first])):
        stream = Stream(contract_of(), messages(batch_of(x=x_of(3), **columns))[0][0])
        assert not stream.decode(accepted)
        error = decode_error(stream, [second], MalformedInput)
        assert f"has {len(columns)} dictionaries" in error.message


def test_dictionaries_in_a_struct_are_replaced() -> None:
    """Each of the two is a dictionary of the schema."""

    def batch_with(*values: str) -> pa.RecordBatch:
        column = pa.array(values).dictionary_encode()
        return batch_of(x=x_of(2), d=pa.StructArray.from_arrays([column, column], ["a", "b"]))

    schema, *rest = messages(batch_with("a", "b"), batch_with("c", "d"))
    assert len(rest) == 6
    stream = Stream(contract_of(), schema[0])

    kept = [parsed.passthrough[0].field(1).to_pylist() for parsed in stream.decode(rest)]

    assert kept == [["a", "b"], ["c", "d"]]


def test_replaced_dictionary_is_released_before_the_first_batch() -> None:
    """The other dictionary of the schema has not arrived, so nothing is decoded yet."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    schema, first, *_ = messages(batch_of(x=x_of(3), d=column, e=column))
    stream = Stream(contract_of(), schema[0])
    body = np.frombuffer(first[1], np.uint8).copy()
    reference = weakref.ref(body)
    stream.codec.decode(memoryview(first[0]), memoryview(body), b"")
    del body
    assert reference() is not None
    stream.decode([first])
    assert reference() is None


# Fuzzing.

EXPECTED_ERRORS = (MalformedInput, LimitExceeded, ContractError)
CASES = [
    messages(batch_of(**columns), **options)
    for columns in (
        {"x": x_of()},
        {"x": x_of(), "s": STRINGS["string"], "n": FIXED_WIDTH["list of nulls and numbers"]},
        {"x": x_of(), "l": OTHER["list"], "t": OTHER["struct"]},
        {"x": x_of().dictionary_encode(), "d": OTHER["dictionary in a struct"]},
        {"x": x_of(), "v": OTHER["string view"], "u": OTHER["dense union"]},
    )
    for options in ({}, {"compression": "lz4"}, {"metadata_version": pa.ipc.MetadataVersion.V4})
]


@st.composite
def mutated(draw: st.DrawFn, raw: bytes) -> bytes:
    """Draws real bytes with a few words overwritten by any value, perhaps cut."""
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 4)) if raw else 0):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        index = draw(st.integers(0, max(len(changed) - width, 0)))
        value = draw(
            st.sampled_from([0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)])
            | st.integers(0, (1 << 8 * width) - 1)
            | st.integers(0, 255)
        )
        changed[index : index + width] = value.to_bytes(width, "little")
    is_cut = draw(st.integers(0, 9)) == 0
    return bytes(changed[: draw(st.integers(0, len(changed)))] if is_cut else changed)


@st.composite
def malformed_streams(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """Draws a real stream with one changed header, body or both."""
    stream = list(draw(st.sampled_from(CASES)))
    index = draw(st.integers(0, len(stream) - 1) | st.just(len(stream) - 1))
    header, body = stream[index]
    what = draw(st.sampled_from(["header", "body", "both"]))
    if what != "body":
        header = draw(mutated(header))
    if what != "header":
        body = draw(mutated(body))
    stream[index] = header, body
    return stream


@settings(deadline=None, max_examples=500)
@given(malformed_streams())
def test_malformed_stream_is_rejected_or_answered(
    stream_messages: list[tuple[bytes, bytes]],
) -> None:
    """Only the expected errors occur, and accepted batches have complete tensors and responses."""
    (header, _), *rest = stream_messages
    with contextlib.suppress(*EXPECTED_ERRORS):
        stream = Stream(contract_of(), header, bytes=1 << 20, rows=1 << 16, string_bytes=1 << 18)
        for parsed in stream.decode(rest):
            for start, stop in parsed.tensors:
                assert 0 <= start <= stop <= len(parsed.body)
                assert stop - start == 8 * parsed.rows
            prepared = stream.codec.prepare(parsed, memoryview(output_of(parsed.rows)))
            for frame in map(b"".join, stream.codec.frames(prepared)):
                assert len(read_flight_data(frame).header)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_messages_raise_only_expected_errors(header: bytes, body: bytes) -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    with contextlib.suppress(*EXPECTED_ERRORS):
        stream.decode([(header, body)])
    with contextlib.suppress(*EXPECTED_ERRORS):
        Stream(contract_of(), header)


@pytest.mark.parametrize("dtype_name", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("kind", [pa.decimal128(38, 10), pa.decimal256(50, 10)], ids=str)
def test_decimal_does_not_depend_on_other_rows(kind: pa.DataType, dtype_name: str) -> None:
    """Arrow's own cast, which values of over 64 bits need, rounds others differently."""
    texts = ["0.7", "1.15", "7e-10", "-0.0031149318", "922337203.6854775807"]
    entry = InputColumn(tensor="x", column="x", type="decimal", conversion="number")
    contract = msgspec.structs.replace(contract_of(spec("x", dtype_name)), sources=(entry,))

    def converted(values: list[Decimal]) -> list[Any]:
        schema, (header, body) = messages(batch_of(x=pa.array(values, kind)))
        stream = Stream(contract, schema[0])
        [parsed] = stream.decode([(header, body)])
        parsed_type = ColumnType(dtype_name)
        return tensor_of(parsed, 0, parsed_type).tolist()

    for text in texts:
        alone = converted([Decimal(text)])
        beside = converted([Decimal(2) ** 70, Decimal(text)])
        assert beside[1:] == alone
        if dtype_name == "float64":
            assert alone == [float(text)]
