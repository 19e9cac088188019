"""Schemas that the Flight codec accepts and rejects."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest
from support.arrow_memory import peak_of
from support.flight_streams import (
    OTHER,
    ROWS,
    Stream,
    batch_of,
    contract_of,
    header_of,
    messages,
    nested,
    results_of,
    schema_error,
    spec,
    x_of,
)

from iskander.arrow import ipc
from iskander.errors import ContractError, LimitExceeded, MalformedInput


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
