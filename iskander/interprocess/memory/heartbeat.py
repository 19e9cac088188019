"""Heartbeat that a worker's event loop writes to shared memory and the gateway reads.

    bytes 0..8    time of the last loop iteration, monotonic nanoseconds (one clock for all
                  processes)
    bytes 8..16   id of the running batch, or 0; for a batch of another gateway, minus the digest of
                  its model

The loop itself writes the heartbeat; a helper thread would continue while the loop hangs.

Runs on: worker main (writes), gateway loop (reads).
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

HEARTBEAT_BYTES: Final = 4096
"""One page, the smallest mapping."""

_HEARTBEAT: Final = struct.Struct("<qq")


class Heartbeat(NamedTuple):
    """The last heartbeat of a worker, as the gateway reads it."""

    at_ns: int
    batch_id: int


def model_digest(name: str, version: str) -> int:
    """Return a positive number for a model version, the same in every process."""
    return zlib.crc32(f"{name}/{version}".encode()) + 1


def write_heartbeat(view: memoryview, at_ns: int, batch_id: int) -> None:
    """Write the heartbeat of one loop iteration."""
    _HEARTBEAT.pack_into(view, 0, at_ns, batch_id)


def read_heartbeat(view: memoryview) -> Heartbeat:
    """Read the last heartbeat."""
    return Heartbeat(*_HEARTBEAT.unpack_from(view, 0))
