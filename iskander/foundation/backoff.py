"""Waits after failures in a row: each twice as long as the one before, up to a maximum.

Pure.
"""

from __future__ import annotations

from typing import Final

_DOUBLINGS_MAX: Final = 64
"""Keeps the power finite for any number of failures."""


def backoff(failures: int, first: float, longest: float) -> float:
    """Return the wait after a number of failures in a row, in the unit of `first` and `longest`.

    The wait after no failure is that after one.
    """
    doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
    return min(first * 2.0**doublings, longest)
