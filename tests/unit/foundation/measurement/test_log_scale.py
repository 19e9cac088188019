"""Percentiles of counts on a logarithmic scale."""

from __future__ import annotations

import pytest

from iskander.foundation.measurement.log_scale import (
    BUCKETS,
    EXPONENT_MAX,
    EXPONENT_MIN,
    STEPS,
    percentile,
    upper_bound,
)


def test_bounds_are_powers_of_two_in_steps() -> None:
    assert upper_bound(0) == 0
    assert upper_bound(1) == 2.0**EXPONENT_MIN
    assert upper_bound(1 + STEPS) == 2.0 ** (EXPONENT_MIN + 1)
    assert upper_bound(BUCKETS) == 2.0**EXPONENT_MAX


def test_percentiles_are_interpolated_and_at_most_the_highest() -> None:
    bucket = 1 - EXPONENT_MIN * STEPS  # Its upper bound is 1.
    counts = {0: 50, bucket: 50}
    assert percentile({}, 50, 0.0) == 0
    assert percentile(counts, 50, 1.0) == 0
    assert percentile(counts, 100, 1.0) == pytest.approx(1)
    assert percentile(counts, 75, 1.0) == pytest.approx(2 ** (-0.5 / STEPS))
    assert percentile(counts, 100, 0.95) == 0.95
    assert percentile({1: 1}, 50, 1e-20) == 1e-20
