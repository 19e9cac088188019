"""Ranks within groups, compared with a direct count, and edge cases."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arrow_memory import peak_of

from iskander.arrow.rank import can_group, ranks_in_groups

NAN = math.nan
ROWS = st.lists(
    st.tuples(
        st.sampled_from([-1.5, 0.0, -0.0, 2.0, math.inf, -math.inf, NAN]),
        st.sampled_from(["a", "b", None]),
    ),
    max_size=30,
)


def counted_ranks(values: list[float], groups: list[Any], order: str) -> list[int]:
    """Return for each row one plus the number of rows of its group before it."""

    def precedes(a: int, b: int) -> bool:
        x, y = values[a], values[b]
        if math.isnan(x) or math.isnan(y):
            return a < b if math.isnan(x) and math.isnan(y) else math.isnan(y)
        if x == y:
            return a < b
        return (x > y) == (order == "descending")

    rows = range(len(values))
    return [1 + sum(groups[a] == groups[b] and precedes(a, b) for a in rows) for b in rows]


@given(ROWS, st.sampled_from(["descending", "ascending"]))
@settings(deadline=None)
def test_rank_equals_one_plus_preceding_rows(rows: list[Any], order: str) -> None:
    values, groups = [value for value, _ in rows], [group for _, group in rows]
    actual = ranks_in_groups(np.array(values, np.float64), pa.array(groups, pa.utf8()), order)
    assert actual.dtype == np.int32
    assert actual.tolist() == counted_ranks(values, groups, order)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64", "int64", "float16", "float32"])
def test_every_numeric_type_is_ranked(dtype: str) -> None:
    values = np.array([1, 0, 2, 2], dtype)
    assert ranks_in_groups(values, None, "descending").tolist() == [3, 4, 1, 2]
    assert ranks_in_groups(values, None, "ascending").tolist() == [2, 1, 3, 4]


@pytest.mark.parametrize(
    "groups",
    [
        pa.array([7, 7, None, None]),
        pa.array(["x", "x", "", ""]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 2, 1, 1], pa.int8()), ["x", "y", "x"]),
        pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, None], pa.int8()), ["x", None]),
        pa.DictionaryArray.from_arrays(pa.array([1, 0, 0, 1, 1], pa.int8()), [b"x", b"y"]).slice(1),
        pa.array([b"x", b"x", b"", b""]),
        pa.array([True, True, None, None]),
        pa.array([1, 1, 2, 2], pa.timestamp("us")),
        pa.array([NAN, NAN, 1.0, 1.0]),
        pa.array(["y", "x", "x", "", ""]).slice(1),
    ],
)
def test_every_supported_group_type_groups(groups: pa.Array) -> None:
    assert can_group(groups.type)
    assert ranks_in_groups(np.array([1, 2, 3, 4]), groups, "descending").tolist() == [2, 1, 2, 1]


def test_dictionary_groups_are_not_decoded() -> None:
    """Decoding would copy the long name into every row."""
    index = np.zeros(1 << 17, np.int32)
    groups = pa.DictionaryArray.from_arrays(index, pa.array(["x" * 4096], pa.large_utf8()))
    actual, peak = peak_of(lambda: ranks_in_groups(np.arange(len(index)), groups, "ascending"))
    assert actual[-1] == len(index)
    assert peak < 32 << 20


def test_nested_types_and_float16_cannot_group() -> None:
    kinds = [pa.list_(pa.int8()), pa.struct([("a", pa.int8())]), pa.map_(pa.utf8(), pa.utf8())]
    kinds += [pa.float16(), pa.dictionary(pa.int8(), pa.float16())]
    assert not any(map(can_group, kinds))


def test_zero_rows_have_no_ranks() -> None:
    assert ranks_in_groups(np.array([], np.float32), None, "descending").tolist() == []
    assert (
        ranks_in_groups(np.array([], np.float32), pa.array([], pa.utf8()), "ascending").tolist()
        == []
    )


def test_unused_entries_of_a_dictionary_cost_nothing() -> None:
    """A batch of two rows may use a dictionary of millions of entries."""
    entries = pa.array(np.arange(1 << 20))
    groups = pa.DictionaryArray.from_arrays(pa.array([7, None, 7, 9], pa.int32()), entries)
    values = np.array([1.0, 2.0, 3.0, 4.0])

    result, peak = peak_of(lambda: ranks_in_groups(values, groups, "descending"))

    assert result.tolist() == [2, 1, 1, 1]
    assert peak < 1 << 16
