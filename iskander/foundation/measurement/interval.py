"""Percentiles of an interval, from the bucket counts of a histogram in it.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence


def percentiles(
    bounds: Sequence[float], counts: Sequence[int], percents: Sequence[float]
) -> list[float]:
    """Interpolate percentiles in their buckets; values above all bounds count as the last bound.

    Args:
        bounds: Upper bounds of the buckets.
        counts: Count of each bucket, and of the values above all bounds; not all 0.
        percents: In ascending order.
    """
    total = sum(counts)
    found: list[float] = []
    below, low = 0, 0.0
    wanted = iter(percents)
    percent = next(wanted, None)
    for high, count in zip((*bounds, bounds[-1]), counts, strict=True):
        while percent is not None and count and total * percent / 100 <= below + count:
            found.append(low + (high - low) * (total * percent / 100 - below) / count)
            percent = next(wanted, None)
        below += count
        low = high
    return found
