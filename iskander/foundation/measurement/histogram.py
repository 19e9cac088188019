"""Histogram with fixed buckets, for percentiles and Prometheus.

    bounds        50 us      75 us      100 us             10 s
    counts   [0]   |    [1]   |    [2]    |   ...   [n-1]   |   [n]

A bucket includes its upper bound (Prometheus convention). Counts are since the gateway's start;
`recent_values` has the latest values. Pure.

Runs on: gateway loop.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

_STEPS_US: Final = (100, 150, 200, 300, 500, 750)
LATENCY_BOUNDS_NS: Final = (
    50_000,
    75_000,
    *(step * 1000 * 10**decade for decade in range(5) for step in _STEPS_US),
    10_000_000_000,
)
"""50 us to 10 s in 33 bounds, none more than 5/3 of the one before it.

An echo costs 60 us and clients time out after seconds. With six buckets a decade the error of an
interpolated percentile is below a third for roughly even values; with the usual 1-2-5 it is a half.
A scrape costs some 60 bytes for each bound, lane and histogram.
"""

ROWS_BOUNDS: Final = tuple(1 << power for power in range(21))
"""1 to 1,048,576, the default limit of a batch; batches of clients are often powers of two."""


class Histogram:
    """Histogram of integers; `bounds` are the ascending upper bounds of the buckets."""

    __slots__ = ("_counts", "_min", "bounds", "max", "sum")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        assert bounds and all(low < high for low, high in pairwise(bounds))
        self.bounds = bounds
        self.sum = 0
        self.max = 0
        self._min = sys.maxsize
        self._counts = [0] * (len(bounds) + 1)

    def __repr__(self) -> str:
        return f"<Histogram {len(self)} values, mean {self.mean:g}, max {self.max}>"

    def __len__(self) -> int:
        return sum(self._counts)

    def record(self, value: int) -> None:
        """Count a value; in the path of every batch."""
        # A call of `bisect_left` from compiled code would cost as much as the rest.
        low, high, bounds = 0, len(self.bounds), self.bounds
        while low < high:
            middle = (low + high) >> 1
            if bounds[middle] < value:
                low = middle + 1
            else:
                high = middle
        self._counts[low] += 1
        self.sum += value
        # Calls of max() and min() would cost as much as the rest.
        if value > self.max:  # noqa: PLR1730
            self.max = value
        if value < self._min:  # noqa: PLR1730
            self._min = value

    @property
    def counts(self) -> tuple[int, ...]:
        """Count of each bucket; the last one is for values above all bounds."""
        return tuple(self._counts)

    @property
    def min(self) -> int:
        """Minimum; 0 for no values."""
        return self._min if len(self) else 0

    @property
    def mean(self) -> float:
        """Mean; 0 for no values."""
        return self.sum / max(len(self), 1)

    def percentile(self, percent: float) -> float:
        """Interpolate a percentile in its bucket, between minimum and maximum; 0 for no values."""
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Interpolate percentiles, as `percentile` does."""
        found = percentiles(self.bounds, self._counts, percents, self.max)
        return [float(min(max(value, self._min), self.max)) for value in found]


def percentiles(
    bounds: Sequence[float],
    counts: Sequence[int],
    percents: Sequence[float],
    highest: float | None = None,
) -> list[float]:
    """Interpolate percentiles in their buckets; all are 0 for no values.

    `counts` has the count of each bucket, and of the values above all bounds. Without `highest`,
    those values count as the last bound.
    """
    cumulative = list(accumulate(counts))
    total = cumulative[-1]
    if not total:
        return [0.0] * len(percents)
    uppers = (*bounds, bounds[-1] if highest is None else highest)
    found: list[float] = []
    for percent in percents:
        rank = total * percent / 100
        index = bisect_left(cumulative, max(rank, 1))
        low = bounds[index - 1] if index else 0
        below = cumulative[index] - counts[index]
        found.append(low + (uppers[index] - low) * (rank - below) / counts[index])
    return found
