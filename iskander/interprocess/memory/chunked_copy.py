"""Copies large buffers in pieces, between which the event loop serves other requests.

Memory is copied at 2 to 3 GB/s here, and its first touch costs as much again, so a batch of 64 MB
in one copy would block the event loop for tens of milliseconds.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from iskander.interprocess.memory.client_segment import SegmentRange

WHOLE_BYTES: Final = 4 << 20
"""Largest copy in one piece, which takes one to two milliseconds."""
PIECE_BYTES: Final = 1 << 20


def copy(target: memoryview, source: memoryview | SegmentRange) -> None:
    """Copy a source to a target of the same length."""
    if isinstance(source, SegmentRange):
        source.read_into(target)
    else:
        target[:] = source


def copy_in_pieces(target: memoryview, source: memoryview | SegmentRange) -> Iterator[None]:
    """Copy with a pause after every piece."""
    for start in range(0, len(source), PIECE_BYTES):
        stop = min(start + PIECE_BYTES, len(source))
        copy(target[start:stop], source[start:stop])
        yield
