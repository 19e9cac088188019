"""Histograms: ranges, exact aggregates, and the error of percentiles."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.foundation.measurement.histogram import (
    LATENCY_BOUNDS_NS,
    ROWS_BOUNDS,
    Histogram,
    percentiles,
)

VALUES = st.lists(st.integers(0, 50_000_000_000), min_size=1, max_size=200)
PERCENTS = st.floats(0, 100)
BOUNDS = (10, 20, 40)


def histogram_of(values: list[int], bounds: tuple[int, ...] = LATENCY_BOUNDS_NS) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.record(value)
    return histogram


def test_range_includes_its_upper_bound_and_excludes_its_lower_bound() -> None:
    histogram = histogram_of([0, 10, 11, 20, 21, 1000], (10, 20))

    assert histogram.counts == (2, 2, 2)


def test_empty_histogram_is_all_zeros() -> None:
    histogram = Histogram((10, 20))

    assert (len(histogram), histogram.sum, histogram.min, histogram.max) == (0, 0, 0, 0)
    assert (histogram.mean, histogram.percentile(50), sum(histogram.counts)) == (0, 0, 0)


@settings(deadline=None)
@given(VALUES)
def test_sum_count_min_and_max_are_exact(values: list[int]) -> None:
    histogram = histogram_of(values)

    assert sum(histogram.counts) == len(histogram) == len(values)
    assert histogram.sum == sum(values)
    assert (histogram.min, histogram.max) == (min(values), max(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_returned_counts_do_not_change() -> None:
    histogram = histogram_of([1], (10,))
    before = histogram.counts

    histogram.record(1)

    assert (sum(before), sum(histogram.counts)) == (1, 2)


def test_percentile_interpolates_within_a_range() -> None:
    histogram = histogram_of([*range(101, 201)], (100, 200, 400))

    assert histogram.percentile(25) == pytest.approx(125)
    assert histogram.percentile(99) == pytest.approx(199)


def test_percentile_is_in_the_range_of_its_rank() -> None:
    """90% of the values are below 100, and the others between 200 and 400."""
    histogram = histogram_of([50] * 90 + [400] * 10, (100, 200, 400))

    assert histogram.percentile(90) <= 100
    assert histogram.percentile(91) > 200
    assert histogram.percentile(100) == 400


@settings(deadline=None)
@given(VALUES, PERCENTS)
def test_percentile_is_in_the_range_of_the_true_value(values: list[int], percent: float) -> None:
    """The error is at most the width of a range; the last range ends at the maximum."""
    rank = min(max(math.ceil(len(values) * percent / 100), 1), len(values)) - 1
    true_value = sorted(values)[rank]
    index = bisect_left(LATENCY_BOUNDS_NS, true_value)
    low = LATENCY_BOUNDS_NS[index - 1] if index else 0
    high = LATENCY_BOUNDS_NS[index] if index < len(LATENCY_BOUNDS_NS) else max(values)

    assert low <= histogram_of(values).percentile(percent) <= high


@settings(deadline=None)
@given(VALUES, PERCENTS, PERCENTS)
def test_percentiles_are_monotonic_between_min_and_max(
    values: list[int], one: float, other: float
) -> None:
    histogram = histogram_of(values)
    low, high = histogram.percentile(min(one, other)), histogram.percentile(max(one, other))

    assert min(values) <= low <= high <= max(values)


def test_equal_values_have_exact_percentiles() -> None:
    """Batches of constant size are common, and half the width of a range is a large error."""
    histogram = histogram_of([700] * 5, ROWS_BOUNDS)

    assert [histogram.percentile(percent) for percent in (0, 50, 99, 100)] == [700] * 4


def test_bounds_must_increase() -> None:
    for bounds in ((), (10, 10), (20, 10)):
        with pytest.raises(AssertionError):
            Histogram(bounds)


def test_latency_bounds_cover_50_us_to_10_s() -> None:
    """No bound is more than 5/3 of the one before it."""
    assert (LATENCY_BOUNDS_NS[0], LATENCY_BOUNDS_NS[-1]) == (50_000, 10_000_000_000)
    ratios = [high / low for low, high in pairwise(LATENCY_BOUNDS_NS)]
    assert max(ratios) <= 5 / 3


def test_rows_have_a_range_for_each_power_of_two() -> None:
    assert (ROWS_BOUNDS[0], ROWS_BOUNDS[-1], len(ROWS_BOUNDS)) == (1, 1 << 20, 21)


def test_percentiles_of_counts_are_interpolated_in_their_bucket() -> None:
    assert percentiles(BOUNDS, (0, 100, 0, 0), (50, 95, 99)) == [15.0, 19.5, 19.9]
    assert percentiles(BOUNDS, (50, 0, 50, 0), (50, 75)) == [10.0, 30.0]


def test_percentiles_without_values_are_zero() -> None:
    assert percentiles(BOUNDS, (0, 0, 0, 0), (50, 99)) == [0.0, 0.0]


def test_values_above_all_bounds_are_the_last_bound() -> None:
    assert percentiles(BOUNDS, (0, 0, 0, 3), (50, 99)) == [40.0, 40.0]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=50),
    st.lists(st.integers(1, 100), min_size=1, max_size=4),
)
def test_percentiles_are_ordered_and_in_the_bucket_of_the_histograms(
    values: list[int], percents: list[int]
) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.record(value)

    found = percentiles(BOUNDS, histogram.counts, sorted(percents))

    assert len(found) == len(percents)
    assert found == sorted(found)
    for value, percent in zip(found, sorted(percents), strict=True):
        # The histogram also knows the minimum and the maximum.
        limited = min(max(value, histogram.min), histogram.max)
        assert histogram.percentile(percent) == pytest.approx(limited)
