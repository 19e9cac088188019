"""Histogram of magnitudes on a logarithmic scale: bounds, and percentiles of its counts.

    bucket       0     1                2                        BUCKETS
    magnitude    0     up to 2^-40      up to 2^(-40 + 1/8)  ... above 2^(40 - 1/8)

A bucket includes its upper bound, which is 9 % above the one before it. Counts are mappings from
bucket to number, so that those of several processes can be added. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

STEPS: Final = 8
"""Buckets for each power of two."""
EXPONENT_MIN: Final = -40
EXPONENT_MAX: Final = 40
BUCKETS: Final = (EXPONENT_MAX - EXPONENT_MIN) * STEPS + 1


def upper_bound(bucket: int) -> float:
    """Return the upper bound of a bucket; the last one has none, and gets that of its place."""
    return 2.0 ** (EXPONENT_MIN + (bucket - 1) / STEPS) if bucket else 0.0


def percentile(counts: Mapping[int, int], percent: float, highest: float) -> float:
    """Return a percentile, interpolated in its bucket and at most `highest`; 0 without counts."""
    rank = sum(counts.values()) * percent / 100
    for bucket, count in sorted(counts.items()):
        if rank <= count:
            low, high = upper_bound(bucket - 1) if bucket else 0.0, upper_bound(bucket)
            value = low * (high / low) ** (rank / count) if low else high
            return min(value, highest)
        rank -= count
    return highest
