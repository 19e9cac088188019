"""Percentiles from bucket counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.foundation.measurement.histogram import Histogram
from iskander.foundation.measurement.interval import percentiles

BOUNDS = (10, 20, 40)


def test_percentiles_are_interpolated_in_their_bucket() -> None:
    assert percentiles(BOUNDS, (0, 100, 0, 0), (50, 95, 99)) == [15.0, 19.5, 19.9]
    assert percentiles(BOUNDS, (50, 0, 50, 0), (50, 75)) == [10.0, 30.0]


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
