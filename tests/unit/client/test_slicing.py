"""Batches cut and joined to limits: order, sizes, views, and rows that are too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.client.slicing import cut_and_join, join_to_one
from iskander.errors import ContractError, LimitExceeded

BYTES = 1 << 30


def batch_of(values: Any, kind: pa.DataType | None = None) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, kind)})


def rows_of(batches: list[pa.RecordBatch]) -> list[int]:
    return [batch.num_rows for batch in batches]


def cut(batches: Any, **limits: Any) -> list[pa.RecordBatch]:
    return list(cut_and_join(batches, **({"rows_max": 1000, "bytes_max": BYTES} | limits)))


def test_batch_within_limits_is_the_same_object() -> None:
    batch = batch_of(range(10))
    (only,) = cut([batch])
    assert only is batch


def test_rows_above_the_limit_are_cut_evenly() -> None:
    parts = cut([batch_of(range(2001))], rows_min=0)
    assert rows_of(parts) == [667, 667, 667]
    assert pa.Table.from_batches(parts)["x"].to_pylist() == list(range(2001))


def test_cut_does_not_copy() -> None:
    batch = batch_of(np.arange(5000))
    (address,) = {part["x"].buffers()[1].address for part in cut([batch], rows_min=0)}
    assert address == batch["x"].buffers()[1].address


def test_bytes_above_the_limit_are_cut() -> None:
    parts = cut([batch_of(np.arange(900))], bytes_max=1000, rows_min=0)
    assert all(pa.ipc.get_record_batch_size(part) <= 1000 for part in parts)
    assert len(parts) < 20
    assert pa.Table.from_batches(parts)["x"].to_pylist() == list(range(900))


def test_one_long_row_is_cut_from_short_ones() -> None:
    texts = ["a"] * 500 + ["b" * 5000] + ["c"] * 500
    parts = cut([batch_of(texts)], bytes_max=6000, rows_min=0)
    assert pa.Table.from_batches(parts)["x"].to_pylist() == texts
    assert all(pa.ipc.get_record_batch_size(part) <= 6000 for part in parts)


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_binary(), pa.string_view()])
def test_single_row_above_the_byte_limit_is_named(kind: pa.DataType) -> None:
    texts = ["a"] * 7 + ["b" * 100_000]
    with pytest.raises(LimitExceeded, match=r"row 17 alone has \d+ bytes, limit 5000") as raised:
        cut([batch_of(["x"] * 10, kind), batch_of(texts, kind)], bytes_max=5000)
    fields = raised.value.fields
    assert (fields["row"], fields["wanted"]) == (17, 5000)
    assert fields["got"] > 100_000
    assert "`limits.bytes`" in raised.value.message


def test_single_row_above_the_string_limit_is_named() -> None:
    with pytest.raises(LimitExceeded, match=r"row 1 alone has 500 string bytes, limit 100"):
        cut([batch_of(["a", "b" * 500])], string_bytes_max=100)


NESTED = {
    "text": (pa.utf8(), "ab"),
    "large": (pa.large_utf8(), "ab"),
    "binary": (pa.binary(), b"ab"),
    "view": (pa.string_view(), "a text above the inline size of views"),
    "dictionary": (pa.dictionary(pa.int8(), pa.utf8()), "ab"),
    "list": (pa.list_(pa.utf8()), ["ab", "c"]),
    "sized list": (pa.list_(pa.utf8(), 2), ["ab", "c"]),
    "struct": (pa.struct([("a", pa.int8()), ("b", pa.utf8())]), {"a": 1, "b": "ab"}),
    "extension": (pa.json_(), "12"),
    "map": (pa.map_(pa.utf8(), pa.utf8()), [("ab", "c")]),
}


@pytest.mark.parametrize("name", NESTED)
def test_string_bytes_are_limited_at_any_depth(name: str) -> None:
    kind, value = NESTED[name]
    values = [value] * 400
    parts = cut([batch_of(values, kind)], string_bytes_max=500, rows_min=0)
    assert len(parts) > 1
    assert pa.Table.from_batches(parts)["x"].to_pylist() == values


def test_run_end_encoded_text_counts_decoded() -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([400], pa.int32()), pa.array(["abcd"]))
    parts = cut([pa.record_batch({"x": runs})], string_bytes_max=1000, rows_min=0)
    assert len(parts) > 1
    assert sum(rows_of(parts)) == 400


@pytest.mark.parametrize("kind", ["null", "union", "number", "dictionary", "runs"])
def test_columns_without_text_have_no_string_bytes(kind: str) -> None:
    numbers = pa.array([1, 2, 2])
    column = {
        "null": pa.nulls(3),
        "union": pa.UnionArray.from_dense(
            pa.array([0, 0, 0], pa.int8()), pa.array([0, 1, 2], pa.int32()), [numbers]
        ),
        "number": numbers,
        "dictionary": numbers.dictionary_encode(),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array([1])),
    }[kind]
    assert rows_of(cut([pa.record_batch({"x": column})], string_bytes_max=1)) == [3]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_text_views_are_cut_with_their_own_text_only(kind: pa.DataType) -> None:
    texts = [f"{number:06d}".encode() * 20 for number in range(5000)]
    texts = texts if kind == pa.binary_view() else [text.decode() for text in texts]
    parts = cut([batch_of(texts, kind)], bytes_max=100_000, rows_min=0)
    assert {part.schema.field("x").type for part in parts} == {kind}
    assert [text for part in parts for text in part["x"].to_pylist()] == texts
    assert sum(map(pa.ipc.get_record_batch_size, parts)) < 1_000_000
    assert all(pa.ipc.get_record_batch_size(part) <= 100_000 for part in parts)


def test_list_views_are_cut_with_their_own_elements_only() -> None:
    flat = pa.array(np.arange(40_000))
    starts = pa.array(np.arange(0, 40_000, 4), pa.int32())
    sizes = pa.array(np.full(10_000, 4), pa.int32())
    column = pa.ListViewArray.from_arrays(starts, sizes, flat)
    parts = cut([pa.record_batch({"x": column})], rows_min=0)
    assert sum(map(pa.ipc.get_record_batch_size, parts)) < 1_000_000
    assert pa.Table.from_batches(parts)["x"].to_pylist() == column.to_pylist()


def test_small_neighbours_are_joined() -> None:
    batches = [batch_of(range(start, start + 10)) for start in range(0, 100, 10)]
    parts = cut(batches, rows_min=30)
    assert rows_of(parts) == [30, 30, 30, 10]
    assert pa.Table.from_batches(parts)["x"].to_pylist() == list(range(100))


def test_joined_batches_stay_within_the_limits() -> None:
    batches = [batch_of(range(40)) for _ in range(10)]
    assert rows_of(cut(batches, rows_max=100, rows_min=90)) == [80] * 5
    parts = cut(batches, bytes_max=2000, rows_min=1000)
    assert max(map(pa.ipc.get_record_batch_size, parts)) <= 2000
    texts = [batch_of(["a" * 30]) for _ in range(10)]
    assert max(rows_of(cut(texts, string_bytes_max=100))) == 3


def test_join_of_columns_with_and_without_nulls_stays_within_the_byte_limit() -> None:
    columns = {str(i): pa.array([True] * 500) for i in range(50)}
    full = pa.record_batch(columns)
    with_null = pa.record_batch({name: pa.array([None] * 500, pa.bool_()) for name in columns})
    size = pa.ipc.get_record_batch_size(full) + pa.ipc.get_record_batch_size(with_null)
    parts = cut([full, with_null], rows_min=10_000, bytes_max=size)
    assert max(map(pa.ipc.get_record_batch_size, parts)) <= size


def test_large_batch_is_not_joined_without_need() -> None:
    large = batch_of(range(500))
    parts = cut([large, large], rows_min=100)
    assert [part is large for part in parts] == [True, True]


def test_dictionaries_that_cannot_be_joined_stay_apart() -> None:
    kind = pa.dictionary(pa.int8(), pa.utf8())
    batches = [batch_of([f"{start}-{n}" for n in range(100)], kind) for start in (0, 1)]
    parts = cut(batches)
    assert rows_of(parts) == [100, 100]


def test_dictionaries_that_differ_are_joined() -> None:
    kind = pa.dictionary(pa.int8(), pa.utf8())
    (part,) = cut([batch_of(["a", "b"], kind), batch_of(["c", "a"], kind)])
    assert part["x"].to_pylist() == ["a", "b", "c", "a"]


def test_empty_batches_are_dropped_between_others() -> None:
    empty = batch_of([], pa.int64())
    assert rows_of(cut([empty, batch_of([1]), empty, batch_of([2]), empty], rows_min=0)) == [1, 1]


def test_only_empty_batches_give_one_with_the_schema() -> None:
    empty = batch_of([], pa.int64())
    parts = cut([empty, empty])
    assert rows_of(parts) == [0]
    assert parts[0].schema == empty.schema


def test_no_batches_give_none() -> None:
    assert cut([]) == []


def test_batches_are_read_as_results_are_read() -> None:
    read: list[int] = []

    def feed() -> Iterator[pa.RecordBatch]:
        for number in range(10):
            read.append(number)
            yield batch_of([number])

    parts = cut_and_join(feed(), rows_max=10, bytes_max=BYTES, rows_min=2)
    next(parts)
    assert read == [0, 1]


def join(batches: Any, **limits: Any) -> pa.RecordBatch:
    whole_limits = {"rows_max": 1000, "bytes_max": 1 << 16, "string_bytes_max": 1 << 16}
    return join_to_one(batches, **(whole_limits | limits))


def test_whole_batch_has_all_rows_in_order() -> None:
    batches = [batch_of([], pa.int64()), batch_of([1, 2]), batch_of([], pa.int64()), batch_of([3])]
    assert join(batches)["x"].to_pylist() == [1, 2, 3]
    assert join([batches[0]]).num_rows == 0
    assert join([batches[1]]) is batches[1]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"rows_max": 100}, r"at least 101 rows in one batch, limit 100 \(`limits.rows`\)"),
        (
            {"bytes_max": 5000},
            r"at least [\d,]+ bytes in one batch, limit 5,000 \(`limits.bytes`\)",
        ),
        ({"string_bytes_max": 500}, r"^1,000 string bytes .*`limits.string_bytes`"),
    ],
)
def test_whole_batch_above_a_limit_is_an_error(limits: dict[str, int], text: str) -> None:
    batches = [pa.record_batch({"x": ["a"], "y": np.arange(1)}) for _ in range(1000)]
    with pytest.raises(LimitExceeded, match=text):
        join(batches, **limits)


def test_whole_batch_counts_a_dictionary_once() -> None:
    text = pa.array(["z" * 1000 + str(number) for number in range(10)])
    batches = [
        pa.record_batch({"x": pa.DictionaryArray.from_arrays(pa.array([number], pa.int8()), text)})
        for number in [*range(10)] * 5
    ]
    joined = join(batches)
    assert joined["x"].to_pylist() == text.to_pylist() * 5


def test_batches_that_cannot_be_joined_to_a_whole_one_are_an_error() -> None:
    kind = pa.dictionary(pa.int8(), pa.utf8())
    batches = [batch_of([f"{start}-{n}" for n in range(100)], kind) for start in (0, 1)]
    with pytest.raises(ContractError, match="cannot be joined"):
        join(batches)


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_keep_rows_order_and_limits(seed: int) -> None:
    random = np.random.default_rng(seed)
    batches, row = [], 0
    for _ in range(random.integers(1, 30)):
        rows = int(random.integers(0, 300))
        lengths = random.integers(0, 60, rows)
        text = pa.array(["y" * length for length in lengths]).cast(
            [pa.utf8(), pa.string_view(), pa.large_utf8()][seed % 3]
        )
        flags = pa.array(random.random(rows) < 0.5, mask=random.random(rows) < 0.3)
        offset = int(random.integers(0, 3))
        whole = pa.record_batch({"row": np.arange(row, row + rows), "text": text, "flag": flags})
        batches.append(whole.slice(0, max(rows - offset, 0)))
        row += rows
    limits = {
        "rows_max": int(random.integers(1, 400)),
        "bytes_max": int(random.integers(1500, 20_000)),
        "string_bytes_max": int(random.integers(200, 5000)),
    }
    parts = list(cut_and_join(batches, **limits, rows_min=int(random.integers(0, 500))))
    wanted = [row for batch in batches for row in batch.to_pylist()]
    assert [row for part in parts for row in part.to_pylist()] == wanted
    assert max(rows_of(parts)) <= limits["rows_max"]
    assert max(map(pa.ipc.get_record_batch_size, parts)) <= limits["bytes_max"]
    for part in parts:
        assert sum(map(len, part["text"].to_pylist())) <= limits["string_bytes_max"]
