"""Lists, structs, ranks and the order of columns in a Flight response: pyarrow reads what comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.arrow import ipc
from iskander.arrow.types import output_schema
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.outputs import ColumnOrder, Rank
from iskander.contract.strings import strings_to_body
from iskander.contract.tensors import Contract, ResultColumn, TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed
from iskander.protocols.flight.codec import StreamCodec
from iskander.protocols.flight.data import read_flight_data
from iskander.protocols.flight.plan import Plan

LIMITS = LimitsConfig()


def spec(name: str, type_text: str, string_bytes: int = 0) -> TensorSpec:
    kind = parse_column_type(type_text)
    return TensorSpec(name, name, kind, kind.shape, string_bytes=string_bytes)


X = spec("x", "int64")
SCORE = spec("score", "float32")
PLACE = ResultColumn("place", "int32", (0,), "", Rank("score", "query"))
TOP = ResultColumn(
    "top", "list<struct<score: fixed_size_list<float32>[2], index: int64>>", (0, 1), ""
)
PARTS = (
    spec("top.score", "fixed_size_list<fixed_size_list<float32>[2]>[3]"),
    spec("top.index", "fixed_size_list<int64>[3]"),
)


def answer(
    contract: Contract, batch: pa.RecordBatch, results: bytes
) -> tuple[Plan, pa.RecordBatch]:
    """What a client reads of the response to one batch."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    schema, *rest = pa.ipc.MessageReader.open_stream(sink.getvalue())
    plan = Plan(bytes(schema.metadata), contract, LIMITS)
    codec = StreamCodec(plan, LIMITS)
    (arrived,) = filter(
        None, (codec.decode(memoryview(m.metadata), memoryview(m.body), b"") for m in rest)
    )
    stream = [ipc.encapsulate(plan.response_header)]
    for frame in codec.frames(codec.prepare(arrived, results)):
        data = read_flight_data(b"".join(map(bytes, frame)))
        stream.append(ipc.encapsulate(data.header, data.body))
    (read,) = pa.ipc.open_stream(b"".join(stream))
    read.validate(full=True)
    return plan, read


def body_of(specs: tuple[TensorSpec, ...], *columns: Any) -> bytes:
    rows = len(columns[0])
    offsets, end = body_layout(specs, rows)
    body = bytearray(end)
    for each, offset, column in zip(specs, offsets, columns, strict=True):
        raw = np.asarray(column, each.type.dtype.numpy).tobytes()
        body[offset : offset + len(raw)] = raw
    return bytes(body)


@given(st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None, max_examples=30)
def test_values_come_to_their_own_row(rows: int, first: int) -> None:
    """Lists of structs with lists in them, beside a column that is passed through."""
    numbers = np.arange(first, first + rows)
    scores = numbers[:, None, None] * 100 + np.arange(6).reshape(3, 2)
    indices = numbers[:, None] * 10 + np.arange(3)
    contract = Contract((X,), PARTS, "all", columns=(TOP,))
    batch = pa.record_batch({"id": pa.array(numbers), "x": pa.array(numbers)})
    _, got = answer(contract, batch, body_of(PARTS, scores, indices))
    assert got.schema.names == ["id", "top"]
    assert pa.types.is_list(got.schema.field("top").type)
    for number, row in zip(got["id"].to_pylist(), got["top"].to_pylist(), strict=True):
        assert [each["index"] for each in row] == [number * 10 + i for i in range(3)]
        assert [each["score"] for each in row] == [
            [number * 100 + 2 * i, number * 100 + 2 * i + 1] for i in range(3)
        ]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
@settings(deadline=None, max_examples=30)
def test_a_list_has_only_the_entries_that_are_meant(lengths: list[int]) -> None:
    parts = (spec("made", "fixed_size_list<fixed_size_list<int64>[2]>[3]"), spec("n", "int32"))
    column = ResultColumn("made", "list<fixed_size_list<int64>[2]>", (0, 1), "")
    contract = Contract((X,), parts, "none", columns=(column,))
    rows = len(lengths)
    values = np.arange(6 * rows).reshape(rows, 3, 2)
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    _, got = answer(contract, batch, body_of(parts, values, lengths))
    wanted = [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]
    assert got["made"].to_pylist() == wanted


def test_a_struct_with_strings() -> None:
    parts = (spec("made.a", "utf8", 8), spec("made.b", "int64"))
    column = ResultColumn("made", "struct<a: utf8, b: int64>", (0, 1), "")
    contract = Contract((X,), parts, "none", columns=(column,))
    offsets, _ = body_layout(parts, 2)
    text = strings_to_body([b"yes", "ü".encode()])
    body = bytearray(offsets[1] + 64)
    body[: 3 * 4] = text[: 3 * 4]
    body[offsets[1] : offsets[1] + 16] = np.array([7, 8]).tobytes()
    body += text[3 * 4 :] + bytes(64 - len(text[3 * 4 :]))
    _, got = answer(contract, pa.record_batch({"x": pa.array([1, 2])}), bytes(body))
    assert got["made"].to_pylist() == [{"a": "yes", "b": 7}, {"a": "ü", "b": 8}]


def test_no_rows_have_the_types_all_the_same() -> None:
    contract = Contract((X,), PARTS, "none", columns=(TOP,))
    _, got = answer(contract, pa.record_batch({"x": pa.array([], pa.int64())}), b"")
    assert (got.num_rows, got.schema) == (0, output_schema(contract))


ORDERS: list[tuple[ColumnOrder, list[str]]] = [
    ("passthrough_first", ["id", "name", "score", "mask"]),
    ("outputs_first", ["score", "mask", "id", "name"]),
    (("name", "score", "id", "mask"), ["name", "score", "id", "mask"]),
    (("score", "gone", "id", "mask", "name"), ["score", "id", "mask", "name"]),
]


@pytest.mark.parametrize(("order", "names"), ORDERS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_columns_come_in_the_order_of_the_manifest(
    order: ColumnOrder, names: list[str], is_plain: bool
) -> None:
    """Whether the response is made of the worker's bytes, or put together anew."""
    outputs = (SCORE, spec("mask", "fixed_size_list<int8>[2]"))
    contract = Contract((X,), outputs, ("id", "name", "gone"), column_order=order)
    text = pa.array(["a", None, "c"])
    name = text if is_plain else text.dictionary_encode()
    batch = pa.record_batch({"id": pa.array([7, 8, 9]), "x": pa.array([1, 2, 3]), "name": name})
    results = body_of(outputs, [0.5, 1, 2], [[1, 2], [3, 4], [5, 6]])
    plan, got = answer(contract, batch, results)
    assert plan.is_response_plain == is_plain
    assert got.schema.names == names
    assert got.to_pydict() | {} == {
        "id": [7, 8, 9],
        "name": ["a", None, "c"],
        "score": [0.5, 1, 2],
        "mask": [[1, 2], [3, 4], [5, 6]],
    }


@pytest.mark.parametrize("passthrough", ["all", "none", ("query",)])
@pytest.mark.parametrize("is_encoded", [True, False])
def test_a_rank_counts_within_a_column_of_the_request(passthrough: Any, is_encoded: bool) -> None:
    """Which comes back only where it is passed through."""
    columns = (PLACE, ResultColumn("score", "float32", (0,), ""))
    contract = Contract((X,), (SCORE,), passthrough, columns=columns)
    query = pa.array(["a", "b", "a", None])
    query = query.dictionary_encode() if is_encoded else query
    batch = pa.record_batch({"x": pa.array([1, 2, 3, 4]), "query": query})
    _, got = answer(contract, batch, body_of((SCORE,), [1, 2, 3, 4]))
    assert got["place"].to_pylist() == [2, 1, 1, 1]
    assert ("query" in got.schema.names) == (passthrough != "none")
    if passthrough != "none":
        assert got["query"].to_pylist() == ["a", "b", "a", None]


def test_a_rank_can_count_within_an_input_or_all_rows() -> None:
    for within, wanted in (("x", [1, 2, 1]), ("", [2, 3, 1])):
        rank = ResultColumn("place", "int32", (0,), "", Rank("score", within))
        contract = Contract((X,), (SCORE,), "none", columns=(rank,))
        batch = pa.record_batch({"x": pa.array([5, 5, 6])})
        _, got = answer(contract, batch, body_of((SCORE,), [2, 1, 3]))
        assert got["place"].to_pylist() == wanted


def test_an_error_takes_the_place_of_a_result_that_is_put_together() -> None:
    columns = (PLACE, ResultColumn("top", TOP.type, (1, 2), ""))
    contract = Contract((X,), (SCORE, *PARTS), "all", columns=columns)
    schema = pa.schema([("x", pa.int64()), ("query", pa.utf8())])
    plan = Plan(ipc.header_of(schema.serialize()), contract, LIMITS)
    (frame,) = StreamCodec(plan, LIMITS).error_frames(ExecutionFailed("no"))
    data = read_flight_data(b"".join(map(bytes, frame)))
    assert b"execution_failed" in data.app_metadata
    stream = ipc.encapsulate(plan.response_header) + ipc.encapsulate(data.header, data.body)
    (read,) = pa.ipc.open_stream(stream)
    assert (read.num_rows, read.schema.names) == (0, ["query", "place", "top"])


def test_a_column_that_would_be_passed_through_and_made() -> None:
    contract = Contract((X,), PARTS, "all", columns=(TOP,))
    schema = pa.schema([("x", pa.int64()), ("top", pa.int8())])
    with pytest.raises(ContractError, match="would be passed through and are also results"):
        Plan(ipc.header_of(schema.serialize()), contract, LIMITS)
