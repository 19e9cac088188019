"""Lists, structs, ranks and column order in Flight responses, read by pyarrow."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import decode
from support.random_examples import up_to

from iskander.arrow import ipc
from iskander.arrow.types import output_schema
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import parse_column_type
from iskander.contract.outputs import ColumnOrder, Rank
from iskander.contract.processing.strings import strings_to_body
from iskander.contract.result_types import ListOf, Value
from iskander.contract.tensors import Contract, ResultColumn, TensorSpec, body_layout
from iskander.errors import ContractError, ExecutionFailed
from iskander.gateway.protocols.flight.codec import StreamCodec
from iskander.gateway.protocols.flight.columns import results
from iskander.gateway.protocols.flight.data import read_flight_data
from iskander.gateway.protocols.flight.plan import Plan

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


def response_of(
    contract: Contract, batch: pa.RecordBatch, results: bytes
) -> tuple[Plan, pa.RecordBatch]:
    """Returns the plan and the response to one batch, read by pyarrow."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    schema, *rest = pa.ipc.MessageReader.open_stream(sink.getvalue())
    plan = Plan(bytes(schema.metadata), contract, LIMITS)
    codec = StreamCodec(plan, LIMITS)
    (parsed,) = filter(
        None, (decode(codec, memoryview(m.metadata), memoryview(m.body), b"") for m in rest)
    )
    stream = [ipc.encapsulate(plan.response_header)]
    for frame in codec.frames(codec.prepare(parsed, results)):
        data = read_flight_data(b"".join(map(bytes, frame)))
        stream.append(ipc.encapsulate(data.header, data.body))
    (response,) = pa.ipc.open_stream(b"".join(stream))
    response.validate(full=True)
    return plan, response


def body_of(specs: tuple[TensorSpec, ...], *columns: Any) -> bytes:
    rows = len(columns[0])
    offsets, end = body_layout(specs, rows)
    body = bytearray(end)
    for each, offset, column in zip(specs, offsets, columns, strict=True):
        raw = np.asarray(column, each.type.dtype.numpy).tobytes()
        body[offset : offset + len(raw)] = raw
    return bytes(body)


@given(st.integers(1, 9), st.integers(0, 1000))
@settings(deadline=None, max_examples=up_to(30))
def test_nested_values_belong_to_their_row(rows: int, first: int) -> None:
    """Lists of structs with nested lists, together with a passthrough column."""
    numbers = np.arange(first, first + rows)
    scores = numbers[:, None, None] * 100 + np.arange(6).reshape(3, 2)
    indices = numbers[:, None] * 10 + np.arange(3)
    contract = Contract((X,), PARTS, "all", columns=(TOP,))
    batch = pa.record_batch({"id": pa.array(numbers), "x": pa.array(numbers)})
    _, response = response_of(contract, batch, body_of(PARTS, scores, indices))
    assert response.schema.names == ["id", "top"]
    assert pa.types.is_list(response.schema.field("top").type)
    for number, row in zip(response["id"].to_pylist(), response["top"].to_pylist(), strict=True):
        assert [each["index"] for each in row] == [number * 10 + i for i in range(3)]
        assert [each["score"] for each in row] == [
            [number * 100 + 2 * i, number * 100 + 2 * i + 1] for i in range(3)
        ]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
@settings(deadline=None, max_examples=up_to(30))
def test_list_has_the_declared_number_of_entries(lengths: list[int]) -> None:
    parts = (spec("made", "fixed_size_list<fixed_size_list<int64>[2]>[3]"), spec("n", "int32"))
    column = ResultColumn("made", "list<fixed_size_list<int64>[2]>", (0, 1), "")
    contract = Contract((X,), parts, "none", columns=(column,))
    rows = len(lengths)
    values = np.arange(6 * rows).reshape(rows, 3, 2)
    batch = pa.record_batch({"x": pa.array(range(rows), pa.int64())})
    _, response = response_of(contract, batch, body_of(parts, values, lengths))
    expected = [row[:length].tolist() for row, length in zip(values, lengths, strict=True)]
    assert response["made"].to_pylist() == expected


def test_struct_with_strings() -> None:
    parts = (spec("made.a", "utf8", 8), spec("made.b", "int64"))
    column = ResultColumn("made", "struct<a: utf8, b: int64>", (0, 1), "")
    contract = Contract((X,), parts, "none", columns=(column,))
    offsets, _ = body_layout(parts, 2)
    text = strings_to_body([b"yes", "ü".encode()])
    body = bytearray(offsets[1] + 64)
    body[: 3 * 4] = text[: 3 * 4]
    body[offsets[1] : offsets[1] + 16] = np.array([7, 8]).tobytes()
    body += text[3 * 4 :] + bytes(64 - len(text[3 * 4 :]))
    _, response = response_of(contract, pa.record_batch({"x": pa.array([1, 2])}), bytes(body))
    assert response["made"].to_pylist() == [{"a": "yes", "b": 7}, {"a": "ü", "b": 8}]


def test_zero_rows_keep_the_output_schema() -> None:
    contract = Contract((X,), PARTS, "none", columns=(TOP,))
    _, response = response_of(contract, pa.record_batch({"x": pa.array([], pa.int64())}), b"")
    assert (response.num_rows, response.schema) == (0, output_schema(contract))


ORDERS: list[tuple[ColumnOrder, list[str]]] = [
    ("passthrough_first", ["id", "name", "score", "mask"]),
    ("outputs_first", ["score", "mask", "id", "name"]),
    (("name", "score", "id", "mask"), ["name", "score", "id", "mask"]),
    (("score", "gone", "id", "mask", "name"), ["score", "id", "mask", "name"]),
]


@pytest.mark.parametrize(("order", "names"), ORDERS)
@pytest.mark.parametrize("is_plain", [True, False])
def test_columns_follow_the_manifest_order(
    order: ColumnOrder, names: list[str], is_plain: bool
) -> None:
    """In plain responses, made from the worker's bytes, and in converted ones."""
    outputs = (SCORE, spec("mask", "fixed_size_list<int8>[2]"))
    contract = Contract((X,), outputs, ("id", "name", "gone"), column_order=order)
    text = pa.array(["a", None, "c"])
    name = text if is_plain else text.dictionary_encode()
    batch = pa.record_batch({"id": pa.array([7, 8, 9]), "x": pa.array([1, 2, 3]), "name": name})
    results = body_of(outputs, [0.5, 1, 2], [[1, 2], [3, 4], [5, 6]])
    plan, response = response_of(contract, batch, results)
    assert plan.is_response_plain == is_plain
    assert response.schema.names == names
    assert response.to_pydict() | {} == {
        "id": [7, 8, 9],
        "name": ["a", None, "c"],
        "score": [0.5, 1, 2],
        "mask": [[1, 2], [3, 4], [5, 6]],
    }


@pytest.mark.parametrize("passthrough", ["all", "none", ("query",)])
@pytest.mark.parametrize("is_encoded", [True, False])
def test_rank_groups_by_a_request_column(passthrough: Any, is_encoded: bool) -> None:
    """The response has the column only if it is passed through."""
    columns = (PLACE, ResultColumn("score", "float32", (0,), ""))
    contract = Contract((X,), (SCORE,), passthrough, columns=columns)
    query = pa.array(["a", "b", "a", None])
    query = query.dictionary_encode() if is_encoded else query
    batch = pa.record_batch({"x": pa.array([1, 2, 3, 4]), "query": query})
    _, response = response_of(contract, batch, body_of((SCORE,), [1, 2, 3, 4]))
    assert response["place"].to_pylist() == [2, 1, 1, 1]
    assert ("query" in response.schema.names) == (passthrough != "none")
    if passthrough != "none":
        assert response["query"].to_pylist() == ["a", "b", "a", None]


def test_rank_groups_by_an_input_or_over_all_rows() -> None:
    for within, expected in (("x", [1, 2, 1]), ("", [2, 3, 1])):
        rank = ResultColumn("place", "int32", (0,), "", Rank("score", within))
        contract = Contract((X,), (SCORE,), "none", columns=(rank,))
        batch = pa.record_batch({"x": pa.array([5, 5, 6])})
        _, response = response_of(contract, batch, body_of((SCORE,), [2, 1, 3]))
        assert response["place"].to_pylist() == expected


def test_in_band_error_replaces_an_assembled_result() -> None:
    columns = (PLACE, ResultColumn("top", TOP.type, (1, 2), ""))
    contract = Contract((X,), (SCORE, *PARTS), "all", columns=columns)
    schema = pa.schema([("x", pa.int64()), ("query", pa.utf8())])
    plan = Plan(ipc.header_of(schema.serialize()), contract, LIMITS)
    (frame,) = StreamCodec(plan, LIMITS).error_frames(ExecutionFailed("no"))
    data = read_flight_data(b"".join(map(bytes, frame)))
    assert b"execution_failed" in bytes(data.app_metadata)
    stream = ipc.encapsulate(plan.response_header) + ipc.encapsulate(data.header, data.body)
    (response,) = pa.ipc.open_stream(stream)
    assert (response.num_rows, response.schema.names) == (0, ["query", "place", "top"])


def test_passthrough_column_with_a_result_name_is_rejected() -> None:
    contract = Contract((X,), PARTS, "all", columns=(TOP,))
    schema = pa.schema([("x", pa.int64()), ("top", pa.int8())])
    with pytest.raises(ContractError, match="would be passed through and are also results"):
        Plan(ipc.header_of(schema.serialize()), contract, LIMITS)


@pytest.mark.parametrize("lengths", [[2, -1], [4, 0], [2**31 - 1, 0], [-(2**31), 1]])
def test_lengths_of_a_faulty_worker_make_no_invalid_lists(lengths: list[int]) -> None:
    """Clients read a list at its offsets without a check."""
    values = (pa.array(range(6), pa.int64()), (3,))
    leaves = deque([values, (pa.array(lengths, pa.int32()), ())])
    with pytest.raises(ExecutionFailed, match="lists of other lengths than 0 to 3"):
        results._variable_lists(ListOf(Value("int64"), None), leaves, 2)
