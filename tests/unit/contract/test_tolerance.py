"""Tolerance of results: both sides of each limit."""

from __future__ import annotations

import numpy as np
import pytest

from iskander.contract.tolerance import TOLERANCES, difference, mismatches, scale_of


@pytest.mark.parametrize("dtype_name", sorted(TOLERANCES))
def test_difference_below_and_above_the_tolerance(dtype_name: str) -> None:
    """The limit of an element is relative to its value and to the largest value of the output."""
    relative, absolute = TOLERANCES[dtype_name]
    expected = np.array([1.0, 100.0], np.float64)
    limit = relative * 1.0 + absolute * 100.0
    for factor, is_equal in ((0.99, True), (1.01, False)):
        found = expected + [factor * limit, 0]
        assert mismatches(found, expected, dtype_name).tolist() == [not is_equal, False]


def test_scale_can_be_that_of_all_rows() -> None:
    """A small result beside large ones may differ by rounding of the large ones."""
    expected, found = np.array([0.0]), np.array([1e-5])
    assert mismatches(found, expected, "float32").all()
    assert not mismatches(found, expected, "float32", scale=2.0).any()


def test_numbers_that_are_not_finite() -> None:
    """NaN equals NaN, an infinity only itself."""
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert not mismatches(values, values, "float32").any()
    assert mismatches(values, values[[1, 2, 3, 0]], "float32").all()
    assert mismatches(np.array([np.inf]), np.array([1e30]), "float32").all()


def test_other_types_have_no_tolerance() -> None:
    """One unequal label of four is a difference of a quarter."""
    expected = np.array([1, 2, 3, 4])
    found = np.array([1, 2, 3, 5])
    assert mismatches(found, expected, "int64").tolist() == [False, False, False, True]
    assert difference(found, expected) == 0.25
    texts = np.array([b"a", b"b"], np.object_)
    assert mismatches(texts, texts[::-1], "utf8").all()


def test_difference_is_a_share_of_the_scale() -> None:
    """It is 1 if a result has no size, or is not finite."""
    assert difference(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
    assert difference(np.array([1.0]), np.array([0.0])) == 1.0
    assert difference(np.array([np.nan]), np.array([1.0])) == 1.0
    assert difference(np.array([np.nan]), np.array([np.nan])) == 0.0
    assert difference(np.array([]), np.array([])) == 0.0
    assert scale_of(np.array([np.inf, -3.0, np.nan])) == 3.0
