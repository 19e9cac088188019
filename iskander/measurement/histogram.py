"""How often which value came: counts in fixed ranges, for percentiles and for Prometheus.

    bounds        50 us      75 us      100 us             10 s
    counts   [0]   |    [1]   |    [2]    |   ...   [n-1]   |   [n]

A range holds its upper bound, as Prometheus has it. Nothing grows, and nothing is forgotten: what
it says is of the whole life of the gateway; `recent` knows the last moments. Pure.

Runs on: gateway loop.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Final

import msgspec

_STEPS_US: Final = (100, 150, 200, 300, 500, 750)
LATENCY_BOUNDS_NS: Final = (
    50_000,
    75_000,
    *(step * 1000 * 10**decade for decade in range(5) for step in _STEPS_US),
    10_000_000_000,
)
"""50 us to 10 s in 33 bounds, none more than 5/3 of the one before it.

An echo takes 60 us and a client gives up after seconds. With six ranges a decade a percentile, read
by interpolation, is off by less than a third where values are spread at all evenly; with 1-2-5, the
usual choice, by half. A scrape pays some 60 bytes for each bound, lane and histogram.
"""

ROWS_BOUNDS: Final = tuple(1 << power for power in range(21))
"""1 to 1,048,576, the most that a batch may have by default; clients like powers of two."""


class Snapshot(msgspec.Struct, frozen=True):
    """A histogram at a moment.

    Attributes:
        counts: Of each range; one more than there are bounds, for what is above the last.
        sum: Of all values.
        min: The least value; 0 where there is none.
        max: The greatest value; 0 where there is none.
    """

    counts: tuple[int, ...]
    sum: int
    min: int
    max: int

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)


class Histogram:
    """Counts of values in fixed ranges.

    Args:
        bounds: Upper bounds of the ranges, rising; values above the last have a range too.

    Attributes:
        sum: Of all values.
        max: The greatest value; 0 where there is none.
    """

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
        # By hand: compiled, a call of `bisect_left` would take as long as all the rest.
        low, high, bounds = 0, len(self.bounds), self.bounds
        while low < high:
            middle = (low + high) >> 1
            if bounds[middle] < value:
                low = middle + 1
            else:
                high = middle
        self._counts[low] += 1
        self.sum += value
        # Two calls of max() and min() would take as long as all the rest.
        if value > self.max:  # noqa: PLR1730
            self.max = value
        if value < self._min:  # noqa: PLR1730
            self._min = value

    @property
    def min(self) -> int:
        """The least value; 0 where there is none."""
        return self._min if len(self) else 0

    @property
    def mean(self) -> float:
        """Of all values; 0 where there is none."""
        return self.sum / max(len(self), 1)

    def percentile(self, percent: float) -> float:
        """The value that `percent` of all values do not exceed; 0 where there is none.

        As if the values of a range were spread evenly in it, and never beyond the least and the
        greatest value that there were.
        """
        wanted = len(self) * percent / 100
        low = 0
        for index, count in enumerate(self._counts):
            high = self.bounds[index] if index < len(self.bounds) else self.max
            if count and wanted <= count:
                value = low + (high - low) * wanted / count
                return min(max(value, self._min), self.max)
            wanted -= count
            low = high
        return float(self.max)

    def snapshot(self) -> Snapshot:
        """What it holds now."""
        return Snapshot(tuple(self._counts), self.sum, self.min, self.max)
