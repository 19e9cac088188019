"""Histograms: what is counted where, and how far a percentile may be from the truth."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.measurement.histogram import LATENCY_BOUNDS_NS, ROWS_BOUNDS, Histogram

VALUES = st.lists(st.integers(0, 50_000_000_000), min_size=1, max_size=200)
PERCENTS = st.floats(0, 100)


def filled(values: list[int], bounds: tuple[int, ...] = LATENCY_BOUNDS_NS) -> Histogram:
    histogram = Histogram(bounds)
    for value in values:
        histogram.record(value)
    return histogram


def test_a_range_holds_its_upper_bound_and_not_its_lower_one() -> None:
    histogram = filled([0, 10, 11, 20, 21, 1000], (10, 20))

    assert histogram.counts == (2, 2, 2)


def test_an_empty_histogram_is_all_zeros() -> None:
    histogram = Histogram((10, 20))

    assert (len(histogram), histogram.sum, histogram.min, histogram.max) == (0, 0, 0, 0)
    assert (histogram.mean, histogram.percentile(50), sum(histogram.counts)) == (0, 0, 0)


@settings(deadline=None)
@given(VALUES)
def test_sum_count_least_and_greatest_are_exact(values: list[int]) -> None:
    histogram = filled(values)

    assert sum(histogram.counts) == len(histogram) == len(values)
    assert histogram.sum == sum(values)
    assert (histogram.min, histogram.max) == (min(values), max(values))
    assert histogram.mean == pytest.approx(sum(values) / len(values))


def test_counts_that_were_read_do_not_change() -> None:
    histogram = filled([1], (10,))
    before = histogram.counts

    histogram.record(1)

    assert (sum(before), sum(histogram.counts)) == (1, 2)


def test_values_in_one_range_are_taken_to_be_spread_evenly() -> None:
    histogram = filled([*range(101, 201)], (100, 200, 400))

    assert histogram.percentile(25) == pytest.approx(125)
    assert histogram.percentile(99) == pytest.approx(199)


def test_a_percentile_is_found_in_the_range_that_it_is_in() -> None:
    """Nine in ten below 100, the others between 200 and 400."""
    histogram = filled([50] * 90 + [400] * 10, (100, 200, 400))

    assert histogram.percentile(90) <= 100
    assert histogram.percentile(91) > 200
    assert histogram.percentile(100) == 400


@settings(deadline=None)
@given(VALUES, PERCENTS)
def test_a_percentile_is_in_the_same_range_as_the_true_one(
    values: list[int], percent: float
) -> None:
    """So it is off by no more than that range is wide; beyond the bounds, by the greatest value."""
    place = min(max(math.ceil(len(values) * percent / 100), 1), len(values)) - 1
    truth = sorted(values)[place]
    index = bisect_left(LATENCY_BOUNDS_NS, truth)
    low = LATENCY_BOUNDS_NS[index - 1] if index else 0
    high = LATENCY_BOUNDS_NS[index] if index < len(LATENCY_BOUNDS_NS) else max(values)

    assert low <= filled(values).percentile(percent) <= high


@settings(deadline=None)
@given(VALUES, PERCENTS, PERCENTS)
def test_percentiles_rise_and_stay_within_what_there_was(
    values: list[int], one: float, other: float
) -> None:
    histogram = filled(values)
    low, high = histogram.percentile(min(one, other)), histogram.percentile(max(one, other))

    assert min(values) <= low <= high <= max(values)


def test_equal_values_have_exact_percentiles() -> None:
    """As batches of always the same rows have; half of a range's width would be half of them."""
    histogram = filled([700] * 5, ROWS_BOUNDS)

    assert [histogram.percentile(percent) for percent in (0, 50, 99, 100)] == [700] * 4


def test_bounds_must_rise() -> None:
    for bounds in ((), (10, 10), (20, 10)):
        with pytest.raises(AssertionError):
            Histogram(bounds)


def test_latencies_from_50_us_to_10_s_are_told_apart() -> None:
    """No bound is more than 5/3 of the one before it."""
    assert (LATENCY_BOUNDS_NS[0], LATENCY_BOUNDS_NS[-1]) == (50_000, 10_000_000_000)
    ratios = [high / low for low, high in pairwise(LATENCY_BOUNDS_NS)]
    assert max(ratios) <= 5 / 3


def test_rows_have_a_range_for_each_power_of_two() -> None:
    assert (ROWS_BOUNDS[0], ROWS_BOUNDS[-1], len(ROWS_BOUNDS)) == (1, 1 << 20, 21)
