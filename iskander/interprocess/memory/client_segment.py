"""Shared memory that a client process writes and the gateway reads.

    ClientSegment   a memfd of a fixed length, created here; a client with the descriptor writes it
    SegmentRange    a part of a ClientSegment, which is copied once to its target

Resident pages are read from a mapping, which is twice as fast. Pages that were never written, or
were reclaimed, are read by pread, so that reading allocates no memory for them. The pages are freed
with the segment, even while a client still has the descriptor. The client can change bytes between
two reads, so bytes that must be checked before use are copied to private memory first.

Runs on: gateway. Source: memfd_create(2), fcntl(2) file sealing, mincore(2), fallocate(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

from iskander.errors import SegmentError
from iskander.interprocess.memory.segment import SEALED_LENGTH, address_of

_LIBC: Final = ctypes.CDLL(None)
_PUNCH_HOLE: Final = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE."""


class ClientSegment:
    """A memfd whose pages are freed with the last reference to it or to a range of it.

    It owns `fd`, which the client receives. Raises `SegmentError` if the system lacks the memory.
    """

    def __init__(self, label: str, length_bytes: int) -> None:
        self.fd = -1
        self._length = length_bytes
        try:
            self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, length_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALED_LENGTH)
            self._mapping = mmap.mmap(self.fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._address = address_of(memoryview(self._mapping))
        except OSError as error:
            raise SegmentError(
                f"creating a client segment of {length_bytes} bytes failed: {error.strerror}"
            ) from None

    def __del__(self) -> None:
        if self.fd >= 0:
            whole_pages = -(-self._length // mmap.PAGESIZE) * mmap.PAGESIZE
            _LIBC.fallocate(self.fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(whole_pages))
            os.close(self.fd)

    def __len__(self) -> int:
        return self._length

    def read_into(self, target: memoryview, start: int) -> None:
        """Fill a target with the bytes from `start` on."""
        stop, at = start + len(target), 0
        if stop <= self._length and self._is_resident(start, stop):
            target[:] = memoryview(self._mapping)[start:stop]
            return
        try:
            while start + at < stop:
                count = os.preadv(self.fd, [target[at:]], start + at)
                if not count:
                    raise SegmentError("client segment is shorter than its declared length")
                at += count
        except OSError as error:
            raise SegmentError(f"reading a client segment failed: {error.strerror}") from None

    def _is_resident(self, start: int, stop: int) -> bool:
        """Return whether all pages of a range are in memory, so that access allocates no page."""
        first = start - start % mmap.PAGESIZE
        pages = bytearray(-(-(stop - first) // mmap.PAGESIZE))
        vector = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
        address = ctypes.c_void_p(self._address + first)
        return _LIBC.mincore(address, ctypes.c_size_t(stop - first), vector) == 0 and 0 not in pages


class SegmentRange:
    """The bytes from `start` to `stop` of a client segment; a slice is a `SegmentRange` again."""

    def __init__(self, segment: ClientSegment, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(segment)
        self._segment = segment
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> SegmentRange:
        start, stop, _ = part.indices(len(self))
        return SegmentRange(self._segment, self._start + start, self._start + max(start, stop))

    def read_into(self, target: memoryview) -> None:
        """Copy the range to a target of the same length."""
        assert len(target) == len(self)
        self._segment.read_into(target, self._start)

    def read(self) -> memoryview:
        """Copy the range to private memory."""
        target = memoryview(bytearray(len(self)))
        self.read_into(target)
        return target
