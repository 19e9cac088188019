"""Numeric casts, compared with Python integers and fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.arrow.casts import ValueLocation, Values, cast_values, rescale
from iskander.errors import ContractError

WHERE = ValueLocation("x")
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
EXACT = {"float16": 2**11, "float32": 2**24, "float64": 2**53}


def limits_of(name: str) -> tuple[int, int]:
    limits = np.iinfo(name)
    return int(limits.min), int(limits.max)


def numbers_near_limits(name: str) -> st.SearchStrategy[int]:
    """Return a strategy for integers of a type, with more values at the limits of other types."""
    low, high = limits_of(name)
    edges = {edge + step for each in INTEGERS for edge in limits_of(each) for step in (-1, 0, 1)}
    edges |= {
        sign * (each + step) for each in EXACT.values() for step in (0, 1) for sign in (1, -1)
    }
    return st.integers(low, high) | st.sampled_from([e for e in sorted(edges) if low <= e <= high])


def cast_or_none(values: Values, expected: str) -> list[Any] | None:
    """Return the cast values, or None if the cast is rejected."""
    try:
        actual: list[Any] = cast_values(values, expected, WHERE).tolist()
    except ContractError:
        return None
    return actual


@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from(INTEGERS))
@settings(max_examples=up_to(60), deadline=None)
def test_integer_casts_keep_the_values_or_are_rejected(data: Any, source: str, target: str) -> None:
    numbers = data.draw(st.lists(numbers_near_limits(source), min_size=1, max_size=5))
    low, high = limits_of(target)
    fits = all(low <= number <= high for number in numbers)
    assert cast_or_none(Values(np.array(numbers, source)), target) == (numbers if fits else None)


@given(st.data(), st.sampled_from(INTEGERS), st.sampled_from(sorted(EXACT)))
@settings(max_examples=up_to(60), deadline=None)
def test_integer_to_float_casts_are_exact_or_rejected(data: Any, source: str, target: str) -> None:
    numbers = data.draw(st.lists(numbers_near_limits(source), min_size=1, max_size=5))
    with np.errstate(over="ignore"):
        floats = [float(np.array(number, source).astype(target)) for number in numbers]
    fits = all(np.isfinite(f) and int(f) == n for f, n in zip(floats, numbers, strict=True))
    assert cast_or_none(Values(np.array(numbers, source)), target) == (floats if fits else None)


@given(
    st.lists(st.floats() | st.integers(-(2**65), 2**65).map(float), min_size=1, max_size=5),
    st.sampled_from(INTEGERS),
)
@settings(max_examples=up_to(60), deadline=None)
def test_float_to_integer_casts_are_exact_or_rejected(numbers: list[float], target: str) -> None:
    low, high = limits_of(target)
    fits = all(
        np.isfinite(number) and number == int(number) and low <= int(number) <= high
        for number in numbers
    )
    expected = [int(number) for number in numbers] if fits else None
    assert cast_or_none(Values(np.array(numbers, np.float64)), target) == expected


@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_infinite_and_nan_floats_are_not_cast_to_integers(
    number: float, source: str, target: str
) -> None:
    """The int32 minimum exceeds the float16 range, so as a float16 it is infinite."""
    assert cast_or_none(Values(np.array([0, number], source)), target) is None


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5),
    st.sampled_from([1, 10, 1000, 3600 * 10**9]),
    st.sampled_from([1, 10, 24, 86_400 * 10**9]),
)
@settings(max_examples=up_to(60), deadline=None)
def test_rescale_is_exact_or_rejected(numbers: list[int], multiply: int, divide: int) -> None:
    values = Values(np.array(numbers, np.int64))
    exact = [Fraction(number) * multiply / divide for number in numbers]
    is_whole = all(number % divide == 0 for number in numbers)
    if is_whole and all(-(2**63) < each < 2**63 - multiply for each in exact):
        assert rescale(values, multiply, divide, "int64", WHERE).tolist() == exact
    elif not is_whole or any(abs(each) > 2**63 for each in exact):
        with pytest.raises(ContractError):
            rescale(values, multiply, divide, "int64", WHERE)
    floats = rescale(values, multiply, divide, "float64", WHERE)
    np.testing.assert_allclose(floats, [float(each) for each in exact], rtol=1e-15)


@given(st.lists(st.floats(width=32), min_size=1, max_size=8))
@settings(max_examples=up_to(60), deadline=None)
def test_cast_to_bfloat16_rounds_to_the_nearest_value(numbers: list[float]) -> None:
    """The reference is the conversion by the ONNX helper."""
    from onnx import TensorProto, helper

    half = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    data = np.array(numbers, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = data.astype(half)
    overflows = np.isfinite(data) & ~np.isfinite(expected.astype(np.float32))
    try:
        actual = cast_values(Values(data), "bfloat16", WHERE)
    except ContractError:
        assert overflows.any()
        return
    assert not overflows.any()
    is_nan = np.isnan(data)
    assert (actual[~is_nan] == expected.view(np.uint16)[~is_nan]).all()
    assert np.isnan(actual[is_nan].view(half).astype(np.float32)).all()
    back = cast_values(Values(actual, is_bfloat16=True), "float32", WHERE)
    np.testing.assert_array_equal(back, expected.astype(np.float32))
