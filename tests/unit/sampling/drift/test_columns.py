"""Columns of samples: tensors, nulls, text, and names of elements."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from iskander.arrow.types import BFloat16
from iskander.sampling.drift.columns import ELEMENTS_MAX, VALUES_MAX, columns_of
from iskander.sampling.drift.summary import LabelValues, NumberValues, Values


def columns(array: pa.Array, **elements: tuple[str, ...]) -> dict[str, Values]:
    return dict(columns_of(pa.record_batch({"x": array}), elements))


def numbers(values: Values) -> list[float]:
    assert isinstance(values, NumberValues)
    assert values.values.dtype == np.float64
    return values.values.tolist()


@pytest.mark.parametrize(
    ("array", "values", "is_integer"),
    [
        (pa.array([1.5, None, -2.0]), [1.5, -2.0], False),
        (pa.array([1, None, 2], pa.uint8()), [1.0, 2.0], True),
        (pa.array(np.array([1, 2], np.float16)), [1.0, 2.0], False),
        (
            pa.ExtensionArray.from_storage(
                BFloat16(), pa.array([0x3F80, None, 0xC000], pa.uint16())
            ),
            [1.0, -2.0],
            False,
        ),
    ],
)
def test_numbers(array: pa.Array, values: list[float], is_integer: bool) -> None:
    (found,) = columns(array).values()
    assert numbers(found) == values
    assert isinstance(found, NumberValues)
    assert found.is_integer is is_integer and found.nulls == array.null_count


@pytest.mark.parametrize(
    ("array", "counts"),
    [
        (pa.array([True, None, False, True]), {"true": 2, "false": 1}),
        (pa.array(["a", "", None, "a"]), {"a": 2, "": 1}),
        (pa.array([b"a", b"\xff", None, b"a"]), {"a": 2, "\\xff": 1}),
        (pa.array(["a", "a", None]).dictionary_encode(), {"a": 2}),
        (pa.array(["a", "b"], pa.large_utf8()), {"a": 1, "b": 1}),
    ],
)
def test_labels(array: pa.Array, counts: dict[str, int]) -> None:
    assert columns(array) == {"x": LabelValues(counts, array.null_count)}


def test_norm_beyond_the_range_of_floats_is_infinite() -> None:
    size = ELEMENTS_MAX + 1
    found = columns(pa.array([[1e300] * size], pa.list_(pa.float64(), size)))
    assert numbers(found["norm(x)"]) == [np.inf]


def test_other_types_count_as_nulls() -> None:
    days = pa.array([1, None], pa.date32())
    assert columns(days) == {"x": LabelValues({}, 2)}


def test_each_element_of_a_small_tensor_is_a_column() -> None:
    array = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    found = columns(array)
    assert {name: numbers(values) for name, values in found.items()} == {
        "x[0]": [1.0, 3.0],
        "x[1]": [2.0, 4.0],
    }
    assert all(values.nulls == 1 for values in found.values())
    assert list(columns(array, x=("age", "income"))) == ["x[age]", "x[income]"]
    assert list(columns(array, x=("too", "many", "names"))) == ["x[0]", "x[1]"]


@pytest.mark.parametrize("make", ["lists", "tensor"])
def test_elements_of_more_dimensions_are_in_row_major_order(make: str) -> None:
    values = np.arange(12.0).reshape(2, 3, 2)
    if make == "tensor":
        array: pa.Array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    else:
        array = pa.array(values.tolist(), pa.list_(pa.list_(pa.float64(), 2), 3))
    found = columns(array)
    assert list(found) == [f"x[{index}]" for index in range(6)]
    assert numbers(found["x[4]"]) == [4.0, 10.0]


def test_elements_of_a_slice() -> None:
    array = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float64(), 2)).slice(1)
    assert {name: numbers(values) for name, values in columns(array).items()} == {
        "x[0]": [3.0, 5.0],
        "x[1]": [4.0, 6.0],
    }


def test_large_tensor_is_one_column_and_its_norm() -> None:
    size = ELEMENTS_MAX + 1
    array = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(3 * size)), size)
    found = columns(array)
    assert list(found) == ["x[*]", "norm(x)"]
    assert len(numbers(found["x[*]"])) == 3 * size
    assert numbers(found["norm(x)"]) == [pytest.approx(np.sqrt(size))] * 3


def test_rows_of_a_huge_tensor_are_evenly_spaced() -> None:
    size, rows = 1000, 200
    values = np.repeat(np.arange(float(rows)), size)
    found = columns(pa.FixedSizeListArray.from_arrays(pa.array(values), size))
    chosen = sorted(set(numbers(found["x[*]"])))
    assert chosen == list(range(0, rows, 4)) and len(numbers(found["x[*]"])) == 50 * size
    assert len(numbers(found["norm(x)"])) == 50 and 50 * size <= VALUES_MAX


@pytest.mark.parametrize(
    "array",
    [
        pa.array([["a", "b"], ["a", None]], pa.list_(pa.utf8(), 2)),
        pa.array([["a"], [], ["a", "b", None]], pa.list_(pa.utf8())),
    ],
)
def test_text_in_lists_is_one_column(array: pa.Array) -> None:
    assert columns(array) == {"x[*]": LabelValues({"a": 2, "b": 1}, 1)}


def test_lists_of_different_lengths_are_one_column() -> None:
    (values,) = columns(pa.array([[1], [], [2, 3]], pa.list_(pa.int32()))).values()
    assert numbers(values) == [1.0, 2.0, 3.0]


def test_batch_without_rows() -> None:
    assert numbers(columns(pa.array([], pa.float32()))["x"]) == []
    assert list(columns(pa.array([], pa.list_(pa.float32(), 2)))) == ["x[*]"]
