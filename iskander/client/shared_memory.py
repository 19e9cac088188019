"""Memory that a gateway of this machine lent: a ring of ranges, one for each batch in flight.

    put   ->  a batch is written to a free range; what says where its body is, is sent
    free  ->  the oldest batch's result is there, and its range is free again

A large batch that goes this way is not written to a socket, read from it and put together again.

Runs on: the caller's threads: one puts and one frees.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from iskander.control.shared_regions import BodyLocation, encode, request_region
from iskander.errors import NotReady, SegmentError
from iskander.memory.segment import Segment

IDLE_MAX = 4
"""Kept; more than so many streams at once borrow anew."""


class Regions:
    """What a client has been lent.

    Args:
        lender: Finds the path at which the gateway lends.
        length_bytes: Of each region; 0: none is wanted.
        timeout_s: For the gateway's answer.
    """

    def __init__(self, lender: Callable[[], Path], length_bytes: int, timeout_s: float) -> None:
        self._lender = lender
        self._length_bytes = length_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Region] = []
        self._is_closed = False

    def for_stream(self, first: pa.RecordBatch) -> Region | None:
        """Memory for a stream that begins with this batch, where that is worth it.

        Raises:
            NotReady: Nobody lends any at the path.
            IskanderError: Why there is none.
        """
        if not self._length_bytes or first.nbytes < WORTH_BYTES or not can_share(first.schema):
            return None
        region = self._idle_one() or self._borrow()
        region.begin(first.schema)
        return region

    def put_by(self, region: Region, *, is_usable: bool = True) -> None:
        """Keep a region for the next stream, where one can use it."""
        with self._lock:
            if is_usable and not self._is_closed and len(self._idle) < IDLE_MAX:
                self._idle.append(region)
                return
        region.close()

    def close(self) -> None:
        """Give back what no stream is using; the others as they end."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for region in idle:
            region.close()

    def _idle_one(self) -> Region | None:
        with self._lock:
            while self._idle:
                region = self._idle.pop()
                if region.is_lent:
                    return region
                region.close()
        return None

    def _borrow(self) -> Region:
        path = self._lender()
        try:
            return Region(path, self._length_bytes, self._timeout_s)
        except OSError as error:
            raise NotReady(f"no gateway of this machine lends memory at {path}: {error}") from error


WORTH_BYTES = 65_536
"""What is smaller costs less over the connection."""
ALIGNMENT = 64
_PREFIX = struct.Struct("<4xi")
"""An encapsulated message begins with a mark and the length of its header."""


class Region:
    """A region, for one stream at a time.

    Args:
        path: Where the gateway lends memory.
        length_bytes: How much is wanted.
        timeout_s: For the gateway's answer.

    Attributes:
        name: By which streams say that they use it.

    Raises:
        OSError: Nobody answers at the path.
        IskanderError: Why there is none.
    """

    def __init__(self, path: Path, length_bytes: int, timeout_s: float) -> None:
        self._is_closed = True
        self._connection, lent, fd = request_region(path, length_bytes, timeout_s)
        try:
            self._segment = Segment.attach(fd, lent.bytes, is_writable=True)
        except SegmentError:
            self._connection.close()
            raise
        self._connection.setblocking(False)
        self.name = lent.region
        self._length = len(self._segment)
        self._schema = pa.schema([])
        self._schema_bytes = 0
        self._ranges: deque[tuple[int, int]] = deque()
        self._changed = threading.Condition()
        self._is_given_up = False
        self._is_closed = False

    def __del__(self) -> None:
        if not self._is_closed:
            self.close()

    @property
    def is_lent(self) -> bool:
        """Whether the gateway still knows of it."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def put(self, batch: pa.RecordBatch, app_metadata: bytes = b"") -> bytes | None:
        """Write a batch of the stream's schema to a free range; wait where there is none.

        Returns:
            What says where it is; None where the batch is to be sent as any other: it is small, or
            would not fit, or the region was given up.
        """
        wanted = pa.ipc.get_record_batch_size(batch)
        if wanted < WORTH_BYTES:
            return None
        wanted += self._schema_bytes
        start = self._take(-(-wanted // ALIGNMENT) * ALIGNMENT)
        if start is None:
            return None
        view = self._segment.view[start : start + wanted]
        with pa.FixedSizeBufferWriter(pa.py_buffer(view)) as sink:
            pa.ipc.new_stream(sink, self._schema).write_batch(batch)
            end = sink.tell()
        at = _header_end(view, 0)
        body = _header_end(view, at)
        header = bytes(view[at + _PREFIX.size : body])
        return encode(BodyLocation(header, (start + body, end - body), app_metadata))

    def free(self) -> None:
        """Let go of the oldest range: its batch's result has come."""
        with self._changed:
            self._ranges.popleft()
            self._changed.notify()

    def give_up(self) -> None:
        """Let whoever waits for a range go on without."""
        with self._changed:
            self._is_given_up = True
            self._changed.notify()

    def begin(self, schema: pa.Schema) -> None:
        """Be there for a stream of batches with this schema."""
        self._schema = schema
        # What writes a batch writes the schema before it, which nobody reads here.
        self._schema_bytes = schema.serialize().size
        self._ranges.clear()
        self._is_given_up = False

    def close(self) -> None:
        """Give it back; whoever is in the midst of `put` may finish it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._connection.close()
        self._segment.close()

    def _take(self, length: int) -> int | None:
        if length > self._length:
            return None
        with self._changed:
            while not self._is_given_up:  # As it is when the stream has ended.
                start = _room(self._ranges, length, self._length)
                if start is not None:
                    self._ranges.append((start, start + length))
                    return start
                self._changed.wait()
        return None


def _header_end(view: memoryview, at: int) -> int:
    """Where the header of the encapsulated message at `at` ends."""
    (length,) = _PREFIX.unpack_from(view, at)
    return at + _PREFIX.size + int(length)


def can_share(schema: pa.Schema) -> bool:
    """Whether each batch of a schema is one message: dictionaries are sent as others."""
    return not any(_has_dictionary(field.type) for field in schema)


def _has_dictionary(kind: Any) -> bool:  # noqa: ANN401
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(index).type) for index in range(kind.num_fields))


def _room(ranges: deque[tuple[int, int]], length: int, size: int) -> int | None:
    """Where a range of the ring is free, between the newest and the oldest."""
    if not ranges:
        return 0
    first, end = ranges[0][0], ranges[-1][1]
    if end <= first:
        return end if first - end >= length else None
    if size - end >= length:
        return end
    return 0 if first >= length else None
