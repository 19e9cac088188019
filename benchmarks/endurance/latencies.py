"""Latency histogram with logarithmic buckets, exchanged between processes as JSON.

Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

BASE_US = 20.0
"""Upper bound of the first bucket."""
STEP = 1.02
"""Ratio of two bounds: a tenth of the growth that the verdict permits."""
_LOG_STEP = math.log(STEP)


class Latencies:
    """Counts of latencies by bucket; at most a thousand buckets up to two hours."""

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = Counter({int(key): count for key, count in (counts or {}).items()})

    def __len__(self) -> int:
        return self._counts.total()

    def record(self, latency_us: float) -> None:
        """Count one latency."""
        self._counts[
            max(math.ceil(math.log(max(latency_us, BASE_US) / BASE_US) / _LOG_STEP), 0)
        ] += 1

    def add(self, other: Latencies) -> None:
        """Count the latencies of another histogram."""
        self._counts.update(other._counts)

    def percentile_us(self, percent: float) -> float | None:
        """The upper bound of the percentile's bucket; None without latencies."""
        rank = math.ceil(len(self) * percent / 100)
        for bucket in sorted(self._counts):
            rank -= self._counts[bucket]
            if rank <= 0:
                return BASE_US * STEP**bucket
        return None

    def encode(self) -> dict[str, int]:
        """The counts for JSON."""
        return {str(key): count for key, count in sorted(self._counts.items())}
