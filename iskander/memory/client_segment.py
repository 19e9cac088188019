"""Memory that another process fills: made and sealed here, and read here.

    Loan     a memfd of a fixed length, handed over as a descriptor; whoever has it writes to it
    Range    a part of it, which is read once, to where the bytes are to be

Bytes that were written are read from a mapping, which is twice as fast; those that were not, or
were taken back, by pread, so that reading takes no memory for them. At a loan's end its pages are
freed, whoever has the descriptor still. What is read can have changed since it was last read, so
whoever has to look at bytes before they are used reads them to memory of its own.

Runs on: gateway. Source: memfd_create(2), fcntl(2) file sealing, mincore(2), fallocate(2).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Final

from iskander.errors import SegmentError
from iskander.memory.segment import F_ADD_SEALS, SEALED_LENGTH, address_of

_LIBC: Final = ctypes.CDLL(None)
_PUNCH_HOLE: Final = 0x02 | 0x01
"""And keep the length."""


class ClientSegment:
    """The memory; it goes with the last one who has a range of it, or the descriptor.

    Args:
        label: What `/proc/PID/fd` shows; not a name that anyone can open.
        length_bytes: How much.

    Attributes:
        fd: To be handed over; the loan owns it.

    Raises:
        SegmentError: The system refused it.
    """

    def __init__(self, label: str, length_bytes: int) -> None:
        self.fd = -1
        self._length = length_bytes
        try:
            self.fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, length_bytes)
            fcntl.fcntl(self.fd, F_ADD_SEALS, SEALED_LENGTH)
            self._mapping = mmap.mmap(self.fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
            self._address = address_of(memoryview(self._mapping))
        except OSError as error:
            raise SegmentError(
                f"a loan of {length_bytes} bytes was refused: {error.strerror}"
            ) from None

    def __del__(self) -> None:
        if self.fd >= 0:
            whole_pages = -(-self._length // mmap.PAGESIZE) * mmap.PAGESIZE
            _LIBC.fallocate(self.fd, _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(whole_pages))
            os.close(self.fd)

    def __len__(self) -> int:
        return self._length

    def read_into(self, target: memoryview, start: int) -> None:
        """Read from a place on, as much as there is room for.

        Raises:
            SegmentError: The system did not let us.
        """
        stop, at = start + len(target), 0
        if stop <= self._length and self._is_there(start, stop):
            target[:] = memoryview(self._mapping)[start:stop]
            return
        try:
            while start + at < stop:
                got = os.preadv(self.fd, [target[at:]], start + at)
                if not got:
                    raise SegmentError("lent memory is shorter than it was made")
                at += got
        except OSError as error:
            raise SegmentError(f"lent memory could not be read: {error.strerror}") from None

    def _is_there(self, start: int, stop: int) -> bool:
        """Whether all pages of a part are in memory, so that none is taken by looking at them."""
        first = start - start % mmap.PAGESIZE
        pages = bytearray(-(-(stop - first) // mmap.PAGESIZE))
        vector = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
        where = ctypes.c_void_p(self._address + first)
        return _LIBC.mincore(where, ctypes.c_size_t(stop - first), vector) == 0 and 0 not in pages


class SegmentRange:
    """A part of a loan; `range_[start:stop]` is a part of it.

    Args:
        loan: Whose.
        start: Where it begins in the loan.
        stop: Where it ends; the range is within the loan.
    """

    def __init__(self, loan: ClientSegment, start: int, stop: int) -> None:
        assert 0 <= start <= stop <= len(loan)
        self._loan = loan
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> SegmentRange:
        start, stop, _ = part.indices(len(self))
        return SegmentRange(self._loan, self._start + start, self._start + max(start, stop))

    def read_into(self, target: memoryview) -> None:
        """Read all of it to a target of its length.

        Raises:
            SegmentError: The system did not let us.
        """
        assert len(target) == len(self)
        self._loan.read_into(target, self._start)

    def read(self) -> memoryview:
        """All of it, as bytes that nobody changes."""
        target = memoryview(bytearray(len(self)))
        self.read_into(target)
        return target
