"""Copies that let others have their turn: a large one is made piece by piece.

Memory is moved at 2 to 3 GB/s here, and its first touch costs as much again, so a batch of 64 MB at
once would hold whoever waits behind it for tens of milliseconds.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from iskander.memory.client_segment import SegmentRange

WHOLE_BYTES: Final = 4 << 20
"""Up to here a copy is made at once; a millisecond or two."""
PIECE_BYTES: Final = 1 << 20


def copy(target: memoryview, source: memoryview | SegmentRange) -> None:
    """Copy a source to a target of its length."""
    if isinstance(source, SegmentRange):
        source.read_into(target)
    else:
        target[:] = source


def copied(target: memoryview, source: memoryview | SegmentRange) -> Iterator[None]:
    """The same, with a pause after every piece."""
    for start in range(0, len(source), PIECE_BYTES):
        stop = min(start + PIECE_BYTES, len(source))
        copy(target[start:stop], source[start:stop])
        yield
