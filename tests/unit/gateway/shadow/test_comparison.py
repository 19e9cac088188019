"""Statistics of compared rows, against NumPy on the whole data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.processing.rows import RowCopier
from iskander.contract.processing.strings import strings_to_body
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.foundation.measurement.log_scale import STEPS, percentile
from iskander.gateway.shadow.comparison import (
    BYTES_OF_WORK,
    GROUP_WORK,
    LABEL_BYTES_MAX,
    PAIRS_MAX,
    Body,
    Comparison,
    Differences,
    EqualityComparison,
    FloatComparison,
    Tolerance,
)
from iskander.gateway.shadow.contract import match_outputs

TOLERANCE = Tolerance(1e-6, 1e-3)
RESOLUTION = 2 ** (1 / STEPS)


def spec(kind: str, shape: tuple[int, ...] = (), name: str = "y") -> TensorSpec:
    string_bytes = 0 if BY_ARROW[kind].arrow_bits else 200
    return TensorSpec(name, name, ColumnType(kind), shape, string_bytes=string_bytes)


def body_of(specs: tuple[TensorSpec, ...], columns: list[Any]) -> bytes:
    """Results as a worker writes them; a column is an array, or a list of strings."""
    rows = len(columns[0]) // specs[0].elements if columns else 0
    offsets, size = body_layout(specs, rows)
    body, strings = bytearray(size), []
    for each, offset, column in zip(specs, offsets, columns, strict=True):
        if each.is_string:
            raw = strings_to_body(column)
            ends = (len(column) + 1) * 4
            strings.append(raw[ends:])
            raw = raw[:ends]
        elif each.type.dtype_name == "bool":
            raw = np.packbits(column, bitorder="little").tobytes()
        else:
            raw = np.asarray(column, BY_ARROW[each.type.dtype_name].numpy).tobytes()
        body[offset : offset + len(raw)] = raw
    end = (offsets[-1] + specs[-1].buffer_bytes(rows) + 63) & -64
    for text in strings:
        body[end : end + len(text)] = text
        end = (end + len(text) + 63) & -64
    return bytes(body)


def comparison_of(specs: tuple[TensorSpec, ...], tolerance: Tolerance = TOLERANCE) -> Comparison:
    contract = Contract((), specs)
    matches = match_outputs(contract, contract)
    assert isinstance(matches, tuple)
    return Comparison(matches, RowCopier(specs), RowCopier(specs), tolerance)


def compared(kind: str, served: Any, candidate: Any, shape: tuple[int, ...] = ()) -> Comparison:
    specs = (spec(kind, shape),)
    rows = len(served) // specs[0].elements
    comparison = comparison_of(specs)
    bodies = (Body(body_of(specs, [each]), rows, 0) for each in (served, candidate))
    comparison.collect(rows, *bodies)
    comparison.compare()
    return comparison


doubles = hnp.arrays(
    np.float64, st.shared(st.integers(1, 40), key="rows"), elements=st.floats(width=64)
)


@given(served=doubles, candidate=doubles)
def test_floats_are_as_with_numpy(served: np.ndarray, candidate: np.ndarray) -> None:
    """Any values, with NaN and infinities."""
    comparison = compared("float64", served, candidate)

    (found,) = comparison.outputs
    assert isinstance(found, FloatComparison)
    with np.errstate(all="ignore"):
        is_same = (served == candidate) | (np.isnan(served) & np.isnan(candidate))
        is_finite = np.isfinite(served) & np.isfinite(candidate)
        gap = np.abs(candidate - served)
        near = np.isclose(candidate, served, rtol=1e-3, atol=1e-6)
        largest = np.maximum(np.abs(served), np.abs(candidate))
        share = np.where(largest > 0, gap / largest, 0.0)
    assert found.disagreeing == comparison.disagreeing == int((~is_same & ~near).sum())
    assert found.unmatched == int((~is_finite & ~is_same).sum())
    counted = gap[is_finite & np.isfinite(gap)]
    assert found.absolute.counts.sum() == len(counted)
    assert found.absolute.highest == counted.max(initial=0.0)
    relative = share[is_finite & np.isfinite(gap)]
    assert found.relative.highest == relative.max(initial=0.0)


@given(
    values=hnp.arrays(np.float64, st.integers(1, 200), elements=st.floats(1e-11, 1e11)),
    percent=st.sampled_from((1, 50, 95, 99, 100)),
)
def test_percentiles_are_those_of_numpy_within_the_resolution(
    values: np.ndarray, percent: int
) -> None:
    differences = Differences()
    for part in np.array_split(values, 3):
        differences.add(part)
    found = percentile(differences.sparse(), percent, differences.highest)
    low = np.percentile(values, percent, method="lower")
    high = np.percentile(values, percent, method="higher")
    assert low / RESOLUTION / 1.001 <= found <= high * RESOLUTION * 1.001


def test_differences_beyond_the_scale_are_in_the_last_buckets() -> None:
    differences = Differences()
    differences.add(np.array([0.0, 1e-300, 1e300]))
    assert list(differences.sparse().values()) == [1, 1, 1]
    assert differences.highest == 1e300


def test_bias_and_tolerance() -> None:
    served = np.array([1000.0, 0.0, -1.0, 1.0])
    candidate = np.array([1000.9, 9e-7, -1.0, 1.1])
    (found,) = compared("float64", served, candidate).outputs
    assert isinstance(found, FloatComparison)
    assert found.disagreeing == 1
    assert found.bias / found.values == pytest.approx(0.25, rel=1e-4)


def test_values_that_are_no_finite_numbers() -> None:
    """Equal ones are equal; others are unmatched, and have no difference."""
    nan, inf = float("nan"), float("inf")
    served = np.array([nan, inf, -inf, nan, 1.0, inf, 5.0])
    candidate = np.array([nan, inf, inf, 1.0, nan, 2.0, 5.0])
    (found,) = compared("float32", served, candidate).outputs
    assert isinstance(found, FloatComparison)
    assert (found.disagreeing, found.unmatched, found.values) == (4, 4, 1)
    assert found.absolute.sparse() == {0: 1}


def test_row_of_several_floats_differs_once() -> None:
    served = np.zeros(6)
    candidate = np.array([0, 0, 0, 1, 2, 0.0])
    (found,) = compared("float64", served, candidate, (3,)).outputs
    assert found.disagreeing == 1


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_widths_of_floats(kind: str) -> None:
    (found,) = compared(kind, np.array([1.0, 2.0]), np.array([1.5, 2.0])).outputs
    assert isinstance(found, FloatComparison)
    assert (found.absolute.highest, found.disagreeing) == (0.5, 1)


def test_bfloat16_has_the_value_of_its_bits() -> None:
    """0x3F80 is 1, 0x4000 is 2."""
    (found,) = compared("bfloat16", np.array([0x3F80, 0x4000]), np.array([0x4000, 0x4000])).outputs
    assert isinstance(found, FloatComparison)
    assert found.absolute.highest == 1.0


labels = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=50)


@given(pairs=labels)
def test_labels_and_their_pairs(pairs: list[tuple[int, int]]) -> None:
    served, candidate = map(np.array, zip(*pairs, strict=True))
    (found,) = compared("int64", served, candidate).outputs
    assert isinstance(found, EqualityComparison)
    expected = Counter((a, b) for a, b in pairs if a != b)
    assert found.disagreeing == sum(expected.values())
    assert found.pairs == expected


@given(pairs=st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=30))
def test_strings(pairs: list[tuple[str, str]]) -> None:
    served, candidate = ([text.encode() for text in column] for column in zip(*pairs, strict=True))
    (found,) = compared("utf8", served, candidate).outputs
    assert isinstance(found, EqualityComparison)
    assert found.pairs == Counter((a.encode(), b.encode()) for a, b in pairs if a != b)


def test_booleans_within_bytes() -> None:
    specs = (spec("bool"),)
    comparison = comparison_of(specs)
    served = np.array([i % 3 == 0 for i in range(20)])
    candidate = np.array([i % 2 == 0 for i in range(20)])
    part = body_of(specs, [candidate[5:12]])
    comparison.collect(7, Body(body_of(specs, [served]), 20, 5), Body(part, 7, 0))
    comparison.compare()
    (found,) = comparison.outputs
    assert found.disagreeing == int((served[5:12] != candidate[5:12]).sum())


def test_lists_differ_in_any_entry_and_have_no_pairs() -> None:
    served = [b"a", b"b", b"c", b"d"]
    candidate = [b"a", b"x", b"c", b"d"]
    (found,) = compared("utf8", served, candidate, (2,)).outputs
    assert isinstance(found, EqualityComparison)
    assert (found.disagreeing, found.pairs) == (1, Counter())


def test_parts_of_requests_and_several_outputs() -> None:
    """Rows from the middle of a body with floats and strings; outputs in another order."""
    specs = (spec("float32", (2,), "score"), spec("utf8", (), "label"))
    turned = specs[::-1]
    contracts = (Contract((), specs), Contract((), turned))
    matches = match_outputs(*contracts)
    assert isinstance(matches, tuple)
    comparison = Comparison(matches, RowCopier(specs), RowCopier(turned), TOLERANCE)
    scores, texts = np.arange(20.0), [b"t%d" % i for i in range(10)]
    served = Body(body_of(specs, [scores, texts]), 10, 4)
    other = [b"t4", b"x", b"t6"]
    candidate = bytearray(body_of(turned, [other, scores[8:14]]))
    comparison.collect(3, served, Body(bytes(candidate), 3, 0))
    comparison.collect(3, served, Body(bytes(candidate), 3, 0))
    comparison.compare()
    assert (comparison.rows, comparison.disagreeing) == (6, 2)
    score, label = comparison.outputs
    assert (score.disagreeing, label.disagreeing) == (0, 2)
    assert isinstance(label, EqualityComparison)
    assert label.top_pairs(5) == [("t5", "x", 2)]


def test_row_differs_if_any_output_does() -> None:
    specs = (spec("float32", (), "score"), spec("int64", (), "label"))
    comparison = comparison_of(specs)
    served = body_of(specs, [np.array([1.0, 2.0, 3.0]), np.array([1, 2, 3])])
    candidate = body_of(specs, [np.array([1.0, 9.0, 3.0]), np.array([1, 2, 9])])
    comparison.collect(3, Body(served, 3, 0), Body(candidate, 3, 0))
    comparison.compare()
    assert comparison.disagreeing == 2
    assert [output.disagreeing for output in comparison.outputs] == [1, 1]


@pytest.mark.parametrize(
    "ends", [[0, 4, 0, 4], [-4, 0, 2, 4], [0, 5, 4, 4], [0, 1 << 30, -(3 << 29), 4]]
)
def test_overlapping_strings_are_rejected_and_not_counted(ends: list[int]) -> None:
    """They would have any number of bytes; the first output and the first rows are valid."""
    specs = (spec("float32", (), "score"), spec("utf8", (), "label"))
    comparison = comparison_of(specs)
    columns = [np.array([1.0, 2.0, 3.0]), [b"a", b"b", b"cd"]]
    served = body_of(specs, columns)
    valid = body_of(specs, [columns[0] + 1, columns[1]])
    start = body_layout(specs, 3)[0][1]
    damaged = bytearray(valid)
    damaged[start : start + 16] = np.array(ends, np.int32).tobytes()
    for candidate in (valid, bytes(damaged)):
        comparison.collect(3, Body(served, 3, 0), Body(candidate, 3, 0))
    with pytest.raises(AssertionError, match="descend"):
        comparison.compare()
    assert comparison.rows == comparison.disagreeing == 0
    assert [output.disagreeing for output in comparison.outputs] == [0, 0]
    comparison.collect(3, Body(served, 3, 0), Body(valid, 3, 0))
    comparison.compare()
    assert (comparison.rows, comparison.disagreeing) == (3, 3)


def test_pairs_are_bounded() -> None:
    served = np.arange(2 * PAIRS_MAX)
    (found,) = compared("int64", served, served + 1).outputs
    assert isinstance(found, EqualityComparison)
    assert len(found.pairs) == PAIRS_MAX
    assert found.disagreeing == 2 * PAIRS_MAX


def test_labels_are_short_text() -> None:
    (found,) = compared("binary", [b"\xff" + b"x" * 100], [b"y"]).outputs
    assert isinstance(found, EqualityComparison)
    ((served, candidate, _),) = found.top_pairs(1)
    assert served.startswith("\\xff") and len(served) == 64 and candidate == "y"
    (found,) = compared("bool", np.array([True]), np.array([False])).outputs
    assert isinstance(found, EqualityComparison)
    assert found.top_pairs(1) == [("true", "false", 1)]


def test_counted_labels_are_cut() -> None:
    """Thousands of them are kept; one may have as many bytes as a result."""
    (found,) = compared("binary", [b"a" * 1_000_000], ["é".encode() * 500_000]).outputs
    assert isinstance(found, EqualityComparison)
    assert [len(label) for pair in found.pairs for label in pair] == [LABEL_BYTES_MAX] * 2
    assert found.top_pairs(1) == [("a" * 64, "é" * 64, 1)]


def test_long_strings_are_compared_soon() -> None:
    """So that few of them are in memory."""
    specs = (spec("binary"),)
    comparison = comparison_of(specs)
    body = Body(body_of(specs, [[b"a" * 2 * GROUP_WORK * BYTES_OF_WORK]]), 1, 0)
    comparison.collect(1, body, body)
    assert comparison.is_due


def test_outputs_without_elements_are_some_work() -> None:
    """The rows of a batch are limited by its work, with a division."""
    assert comparison_of((spec("float32", (0,)),)).row_work == 1


def test_group_is_due_by_its_work() -> None:
    specs = (spec("float32"),)
    comparison = comparison_of(specs)
    body = Body(body_of(specs, [np.zeros(GROUP_WORK // 2)]), GROUP_WORK // 2, 0)
    comparison.collect(GROUP_WORK // 2, body, body)
    assert not comparison.is_due and not comparison.rows
    comparison.collect(GROUP_WORK // 2, body, body)
    assert comparison.is_due
    comparison.compare()
    assert comparison.rows == GROUP_WORK and not comparison.is_due
