"""A stream's batches: pyarrow on both sides, and hostile bytes in between.

Requests are made by pyarrow's writer; results are made by hand, as a worker would leave them; what
comes out is put together into an IPC stream that pyarrow reads and validates.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.arrow import ipc
from iskander.config.schema import HEADER_BYTES_MAX, LimitsConfig
from iskander.contract.column_types import ColumnType, parse_column_type
from iskander.contract.manifest import Passthrough
from iskander.contract.tensors import ALIGNMENT, Contract, TensorSpec, body_layout
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.protocols.flight import dictionaries as flight_dictionaries
from iskander.protocols.flight.codec import LongMessage, ParsedBatch, StreamCodec
from iskander.protocols.flight.data import read_flight_data
from iskander.protocols.flight.plan import Plan

LIMITS = LimitsConfig()
ROWS = 5
END_OF_STREAM = ipc.CONTINUATION + bytes(4)
HEAD = b"what the caller sends along"


def spec(name: str, type_text: str) -> TensorSpec:
    column_type = parse_column_type(type_text)
    return TensorSpec(name, name, column_type, column_type.shape)


OUTPUTS = (spec("score", "float32"), spec("mask", "fixed_size_list<bool>[3]"))


def contract_of(
    *inputs: TensorSpec, passthrough: Passthrough = "all", rows_fixed: int | None = None
) -> Contract:
    return Contract(inputs or (spec("x", "int64"),), OUTPUTS, passthrough, rows_fixed)


def output_of(rows: int) -> bytes:
    """Results in the arena: scores that count, and masks of a pattern; padding is not zero."""
    (score, mask), end = body_layout(OUTPUTS, rows)
    output = bytearray(b"\xaa" * end)
    output[score : score + 4 * rows] = np.arange(rows, dtype=np.float32).tobytes()
    output[mask : mask + OUTPUTS[1].buffer_bytes(rows)] = np.packbits(
        np.arange(3 * rows) % 2 == 0, bitorder="little"
    ).tobytes()
    return bytes(output)


def results_of(rows: int) -> list[pa.Array]:
    """The same results as arrays."""
    return [
        pa.array(np.arange(rows, dtype=np.float32)),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * rows) % 2 == 0), 3),
    ]


def batch_of(**columns: pa.Array) -> pa.RecordBatch:
    return pa.record_batch(list(columns.values()), names=list(columns))


def x_of(rows: int = ROWS) -> pa.Array:
    return pa.array(range(rows), pa.int64())


def messages(*batches: pa.RecordBatch, **options: Any) -> list[tuple[bytes, bytes]]:
    """Header and body of every message of a stream, its schema first."""
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
    """The bytes at an odd address, as they come from gRPC."""
    return memoryview(b"." + raw)[1:]


class Stream:
    """One stream and its codec.

    Args:
        limits: Beyond the defaults, by name.
    """

    def __init__(self, contract: Contract, schema_header: bytes, **limits: int) -> None:
        settings_ = msgspec.structs.replace(LIMITS, **limits)
        self.plan = Plan(schema_header, contract, settings_)
        self.codec = StreamCodec(self.plan, settings_)

    def decode(self, messages: Iterable[tuple[bytes, bytes]]) -> list[ParsedBatch]:
        decoded = (self.codec.decode(memoryview(h), unaligned(b), HEAD) for h, b in messages)
        return [arrived for arrived in decoded if arrived is not None]

    def answer(self, messages: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
        """The frames of all responses."""
        frames = []
        for arrived in self.decode(messages):
            taken = self.codec.prepare(arrived, memoryview(output_of(arrived.rows)))
            frames += map(b"".join, self.codec.frames(taken))
        return frames

    def read(self, frames: Iterable[bytes]) -> list[pa.RecordBatch]:
        """What a client makes of the frames: pyarrow, on a stream put together from them."""
        stream = [ipc.encapsulate(self.plan.response_header)]
        for frame in frames:
            data = read_flight_data(frame)
            stream.append(ipc.encapsulate(data.header, data.body))
        reader = pa.ipc.open_stream(pa.py_buffer(b"".join((*stream, END_OF_STREAM))))
        batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
        return batches


def buffer_of(arrived: ParsedBatch, index: int) -> memoryview:
    """One of a request's buffers, wherever it is."""
    if arrived.portions:
        return arrived.portions[0].tensors[index]
    start, stop = arrived.tensors[index]
    return arrived.body[start:stop]


def tensor_of(arrived: ParsedBatch, index: int, column_type: ColumnType) -> np.ndarray:
    """The elements that were cut out for one input, flat."""
    raw = np.frombuffer(buffer_of(arrived, index), np.uint8)
    count = arrived.rows * int(np.prod(column_type.shape))
    if column_type.dtype_name == "bool":
        return np.unpackbits(raw, count=count, bitorder="little").astype(bool)
    return raw.view(column_type.dtype.numpy)


def flat(array: pa.Array) -> np.ndarray:
    """All innermost values of a column without nulls, from its own Python values."""
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

# Columns of five rows that come back as they went in.
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
PASSED = FIXED_WIDTH | STRINGS | OTHER
CODECS = [None, "lz4", "zstd"]


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("rows", [0, 1, ROWS, 9])
def test_results_alone_come_back(rows: int, compression: str | None) -> None:
    """No passthrough: given the bytes that a worker left, pyarrow reads the results from them."""
    contract = contract_of(passthrough="none")
    schema, *rest = messages(batch_of(x=x_of(rows)), compression=compression)
    stream = Stream(contract, schema[0])

    (batch,) = stream.read(stream.answer(rest))

    assert batch.schema.names == ["score", "mask"]
    assert batch.columns == results_of(rows)


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", PASSED)
def test_a_column_that_is_passed_through_comes_back(name: str, compression: str | None) -> None:
    """Whole, from its middle, and without rows; beside another column before and after it."""
    other = pa.array([1, None, 3, 4, None], pa.int8())
    whole = batch_of(before=other, column=PASSED[name], x=x_of(), after=other)
    for batch in (whole, whole.slice(1, 3), whole.slice(2, 1), whole.slice(0, 0)):
        schema, *rest = messages(batch, compression=compression)
        stream = Stream(contract_of(), schema[0])

        (answer,) = stream.read(stream.answer(rest))

        assert answer.schema.names == ["before", "column", "after", "score", "mask"]
        assert answer.schema.field("column") == batch.schema.field("column")
        expected = [batch.column(index) for index in (0, 1, 3)]
        for got, want in zip(answer.columns, expected + results_of(batch.num_rows), strict=True):
            assert got.to_pylist() == want.to_pylist()


@pytest.mark.parametrize("name", [*FIXED_WIDTH, *STRINGS])
def test_the_usual_column_is_not_parsed(name: str) -> None:
    """The fast path is taken where it can be: the response is made of the request's own bytes."""
    schema, *rest = messages(batch_of(x=x_of(), column=PASSED[name]))
    stream = Stream(contract_of(), schema[0])

    (arrived,) = stream.decode(rest)

    assert stream.plan.is_response_plain and not stream.plan.is_converted
    assert arrived.passthrough == []
    assert bytes(arrived.body) == rest[0][1]


@pytest.mark.parametrize("name", OTHER)
def test_the_unusual_column_is_left_to_pyarrow(name: str) -> None:
    schema, *_ = messages(batch_of(x=x_of(), column=PASSED[name]))
    stream = Stream(contract_of(), schema[0])

    assert stream.plan.is_converted and not stream.plan.is_response_plain


def test_every_buffer_of_a_response_is_on_a_boundary() -> None:
    """Columns of odd lengths are passed through, and readers that bind to buffers still may."""
    columns = {str(index): column for index, column in enumerate((FIXED_WIDTH | STRINGS).values())}
    schema, *rest = messages(batch_of(x=x_of(), **columns))
    stream = Stream(contract_of(), schema[0])

    (frame,) = stream.answer(rest)

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
def test_metadata_of_the_application_comes_back_with_its_batch(name: str) -> None:
    schema, *rest = messages(batch_of(x=x_of(), column=PASSED[name]))
    stream = Stream(contract_of(), schema[0])

    frames = [read_flight_data(frame) for frame in stream.answer(rest)]

    assert [frame.app_metadata for frame in frames] == [b""] * (len(frames) - 1) + [HEAD]


@pytest.mark.parametrize("passthrough", ["all", ("id", "other"), ("other",), (), "none"])
def test_only_what_the_contract_passes_through_comes_back(passthrough: Passthrough) -> None:
    """In the order of the request's columns; inputs too, where they are named."""
    contract = contract_of(spec("id", "int64"), passthrough=passthrough)
    other = {"other": x_of()} if "other" in passthrough or passthrough == "all" else {}
    schema, *rest = messages(batch_of(**other, id=x_of()))
    stream = Stream(contract, schema[0])

    (answer,) = stream.read(stream.answer(rest))

    wanted = ["other"] if passthrough == "all" else [n for n in ("other", "id") if n in passthrough]
    if passthrough == "none":
        wanted = []
    assert answer.schema.names == [*wanted, "score", "mask"]


@pytest.mark.parametrize("name", ["n", "o", "one", "none", "non"])
def test_none_is_no_list_of_letters(name: str) -> None:
    """An input whose name is a part of the word `none` is passed through as little as any other."""
    schema, *rest = messages(batch_of(**{name: x_of()}))
    stream = Stream(contract_of(spec(name, "int64"), passthrough="none"), schema[0])

    (answer,) = stream.read(stream.answer(rest))

    assert answer.schema.names == ["score", "mask"]


def test_a_passed_through_column_that_is_not_there_is_not_missed() -> None:
    schema, *rest = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(passthrough=("id",)), schema[0])

    (answer,) = stream.read(stream.answer(rest))

    assert answer.schema.names == ["score", "mask"]


def test_fields_keep_their_metadata_and_nullability() -> None:
    """Of the columns; that of the schema is the sender's business."""
    schema = pa.schema(
        [pa.field("x", pa.int64(), False), pa.field("id", pa.int8(), False, {"unit": "m"})],
        metadata={"pandas": "{}"},
    )
    batch = pa.RecordBatch.from_arrays([x_of(), pa.array(range(ROWS), pa.int8())], schema=schema)
    (header, _), *rest = messages(batch)
    stream = Stream(contract_of(), header)

    (answer,) = stream.read(stream.answer(rest))

    assert answer.schema.field("id").equals(schema.field("id"), check_metadata=True)
    assert answer.schema.metadata is None


# Batches whose header is, byte for byte, one that came before.


@pytest.mark.parametrize("name", [*FIXED_WIDTH, *STRINGS])
def test_batches_of_one_header_have_bodies_of_their_own(name: str) -> None:
    """Three bodies under one header: every tensor and every answer is of its own batch."""
    first = batch_of(x=x_of(), column=PASSED[name])
    (schema, _), (header, body) = messages(first)
    read = ipc.read_batch(header, ipc.read_message(header))
    at = read.buffers[2]
    bodies = [
        body[:at] + np.arange(n, n + ROWS).tobytes() + body[at + 8 * ROWS :] for n in range(3)
    ]
    stream = Stream(contract_of(), schema)

    arrived = stream.decode([(header, each) for each in bodies])
    answers = stream.read(stream.answer([(header, each) for each in bodies]))

    assert [tensor_of(each, 0, ColumnType("int64"))[0] for each in arrived] == [0, 1, 2]
    assert [answer.column("column").to_pylist() for answer in answers] == [
        PASSED[name].to_pylist()
    ] * 3


def test_columns_passed_through_under_one_header_are_those_of_their_batch() -> None:
    batches = [batch_of(x=x_of(), id=pa.array(range(n, n + ROWS))) for n in range(3)]
    (schema, _), *rest = messages(*batches)
    assert len({header for header, _ in rest}) == 1
    stream = Stream(contract_of(), schema)

    answers = stream.read(stream.answer(rest))

    assert [answer.column("id") for answer in answers] == [batch.column("id") for batch in batches]


def test_a_header_that_was_true_of_one_body_is_not_of_a_shorter_one() -> None:
    (schema, _), (header, body) = messages(batch_of(x=x_of()))
    stream = Stream(contract_of(), schema)
    stream.decode([(header, body)])

    for length in (0, 8, len(body) - 1):
        with pytest.raises(MalformedInput, match=f"bytes, got {length}"):
            stream.decode([(header, body[:length])])


def test_a_header_that_was_true_of_some_text_is_not_of_any() -> None:
    """Offsets are in the body: of each body they are looked at."""
    (schema, _), (header, body) = messages(batch_of(x=x_of(), s=STRINGS["string"]))
    read = ipc.read_batch(header, ipc.read_message(header))
    offsets = read.buffers[6]
    hostile = body[:offsets] + struct.pack("<6i", 0, 1 << 30, -1, 7, 7, 7) + body[offsets + 24 :]
    stream = Stream(contract_of(), schema)
    stream.decode([(header, body)])

    with pytest.raises(MalformedInput, match="column `s`"):
        stream.decode([(header, hostile)])


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
def test_an_input_is_cut_out_as_the_tensor_that_it_is(name: str, compression: str | None) -> None:
    """Whole and from its middle, where the sender's buffers begin before its values."""
    type_text, column = INPUTS[name]
    whole = batch_of(before=x_of(), x=column)
    for batch in (whole, whole.slice(1, 3), whole.slice(3), whole.slice(0, 0)):
        schema, *rest = messages(batch, compression=compression)
        stream = Stream(contract_of(spec("x", type_text)), schema[0])

        (arrived,) = stream.decode(rest)

        assert arrived.rows == batch.num_rows
        got = tensor_of(arrived, 0, parse_column_type(type_text))
        np.testing.assert_array_equal(got, flat(batch.column("x")).astype(got.dtype))


@pytest.mark.parametrize("name", INPUTS)
def test_an_input_of_older_metadata_is_read(name: str) -> None:
    type_text, column = INPUTS[name]
    schema, *rest = messages(
        batch_of(x=column, s=STRINGS["string"]), metadata_version=pa.ipc.MetadataVersion.V4
    )
    stream = Stream(contract_of(spec("x", type_text)), schema[0])

    (arrived,) = stream.decode(rest)
    (answer,) = stream.read(stream.answer(rest))

    got = tensor_of(arrived, 0, parse_column_type(type_text))
    np.testing.assert_array_equal(got, flat(column).astype(got.dtype))
    assert answer.column("s").equals(STRINGS["string"])


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_columns_may_come_in_any_order(order: tuple[str, ...]) -> None:
    """The tensors come out in the contract's order, the passed-through column stays in place."""
    columns = {"a": x_of(), "b": numbers(ROWS, pa.bool_()), "c": STRINGS["string"]}
    contract = contract_of(spec("b", "bool"), spec("a", "int64"))
    schema, *rest = messages(batch_of(**{name: columns[name] for name in order}))
    stream = Stream(contract, schema[0])

    (arrived,) = stream.decode(rest)
    (answer,) = stream.read(stream.answer(rest))

    assert tensor_of(arrived, 0, ColumnType("bool")).tolist() == columns["b"].to_pylist()
    assert tensor_of(arrived, 1, ColumnType("int64")).tolist() == columns["a"].to_pylist()
    assert answer.column("c").equals(columns["c"])


@pytest.mark.parametrize("compression", CODECS)
def test_a_dictionary_encoded_input_is_decoded(compression: str | None) -> None:
    """Two batches whose dictionary changes in between, sliced at will."""
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), pa.array([7, 8]))
    second = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([1, 2, 3]))
    batches = [batch_of(x=first), batch_of(x=first).slice(1, 1), batch_of(x=second)]
    schema, *rest = messages(*batches, compression=compression)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7, 8], [7], [3, 1]]


def test_a_dictionary_that_grows_by_deltas_is_put_together() -> None:
    first = pa.DictionaryArray.from_arrays(pa.array([1, 0], pa.int8()), pa.array([7, 8]))
    grown = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), pa.array([7, 8, 9]))
    schema, *rest = messages(batch_of(x=first), batch_of(x=grown), emit_dictionary_deltas=True)
    stream = Stream(contract_of(), schema[0])

    tensors = [tensor_of(a, 0, ColumnType("int64")).tolist() for a in stream.decode(rest)]

    assert tensors == [[8, 7], [9, 7]]


def test_a_dictionary_encoded_list_is_decoded() -> None:
    values = fixed_list(numbers(6, pa.float32()), 3)
    column = pa.DictionaryArray.from_arrays(pa.array([1, 1, 0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    stream = Stream(contract_of(spec("x", "fixed_size_list<float32>[3]")), schema[0])

    (arrived,) = stream.decode(rest)

    got = tensor_of(arrived, 0, ColumnType("float32", (3,)))
    assert got.tolist() == [3, 4, 5, 3, 4, 5, 0, 1, 2]


def test_dictionaries_go_out_only_where_they_changed() -> None:
    """Three batches with two dictionaries: the second batch needs none of its own."""
    first, second = (
        pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(values))
        for values in (["a", "b"], ["c", "d"])
    )
    batches = [batch_of(x=x_of(2), d=column) for column in (first, first, second)]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(), schema[0])

    frames = stream.answer(rest)

    kinds = [ipc.read_message(read_flight_data(frame).header).kind for frame in frames]
    batch, dictionary = ipc.RECORD_BATCH, ipc.DICTIONARY_BATCH
    assert kinds == [dictionary, batch, batch, dictionary, batch]
    answers = stream.read(frames)
    assert [answer.column("d").to_pylist() for answer in answers] == [
        ["a", "b"],
        ["a", "b"],
        ["c", "d"],
    ]


LARGE_TEXTS = [f"{index:032d}" for index in range(200_000)]
"""More than is decoded on the loop."""


def large_dictionary(kind: pa.DataType | None = None) -> pa.DictionaryArray:
    values = pa.array(LARGE_TEXTS, kind)
    return pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), values)


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8(), pa.string_view()])
@pytest.mark.parametrize("is_input", [True, False])
def test_a_dictionary_is_decoded_and_sent_once(
    is_input: bool, kind: pa.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each batch that uses it, which has 200 bytes."""
    checked = []
    make = flight_dictionaries._Validated
    monkeypatch.setattr(
        flight_dictionaries, "_Validated", lambda array: checked.append(1) or make(array)
    )
    column = large_dictionary(kind=kind)
    contract = contract_of(spec("d", "utf8")) if is_input else contract_of()
    columns = {"d": column} if is_input else {"x": x_of(2), "d": column}
    schema, dictionary, batch = messages(batch_of(**columns))
    stream = Stream(contract, schema[0])
    assert not stream.decode([dictionary])
    assert checked == [1]

    before = pa.total_allocated_bytes()
    arrived = stream.decode([batch] * 20)
    assert checked == [1] and pa.total_allocated_bytes() - before < 1 << 20

    if not is_input:
        frames = stream.answer([batch] * 20)
        assert sum(map(len, frames[2:])) < 20_000
        assert stream.read(frames)[19].column("d").to_pylist() == LARGE_TEXTS[:2]
    assert len(arrived) == 20


def test_after_a_batch_that_cannot_be_read_the_next_is() -> None:
    """The dictionaries are still there, and the reader is where a message begins."""
    column = pa.array(["a", "b", "a"]).dictionary_encode()
    schema, dictionary, batch = messages(batch_of(x=x_of(3), d=column))
    beyond = messages(batch_of(x=x_of(3), d=pa.array(["a", "b", "c"]).dictionary_encode()))[2]
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    frames: list[bytes] = []
    cut = (batch[0], batch[1][:-8])
    for bad in (beyond, cut, beyond):
        decode_error(stream, [bad], MalformedInput)
        frames += stream.answer([batch])

    answers = stream.read(frames)
    assert [answer.column("d").to_pylist() for answer in answers] == [["a", "b", "a"]] * 3


def test_what_takes_long_is_not_read_at_once() -> None:
    """A small message that expands, and a batch that would decode a dictionary anew."""
    zeros = pa.array(np.zeros(1 << 20, np.int64))
    schema, bomb = messages(batch_of(x=zeros), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    assert len(bomb[1]) < 1 << 16
    with pytest.raises(LongMessage):
        stream.codec.decode(memoryview(bomb[0]), memoryview(bomb[1]), b"", is_on_loop=True)
    assert len(stream.decode([bomb])) == 1

    columns = {"x": x_of(2), "d": pa.StructArray.from_arrays([large_dictionary()], ["d"])}
    schema, dictionary, batch = messages(batch_of(**columns))
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    with pytest.raises(LongMessage):
        stream.codec.decode(memoryview(batch[0]), memoryview(batch[1]), b"", is_on_loop=True)


def test_the_memory_of_decoded_dictionaries_is_known() -> None:
    """Beside the messages: what was compressed, and what deltas were joined to."""
    schema, dictionary, _ = messages(batch_of(x=x_of(2), d=large_dictionary()))
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes == 0

    columns = {"x": x_of(2), "d": large_dictionary()}
    schema, dictionary, _ = messages(batch_of(**columns), compression="zstd")
    stream = Stream(contract_of(), schema[0])
    stream.decode([dictionary])
    assert stream.codec.dictionary_bytes > 32 * len(LARGE_TEXTS)


def test_streams_of_one_plan_do_not_share_their_dictionaries() -> None:
    """Plans are remembered by schema, so two streams meet in one."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", "b"]))
    (header, _), *rest = messages(batch_of(x=x_of(2), d=column))
    first = Stream(contract_of(), header)
    second = Stream(contract_of(), header)
    second.codec = StreamCodec(first.plan, LIMITS)

    first.answer(rest)
    (answer,) = second.read(second.answer(rest))

    assert answer.column("d").to_pylist() == ["a", "b"]


def test_responses_of_many_lengths_are_right() -> None:
    """More different lengths than headers are kept, each twice."""
    batches = [batch_of(x=x_of(rows)) for rows in [*range(70), *range(70)]]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(passthrough="none"), schema[0])

    answers = stream.read(stream.answer(rest))

    assert [answer.columns for answer in answers] == [results_of(b.num_rows) for b in batches]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_batch_comes_back(data: st.DataObject) -> None:
    """Columns of any kind in any order, cut anywhere, compressed or not."""
    names = data.draw(st.lists(st.sampled_from(sorted(PASSED)), max_size=4))
    columns = [("x", x_of())] + [(f"{name} {i}", PASSED[name]) for i, name in enumerate(names)]
    columns = data.draw(st.permutations(columns))
    start = data.draw(st.integers(0, ROWS))
    batch = batch_of(**dict(columns)).slice(start, data.draw(st.integers(0, ROWS - start)))
    compression = data.draw(st.sampled_from(CODECS))
    schema, *rest = messages(batch, compression=compression)
    stream = Stream(contract_of(), schema[0])

    (answer,) = stream.read(stream.answer(rest))

    passed = [name for name, _ in columns if name != "x"]
    assert answer.schema.names == [*passed, "score", "mask"]
    for name in passed:
        assert answer.column(name).to_pylist() == batch.column(name).to_pylist()
    assert answer.columns[-2:] == results_of(batch.num_rows)


# What a schema may not be.


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
def test_a_schema_that_does_not_meet_the_contract_is_refused(
    fields: list[Any], inputs: str, words: list[str]
) -> None:
    """All that is wrong at once, each column by its name, with what was wanted and what came."""
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
def test_another_spelling_of_the_same_tensor_is_taken(arrow: pa.DataType, type_text: str) -> None:
    """The accepted cases beside the refused ones: the elements lie in the same order."""
    Stream(contract_of(spec("x", type_text)), header_of(pa.schema([("x", arrow)])))


def test_a_column_that_is_there_twice_is_refused() -> None:
    schema = pa.schema([("x", pa.int64()), ("a", pa.int8()), ("a", pa.int8())])

    assert "duplicate columns `a`" in schema_error(ContractError, contract_of(), header_of(schema))


def test_a_column_that_would_collide_with_a_result_is_refused() -> None:
    schema = pa.schema([("x", pa.int64()), ("score", pa.int8())])

    message = schema_error(ContractError, contract_of(), header_of(schema))

    assert "columns `score` would be passed through and are also results" in message


def test_an_input_may_be_called_like_a_result_where_it_is_not_passed_through() -> None:
    schema, *rest = messages(batch_of(score=x_of()))
    stream = Stream(contract_of(spec("score", "int64"), passthrough="none"), schema[0])

    (answer,) = stream.read(stream.answer(rest))

    assert answer.columns == results_of(ROWS)


def big_endian(schema: pa.Schema) -> bytes:
    """A schema's header with its byte order set, which pyarrow leaves out for the machine's own.

    The field is given a place in the vtable: that of a 1 which stands in the header already.
    """
    header = bytearray(header_of(schema))
    table = ipc.read_message(header).table
    vtable = table - struct.unpack_from("<i", header, table)[0]
    struct.pack_into("<H", header, vtable + 4, header.index(b"\x01\x00", table) - table)
    return bytes(header)


def test_a_big_endian_stream_is_refused() -> None:
    schema = pa.schema([("x", pa.int64())])
    Stream(contract_of(), header_of(schema))

    assert "big-endian" in schema_error(MalformedInput, contract_of(), big_endian(schema))


def test_a_stream_that_does_not_begin_with_a_schema_is_refused() -> None:
    (_, (header, _)) = messages(batch_of(x=x_of()))

    assert "begin with a schema" in schema_error(MalformedInput, contract_of(), header)


@pytest.mark.parametrize("header", [b"", b"\x00" * 64, b"\xff" * 64, b"schema"])
def test_a_schema_that_is_none_is_refused(header: bytes) -> None:
    schema_error(MalformedInput, contract_of(), header)


def nested(levels: int) -> pa.DataType:
    arrow = pa.int8()
    for _ in range(levels - 1):
        arrow = pa.list_(arrow)
    return arrow


@pytest.mark.parametrize(
    ("name", "limit", "accepted", "refused"),
    [
        ("columns", 3, [pa.int8()] * 2, [pa.int8()] * 3),
        ("nesting", 4, [nested(4)], [nested(5)]),
        ("nesting", 2, [pa.list_(pa.int8(), 3)], [pa.struct([("a", nested(2))])]),
        ("nesting", 64, [nested(64)], [nested(65)]),
    ],
)
def test_a_schema_beyond_a_limit_is_refused(
    name: str, limit: int, accepted: list[pa.DataType], refused: list[pa.DataType]
) -> None:
    """Both sides of each limit."""

    def header(types: list[pa.DataType]) -> bytes:
        fields = [(f"column {index}", arrow) for index, arrow in enumerate(types)]
        return header_of(pa.schema([("x", pa.int64()), *fields]))

    Stream(contract_of(), header(accepted), **{name: limit})

    message = schema_error(LimitExceeded, contract_of(), header(refused), **{name: limit})
    assert str(limit) in message
    assert name == "columns" or "`column 0`" in message


# What a batch may not be.


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
    ids=["int64", "bool", "list", "item of a list", "dictionary index", "dictionary value"],
)
def test_nulls_in_an_input_are_refused(
    type_text: str, column: pa.Array, compression: str | None
) -> None:
    schema, *rest = messages(batch_of(column=column), compression=compression)
    stream = Stream(contract_of(spec("column", type_text)), schema[0])

    error = decode_error(stream, rest, ContractError)

    assert "column `column` has" in error.message and "null" in error.message
    assert error.fields == {"column": "column"}


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8])
def test_a_model_with_fixed_rows_is_asked_with_any(rows: int) -> None:
    """Its lane splits them, and fills them up."""
    schema, *rest = messages(batch_of(x=x_of(rows)))
    stream = Stream(contract_of(rows_fixed=4), schema[0])

    assert stream.decode(rest)[0].rows == rows


FORGED = batch_of(x=x_of(), s=STRINGS["string"], n=FIXED_WIDTH["int32 with nulls"])
(FORGED_SCHEMA, _), (FORGED_HEADER, FORGED_BODY) = messages(FORGED)
FORGED_BATCH = ipc.read_batch(FORGED_HEADER, ipc.read_message(FORGED_HEADER))
TEMPLATE = ipc.BatchTemplate(FORGED.schema)
# Places in the flat arrays of FORGED's header; see `test_the_forger_forges_nothing_by_itself`.
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
    """The real header with some of its numbers replaced."""
    node_numbers, buffer_numbers = list(FORGED_BATCH.nodes), list(FORGED_BATCH.buffers)
    for at, number in (nodes or {}).items():
        node_numbers[at] = number
    for (buffer, part), number in (buffers or {}).items():
        buffer_numbers[2 * buffer + part] = number
    return bytes(TEMPLATE.render(rows, node_numbers, buffer_numbers, body_bytes))


def test_the_forger_forges_nothing_by_itself() -> None:
    """The numbers are where the names above say, and unchanged they are taken."""
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (answer,) = stream.read(stream.answer([(forge(), FORGED_BODY)]))

    assert answer.column("s").equals(FORGED.column("s"))
    assert answer.column("n").equals(FORGED.column("n"))
    assert FORGED_BATCH.nodes == (ROWS, 0, ROWS, 1, ROWS, 2)
    lengths = FORGED_BATCH.buffers[1::2]
    assert [lengths[at] for at in (X_VALUES, S_OFFSETS, S_DATA, N_VALUES)] == [40, 24, 6, 20]
    assert len(lengths) == 7


FORGERIES: list[tuple[str, dict[str, Any], str]] = [
    ("a row too many", {"rows": ROWS + 1}, "`x`"),
    ("a row too few", {"rows": ROWS - 1}, "`x`"),
    ("no rows", {"rows": 0}, "`x`"),
    ("an input that is shorter", {"nodes": {X_LENGTH: 4}}, "`x` has 4 values"),
    ("an input of negative length", {"nodes": {X_LENGTH: -5}}, "`x` has -5 values"),
    ("an input of huge length", {"nodes": {X_LENGTH: 2**63 - 1}}, "`x` has"),
    ("negative nulls in an input", {"nodes": {X_NULLS: -1}}, "`x` has 5 values with -1 nulls"),
    ("more nulls than values", {"nodes": {X_NULLS: 6}}, "`x` has 5 values with 6 nulls"),
    ("a passed column that is longer", {"nodes": {N_LENGTH: 6}}, "`n` has 6 values"),
    ("negative nulls in a passed column", {"nodes": {N_NULLS: -1}}, "`n`"),
    ("a string column that is longer", {"nodes": {S_LENGTH: 6}}, "`s` has 6 values"),
    (
        "an input's buffer too short",
        {"buffers": {(X_VALUES, LENGTH): 39}},
        "39 bytes at 0, requires 40",
    ),
    ("an input's buffer of negative length", {"buffers": {(X_VALUES, LENGTH): -40}}, "`x`"),
    ("an input's buffer at a negative place", {"buffers": {(X_VALUES, START): -8}}, "`x`"),
    ("an input's buffer at the least place", {"buffers": {(X_VALUES, START): -(2**63)}}, "`x`"),
    ("an input's buffer beyond the body", {"buffers": {(X_VALUES, START): LONG}}, "`x`"),
    ("an input's buffer over the end", {"buffers": {(X_VALUES, START): LONG - 39}}, "`x`"),
    ("an input's buffer far away", {"buffers": {(X_VALUES, START): 2**63 - 1}}, "`x`"),
    ("a passed buffer too short", {"buffers": {(N_VALUES, LENGTH): 19}}, "`n`"),
    ("a passed buffer of negative length", {"buffers": {(N_VALUES, LENGTH): -1}}, "`n`"),
    ("a passed buffer at a negative place", {"buffers": {(N_VALUES, START): -64}}, "`n`"),
    ("a passed buffer over the end", {"buffers": {(N_VALUES, LENGTH): LONG + 1}}, "`n`"),
    ("a passed buffer of huge length", {"buffers": {(N_VALUES, LENGTH): 2**63 - 1}}, "`n`"),
    ("a validity buffer too short", {"buffers": {(N_VALID, LENGTH): 0}}, "`n`"),
    ("a validity buffer beyond the body", {"buffers": {(N_VALID, START): LONG}}, "`n`"),
    ("string offsets too short", {"buffers": {(S_OFFSETS, LENGTH): 20}}, "`s`"),
    ("string offsets at a negative place", {"buffers": {(S_OFFSETS, START): -1}}, "`s`"),
    ("string offsets from other bytes", {"buffers": {(S_OFFSETS, START): 0}}, "`s`"),
    ("string data too short", {"buffers": {(S_DATA, LENGTH): 5}}, "`s`"),
    ("string data beyond the body", {"buffers": {(S_DATA, LENGTH): 2**40}}, "`s`"),
    ("string data that is no UTF-8", {"buffers": {(S_DATA, START): LONG - 6}}, "`s`"),
    ("a string's validity too short", {"buffers": {(S_VALID, LENGTH): 0}}, "`s`"),
    ("a body that did not come", {"body_bytes": LONG + 8}, f"{LONG + 8} bytes, got {LONG}"),
    ("a negative body", {"body_bytes": -8}, "a body of -8 bytes"),
]


@pytest.mark.parametrize(
    ("changes", "words"), [row[1:] for row in FORGERIES], ids=[row[0] for row in FORGERIES]
)
def test_a_forged_number_is_refused(changes: dict[str, Any], words: str) -> None:
    """The body is whole, and its last bytes are no text; only the header lies."""
    body = FORGED_BODY[:-6] + b"\xff" * 6
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(forge(**changes), body)], MalformedInput)

    assert words in error.message


@pytest.mark.parametrize("rows", [-1, -(2**63), 2**63 - 1])
def test_a_number_of_rows_that_cannot_be_is_refused(rows: int) -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    assert str(rows) in decode_error(stream, [(forge(rows), FORGED_BODY)], LimitExceeded).message


def test_a_claim_that_does_not_matter_is_not_held_against_the_sender() -> None:
    """A buffer may say more than its values need, as long as those are there."""
    header = forge(buffers={(X_VALUES, LENGTH): 64, (0, LENGTH): 8})
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (arrived,) = stream.decode([(header, FORGED_BODY)])

    assert tensor_of(arrived, 0, ColumnType("int64")).tolist() == list(range(ROWS))


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", ["string", "list"])
def test_a_body_cut_anywhere_is_refused(name: str, compression: str | None) -> None:
    """Cut by a byte, in the middle, and away; and announced as short as it is."""
    schema, (header, body) = messages(batch_of(x=x_of(), s=PASSED[name]), compression=compression)
    stream = Stream(contract_of(), schema[0])
    stream.decode([(header, body)])

    for length in (len(body) - 1, len(body) // 2, 8, 0):
        assert "bytes" in decode_error(stream, [(header, body[:length])], MalformedInput).message


def test_more_body_than_announced_is_taken() -> None:
    """Trailing bytes belong to nothing, and are not read."""
    stream = Stream(contract_of(), FORGED_SCHEMA)

    (arrived,) = stream.decode([(FORGED_HEADER, FORGED_BODY + b"more")])

    assert arrived.rows == ROWS


@pytest.mark.parametrize("other", [["x"], ["x", "s", "n", "n"]])
def test_a_batch_of_another_schema_is_refused(other: list[str]) -> None:
    columns = [FORGED.column(name) for name in other]
    _, message = messages(pa.record_batch(columns, names=[str(i) for i in range(len(other))]))
    stream = Stream(contract_of(), FORGED_SCHEMA)

    assert "its schema requires 3 in 7" in decode_error(stream, [message], MalformedInput).message


def test_a_second_schema_is_refused() -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(FORGED_SCHEMA, b"")], MalformedInput)

    assert "a second schema" in error.message


def test_a_message_that_is_no_batch_is_refused() -> None:
    """A tensor, which the format knows and a stream of batches does not."""
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.zeros(3)), sink)
    header = ipc.header_of(sink.getvalue())
    stream = Stream(contract_of(), FORGED_SCHEMA)

    error = decode_error(stream, [(header, bytes(24))], MalformedInput)

    assert "wanted a record batch, got kind 4" in error.message


def test_lists_of_a_negative_size_are_refused() -> None:
    """At any depth; pyarrow reads such a schema and fails in the middle of what comes next."""
    kind = pa.list_(pa.int8(), 77)
    for arrow in (kind, pa.struct([("a", kind)]), pa.map_(pa.int8(), kind)):
        header = ipc.header_of(pa.schema([("x", pa.int64()), ("y", arrow)]).serialize())
        size, wrong = struct.pack("<i", 77), struct.pack("<i", -77)
        assert header.count(size) == 1

        with pytest.raises(MalformedInput, match="`y` has lists of a negative size"):
            Stream(contract_of(), header.replace(size, wrong))


def test_a_buffer_that_is_longer_than_the_body_is_refused() -> None:
    """Though no more of it is needed than there is."""
    schema, (header, body) = messages(batch_of(x=x_of()))
    claims = struct.pack("<qq", 0, 8 * ROWS)
    assert header.count(claims) == 1
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header.replace(claims, struct.pack("<qq", 0, 1 << 40)), body)],
                 MalformedInput)  # fmt: skip


def test_a_batch_whose_dictionary_never_came_is_refused() -> None:
    schema, _, batch = messages(batch_of(x=x_of(), d=OTHER["dictionary"]))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [batch], MalformedInput)


def test_an_index_beyond_its_dictionary_is_refused() -> None:
    """Given the dictionary of another batch, which has one value less."""
    short = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), pa.array(["a"]))
    long = pa.DictionaryArray.from_arrays(pa.array([1], pa.int8()), pa.array(["a", "b"]))
    schema, dictionary, _ = messages(batch_of(x=x_of(1), d=short))
    _, _, batch = messages(batch_of(x=x_of(1), d=long))
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [dictionary, batch], MalformedInput)


# Buffers that overlap: one body, said to be every column's.

SHARED_ROWS = 1000
SHARED = {f"c{index}": x_of(SHARED_ROWS) for index in range(50)}


def overlapping(batch: pa.RecordBatch, length: int) -> tuple[bytes, bytes]:
    """A header whose buffers of eight bytes a row, or all, are the whole of a short body."""
    header = ipc.header_of(batch.serialize())
    read = ipc.read_batch(header, ipc.read_message(header))
    buffers = list(read.buffers)
    for at in range(0, len(buffers), 2):
        if length > 8 * SHARED_ROWS or buffers[at + 1] == 8 * SHARED_ROWS:
            buffers[at : at + 2] = 0, length
        else:
            buffers[at : at + 2] = 0, 0
    rendered = ipc.BatchTemplate(batch.schema).render(
        SHARED_ROWS, list(read.nodes), buffers, length
    )
    return bytes(rendered), bytes(length)


@pytest.mark.parametrize("length", [8 * SHARED_ROWS, 64 * SHARED_ROWS], ids=["values", "more"])
@pytest.mark.parametrize("name", ["plain", "empty binary"])
def test_one_body_for_many_columns_makes_no_larger_response(name: str, length: int) -> None:
    """Or a message of one size would be answered by one of fifty times that, and so on."""
    other = {} if name == "plain" else {"b": pa.array([b""] * SHARED_ROWS, pa.binary(0))}
    batch = batch_of(x=x_of(SHARED_ROWS), **other, **SHARED)
    stream = Stream(contract_of(), header_of(batch.schema), bytes=length)
    frames: list[bytes] = []

    with contextlib.suppress(LimitExceeded, MalformedInput):
        frames = stream.answer([overlapping(batch, length)])

    padding = 2 * ALIGNMENT * batch.num_columns
    answered = sum(len(read_flight_data(frame).body) for frame in frames)
    assert answered <= length + len(output_of(SHARED_ROWS)) + padding


def test_one_body_for_many_inputs_is_no_larger_batch() -> None:
    """The copy in the arena would have each of them, and might never fit."""
    contract = contract_of(*(spec(name, "int64") for name in SHARED))
    batch = batch_of(**SHARED)
    length = 8 * SHARED_ROWS
    stream = Stream(contract, header_of(batch.schema), bytes=length)
    arrived: list[ParsedBatch] = []

    with contextlib.suppress(LimitExceeded, MalformedInput):
        arrived = stream.decode([overlapping(batch, length)])

    assert sum(stop - start for each in arrived for start, stop in each.tensors) <= length


def test_columns_without_overlap_are_as_large_as_their_body() -> None:
    """The accepted case beside the refused ones: the same columns, each with bytes of its own."""
    batch = batch_of(x=x_of(SHARED_ROWS), **SHARED)
    schema, message = messages(batch)
    stream = Stream(contract_of(), schema[0], bytes=len(message[1]))

    (answer,) = stream.read(stream.answer([message]))

    assert answer.columns[:-2] == batch.columns[1:]


# Limits of a batch: both sides of each.


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
    """Plans are kept by their schema's header, and batches' headers too; padding makes any length.

    The limit is the room that the configuration leaves in a message beside its body.
    """
    (schema, _), (header, body) = messages(batch_of(x=x_of()))
    fits, exceeds = bytes(HEADER_BYTES_MAX - 1024), bytes(HEADER_BYTES_MAX)

    Stream(contract_of(), schema + fits).decode([(header + fits, body)])
    schema_error(LimitExceeded, contract_of(), schema + exceeds)
    stream = Stream(contract_of(), schema)

    decode_error(stream, [(header + exceeds, body)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_bomb_is_refused_by_what_it_says(compression: str) -> None:
    """A megabyte of zeros in some hundred bytes; counted before anything is expanded."""
    column = pa.array(np.zeros(1 << 17, np.int64))
    schema, message = messages(batch_of(x=column), compression=compression)
    assert len(message[1]) < 1 << 14

    Stream(contract_of(), schema[0], bytes=1 << 20).decode([message])
    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    assert str(1 << 20) in decode_error(stream, [message], LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_bomb_in_a_dictionary_is_refused(compression: str) -> None:
    values = pa.array(np.zeros(1 << 17, np.int64))
    column = pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), values)
    schema, *rest = messages(batch_of(x=column), compression=compression)

    stream = Stream(contract_of(), schema[0], bytes=(1 << 20) - 1)

    decode_error(stream, rest, LimitExceeded)


def test_a_dictionary_that_makes_a_large_input_is_refused() -> None:
    """Short indices and one long value: only decoded is it more than a batch may have."""
    values = fixed_list(numbers(1000, pa.int64()), 1000)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 100, pa.int8()), values)
    schema, *rest = messages(batch_of(x=column))
    contract = contract_of(spec("x", "fixed_size_list<int64>[1000]"))

    Stream(contract, schema[0], bytes=800_000).decode(rest)
    stream = Stream(contract, schema[0], bytes=799_999)

    assert "has 800000 bytes" in decode_error(stream, rest, LimitExceeded).message


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [2**62, 2**63 - 1, 1 << 27])
def test_a_compressed_buffer_that_says_too_much_is_refused(length: int, compression: str) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    forged = struct.pack("<q", length) + body[8:]
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, forged)], LimitExceeded)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("length", [0, 1, 7999, 8001, 65536, -2, -(2**63)])
def test_a_compressed_buffer_that_says_something_else_is_refused(
    length: int, compression: str
) -> None:
    """It holds 8000 bytes; within the limit, too many and too few are found when it is expanded."""
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    assert struct.unpack_from("<q", body)[0] == 8000
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, struct.pack("<q", length) + body[8:])], MalformedInput)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("declared", [8, 8000, 1 << 20])
def test_a_bomb_that_says_little_expands_to_no_more(declared: int, compression: str) -> None:
    """64 MiB in some kilobytes, of which so much is said."""
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
def test_compressed_bytes_that_are_none_are_refused(compression: str) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression=compression)
    stream = Stream(contract_of(), schema[0])

    decode_error(stream, [(header, body[:8] + bytes(len(body) - 8))], MalformedInput)


def patched(header: bytes, old: tuple[int, int], new: tuple[int, int]) -> bytes:
    """A header with one pair of its numbers replaced, where a template cannot render it."""
    before = struct.pack("<qq", *old)
    assert header.count(before) == 1
    return header.replace(before, struct.pack("<qq", *new))


@pytest.mark.parametrize("start", [-8, 1 << 20, 2**63 - 1])
@pytest.mark.parametrize("length", [4, 600, 2**62])
def test_a_compressed_buffer_outside_the_body_is_refused(start: int, length: int) -> None:
    schema, (header, body) = messages(batch_of(x=x_of(1000)), compression="zstd")
    read = ipc.read_batch(header, ipc.read_message(header))
    forged = patched(header, (read.buffers[2], read.buffers[3]), (start, length))
    stream = Stream(contract_of(), schema[0])

    error = decode_error(stream, [(forged, body)], MalformedInput)

    assert "a compressed buffer is not inside the body" in error.message


STRING_BATCH = batch_of(x=x_of(), s=pa.array(["abcd", "", "ef", None, "g"]))


@pytest.mark.parametrize("compression", CODECS)
def test_string_bytes_are_limited(compression: str | None) -> None:
    """Seven bytes of text, however they are sent."""
    schema, message = messages(STRING_BATCH, compression=compression)

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    assert "string bytes, limit 6" in decode_error(stream, [message], LimitExceeded).message


def test_string_bytes_are_limited_beside_columns_that_pyarrow_reads() -> None:
    """The same seven bytes in a batch that takes the longer way for another column's sake."""
    columns = {"x": x_of(), "s": STRING_BATCH.column("s"), "l": OTHER["list"]}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=7).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=6)

    decode_error(stream, [message], LimitExceeded)


def test_the_strings_of_several_columns_add_up() -> None:
    columns = {"x": x_of(), "a": STRING_BATCH.column("s"), "b": STRING_BATCH.column("s")}
    schema, message = messages(batch_of(**columns))

    Stream(contract_of(), schema[0], string_bytes=14).decode([message])
    stream = Stream(contract_of(), schema[0], string_bytes=13)

    decode_error(stream, [message], LimitExceeded)


def test_a_streams_dictionaries_are_limited_in_all() -> None:
    """Deltas add up for ever; a dictionary that replaces another one does not."""
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
    assert "dictionaries have" in message and "bytes, limit 8000" in message


# Fuzzing.

REFUSALS = (MalformedInput, LimitExceeded, ContractError)
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
    """Real bytes with a few words overwritten by extremes or anything, perhaps cut."""
    changed = bytearray(raw)
    for _ in range(draw(st.integers(1, 4)) if raw else 0):
        width = draw(st.sampled_from([1, 2, 4, 8]))
        at = draw(st.integers(0, max(len(changed) - width, 0)))
        value = draw(
            st.sampled_from([0, 1, (1 << 8 * width) - 1, 1 << (8 * width - 1)])
            | st.integers(0, (1 << 8 * width) - 1)
            | st.integers(0, 255)
        )
        changed[at : at + width] = value.to_bytes(width, "little")
    is_cut = draw(st.integers(0, 9)) == 0
    return bytes(changed[: draw(st.integers(0, len(changed)))] if is_cut else changed)


@st.composite
def hostile_streams(draw: st.DrawFn) -> list[tuple[bytes, bytes]]:
    """A real stream in which one message's header, body or both were changed."""
    stream = list(draw(st.sampled_from(CASES)))
    at = draw(st.integers(0, len(stream) - 1) | st.just(len(stream) - 1))
    header, body = stream[at]
    what = draw(st.sampled_from(["header", "body", "both"]))
    if what != "body":
        header = draw(mutated(header))
    if what != "header":
        body = draw(mutated(body))
    stream[at] = header, body
    return stream


@settings(deadline=None, max_examples=500)
@given(hostile_streams())
def test_a_hostile_stream_is_refused_or_answered(
    stream_messages: list[tuple[bytes, bytes]],
) -> None:
    """Nothing but our own refusals; and what is taken is whole: tensors, results, response."""
    (header, _), *rest = stream_messages
    with contextlib.suppress(*REFUSALS):
        stream = Stream(contract_of(), header, bytes=1 << 20, rows=1 << 16, string_bytes=1 << 18)
        for arrived in stream.decode(rest):
            for start, stop in arrived.tensors:
                assert 0 <= start <= stop <= len(arrived.body)
                assert stop - start == 8 * arrived.rows
            taken = stream.codec.prepare(arrived, memoryview(output_of(arrived.rows)))
            for frame in map(b"".join, stream.codec.frames(taken)):
                assert len(read_flight_data(frame).header)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_random_messages_are_refused(header: bytes, body: bytes) -> None:
    stream = Stream(contract_of(), FORGED_SCHEMA)

    with contextlib.suppress(*REFUSALS):
        stream.decode([(header, body)])
    with contextlib.suppress(*REFUSALS):
        Stream(contract_of(), header)
