"""Batches that the Flight codec rejects: forged headers, cut bodies, overlapping buffers."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.flight_streams import (
    CODECS,
    FORGED,
    FORGED_BODY,
    FORGED_HEADER,
    FORGED_SCHEMA,
    PASSTHROUGH_COLUMNS,
    ROWS,
    Stream,
    batch_of,
    contract_of,
    decode_error,
    header_of,
    messages,
    output_of,
    spec,
    tensor_of,
    x_of,
)

from iskander.arrow import ipc
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import ALIGNMENT
from iskander.errors import ContractError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.flight.codec import ParsedBatch
from iskander.gateway.protocols.flight.data import read_flight_data


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
