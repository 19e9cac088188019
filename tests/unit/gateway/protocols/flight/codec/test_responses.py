"""Responses of the Flight codec: results, passed-through columns, equal headers."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.flight_streams import (
    APP_METADATA,
    CODECS,
    FIXED_WIDTH,
    OTHER,
    PASSTHROUGH_COLUMNS,
    ROWS,
    STRINGS,
    Stream,
    batch_of,
    contract_of,
    messages,
    results_of,
    spec,
    tensor_of,
    x_of,
)
from support.random_examples import up_to

from iskander.arrow import ipc
from iskander.contract.column_types import ColumnType
from iskander.contract.manifest import Passthrough
from iskander.contract.tensors import ALIGNMENT
from iskander.errors import MalformedInput
from iskander.gateway.protocols.flight.data import read_flight_data


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


@pytest.mark.parametrize(("columns", "is_cached"), [(10, True), (200, False)])
def test_only_short_headers_are_cached(columns: int, is_cached: bool) -> None:
    """The cache is bounded by its number of headers, so each of them is."""
    batch = batch_of(x=x_of(), **{f"c{index}": x_of() for index in range(columns)})
    schema, message = messages(batch)
    stream = Stream(contract_of(), schema[0])

    responses = stream.read(stream.respond([message, message]))

    assert [each.column("c9") for each in responses] == [batch.column("c9")] * 2
    assert bool(stream.plan.header_cache) is is_cached


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


def test_responses_of_many_lengths_are_correct() -> None:
    """More lengths than cached headers, each twice."""
    batches = [batch_of(x=x_of(rows)) for rows in [*range(70), *range(70)]]
    schema, *rest = messages(*batches)
    stream = Stream(contract_of(passthrough="none"), schema[0])

    responses = stream.read(stream.respond(rest))

    assert [response.columns for response in responses] == [results_of(b.num_rows) for b in batches]


@settings(deadline=None, max_examples=up_to(60))
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
