"""Arrival times of requests in an open loop.

Pure.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

NS_PER_S = 1_000_000_000
Pattern = Literal["poisson", "fixed"]


def arrivals_ns(pattern: Pattern, per_s: float, seconds: float, seed: int) -> npt.NDArray[np.int64]:
    """Arrival times since the start, in nanoseconds, ascending and below `seconds`.

    Args:
        pattern: Poisson arrivals have exponential gaps; fixed ones are evenly spaced.
        per_s: Rate; above 0.
        seconds: Duration.
        seed: Of the gaps, or of the first fixed arrival.
    """
    generator = np.random.default_rng(seed)
    if pattern == "fixed":
        first = generator.random() / per_s
        moments = np.arange(first, seconds, 1 / per_s)
    else:
        # Too few gaps only in one case in a million.
        count = int(per_s * seconds + 5 * np.sqrt(per_s * seconds) + 10)
        moments = np.cumsum(generator.exponential(1 / per_s, count))
    return (moments[moments < seconds] * NS_PER_S).astype(np.int64)
