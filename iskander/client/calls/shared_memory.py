"""Shared-memory regions: a ring of ranges, one for each batch in flight.

    put   ->  writes a batch to a free range, and returns the message with its location
    free  ->  frees the oldest range, after the result of its batch

A large batch in a region is neither written to a socket, nor read from one and reassembled.

Runs on: the caller's threads; one thread puts batches, and one frees their ranges.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from iskander.client.calls.retry import Deadline
from iskander.client.calls.sharing import WORTH_BYTES
from iskander.errors import NotReady, SegmentError
from iskander.interprocess.control.shared_regions import (
    REGION_HEADER,
    BodyLocation,
    encode,
    request_region,
)
from iskander.interprocess.memory.segment import Segment

IDLE_REGIONS_MAX = 4


class RegionPool:
    """Idle regions of a client, reused by its streams.

    Args:
        ask: Returns the path of the server's socket and its maximum size of a region, within a
            number of seconds.
        length_bytes: Size of each region.
        is_reduced: Whether a smaller limit of the server reduces the size; otherwise it is an
            error.
    """

    def __init__(
        self, ask: Callable[[float], tuple[Path, int]], length_bytes: int, *, is_reduced: bool
    ) -> None:
        self._ask = ask
        self._length_bytes = length_bytes
        self._is_reduced = is_reduced
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._is_closed = False

    def acquire(self, schema: pa.Schema, timeout_s: float) -> RegionLease:
        """Return a region for a stream of batches with this schema.

        Raises:
            IskanderError: The server grants no region, or its socket cannot be reached.
        """
        region = self._pop_idle() or self._request(timeout_s)
        region.begin(schema)
        return RegionLease(self, region)

    def release(self, region: Region, *, is_usable: bool = True) -> None:
        """Keep a region for the next stream, or close it."""
        with self._lock:
            if is_usable and not self._is_closed and len(self._idle) < IDLE_REGIONS_MAX:
                self._idle.append(region)
                return
        region.close()

    def close(self) -> None:
        """Close idle regions now, and used regions at the end of their streams."""
        self._is_closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close idle regions."""
        with self._lock:
            idle, self._idle = self._idle, []
        for region in idle:
            region.close()

    def _pop_idle(self) -> Region | None:
        with self._lock:
            while self._idle:
                region = self._idle.pop()
                if region.is_attached:
                    return region
                region.close()
        return None

    def _request(self, timeout_s: float) -> Region:
        deadline = Deadline(timeout_s)
        path, limit_bytes = self._ask(timeout_s)
        length_bytes = self._length_bytes
        if self._is_reduced:
            length_bytes = min(length_bytes, limit_bytes)
        left_s = deadline.remaining_s()
        assert left_s is not None
        try:
            return Region(path, length_bytes, left_s)
        except OSError as error:
            raise NotReady(f"no shared memory: {path} cannot be reached: {error}") from error


class RegionLease:
    """Use of a pool's region by one stream.

    Attributes:
        headers: Headers of the stream's call.
        is_usable: Whether another stream may use the region after this one.
    """

    def __init__(self, pool: RegionPool, region: Region) -> None:
        self._pool = pool
        self.region = region
        self.headers = [(REGION_HEADER.encode(), region.name.encode())]
        self.is_usable = True

    def release(self) -> None:
        """Return the region to its pool."""
        self._pool.release(self.region, is_usable=self.is_usable)


ALIGNMENT = 64
_PREFIX = struct.Struct("<4xi")
"""First bytes of an encapsulated message: continuation marker and header length."""


class Region:
    """Memory that the gateway shares with this client, for one stream at a time."""

    def __init__(self, path: Path, length_bytes: int, timeout_s: float) -> None:
        self._is_closed = True
        self._connection, grant, fd = request_region(path, length_bytes, timeout_s)
        try:
            self._segment = Segment.attach(fd, grant.bytes, is_writable=True)
        except SegmentError:
            self._connection.close()
            raise
        self._connection.setblocking(False)
        self.name = grant.region
        self._length = len(self._segment)
        self._schema = pa.schema([])
        self._schema_bytes = 0
        self._ranges: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        self._is_cancelled = False
        self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    @property
    def is_attached(self) -> bool:
        """Whether the gateway still has the region."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def put(self, batch: pa.RecordBatch, app_metadata: bytes = b"") -> bytes | None:
        """Wait for a free range and write a batch to it; return the message to send.

        Returns None for a batch that is too small or too large, and after `cancel_waits`.
        """
        needed = pa.ipc.get_record_batch_size(batch)
        if needed < WORTH_BYTES:
            return None
        needed += self._schema_bytes
        start = self._allocate(-(-needed // ALIGNMENT) * ALIGNMENT)
        if start is None:
            return None
        view = self._segment.view[start : start + needed]
        with pa.FixedSizeBufferWriter(pa.py_buffer(view)) as sink:
            pa.ipc.new_stream(sink, self._schema).write_batch(batch)
            end = sink.tell()
        at = _header_end(view, 0)
        body = _header_end(view, at)
        header = bytes(view[at + _PREFIX.size : body])
        return encode(BodyLocation(header, (start + body, end - body), app_metadata))

    def free(self) -> None:
        """Free the oldest range."""
        with self._changed:
            self._ranges.popleft()
            self._changed.notify()

    def cancel_waits(self) -> None:
        """Make `put` return None instead of waiting."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify()

    def begin(self, schema: pa.Schema) -> None:
        """Prepare for a stream of batches with this schema."""
        self._schema = schema
        # The IPC writer puts the schema before each batch; the gateway skips the schema.
        self._schema_bytes = schema.serialize().size
        self._ranges.clear()
        self._is_cancelled = False

    def close(self) -> None:
        """Release the region; a `put` in another thread may complete."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.close()
        self._segment.close()

    def _allocate(self, length: int) -> int | None:
        if length > self._length:
            return None
        with self._changed:
            while not self._is_cancelled:
                start = _free_start(self._ranges, length, self._length)
                if start is not None:
                    self._ranges.append((start, start + length))
                    return start
                self._changed.wait()
        return None


def _header_end(view: memoryview, at: int) -> int:
    """Return the end of the header of the encapsulated message that begins at `at`."""
    (length,) = _PREFIX.unpack_from(view, at)
    return at + _PREFIX.size + int(length)


def _free_start(ranges: deque[tuple[int, int]], length: int, size: int) -> int | None:
    """Return the start of a free range in the ring; None if no free range is long enough."""
    if not ranges:
        return 0
    first, end = ranges[0][0], ranges[-1][1]
    if end <= first:
        return end if first - end >= length else None
    if size - end >= length:
        return end
    return 0 if first >= length else None
