"""The sign of progress that a worker's own loop writes, and the gateway reads.

    bytes 0..8    when the loop last turned, monotonic nanoseconds (one clock for all processes)
    bytes 8..16   the batch that it runs now, or 0; of another gateway's batch, minus the digest of
                  its model

A helper thread would answer for a loop that hangs; this word cannot.

Runs on: worker main (writes), gateway loop (reads).
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

BEAT_BYTES: Final = 4096
"""A page: the least that can be mapped."""

_BEAT: Final = struct.Struct("<qq")


class Beat(NamedTuple):
    """One reading."""

    at_ns: int
    batch_id: int


def model_digest(name: str, version: str) -> int:
    """A positive number for a model version, the same in every process."""
    return zlib.crc32(f"{name}/{version}".encode()) + 1


def write_beat(view: memoryview, at_ns: int, batch_id: int) -> None:
    """Say that the loop turned."""
    _BEAT.pack_into(view, 0, at_ns, batch_id)


def read_beat(view: memoryview) -> Beat:
    """When the loop last turned, and what it was about to run."""
    return Beat(*_BEAT.unpack_from(view, 0))
