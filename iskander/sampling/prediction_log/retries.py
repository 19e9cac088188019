"""Pauses after failures in a row: one second, then twice as long each time, up to a minute.

Pure.
"""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 1.0
DOUBLINGS_MAX: Final = 6
MOST_S: Final = 60.0


def pause_s(failures: int) -> float:
    """Return the pause after a number of failures in a row."""
    return min(FIRST_S * 2.0 ** min(failures - 1, DOUBLINGS_MAX), MOST_S)
