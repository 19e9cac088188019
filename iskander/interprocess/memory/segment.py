"""Shared memory segment: a sealed memfd, mapped by both processes.

The kernel frees a segment when its last holder ends; a process without the descriptor cannot open
it.

    creator   memfd_create -> ftruncate -> mmap RW -> mbind -> populate -> lock -> seal
    receiver  check seals and length -> mmap RO or RW -> populate its own page tables

Seals prevent a peer from truncating the file (a read past its end raises SIGBUS). An input arena is
also sealed against future writes: the creator's mapping stays writable and no process can make
another. The creator's lock and node policy belong to the memory, so a receiver requests none.

Runs on: gateway (creates), workers and clients that share memory (attach). Only this module and
`client_segment` import mmap. Source: memfd_create(2), fcntl(2) file sealing, madvise(2), mlock(2),
shmem_enabled in Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from iskander.errors import SegmentError
from iskander.interprocess.memory.backing import (
    ANY_MEMORY,
    HUGE_PAGE_BYTES,
    Backing,
    BackingOptions,
    huge_pages_notice,
    lock_notice,
    mapped_huge_bytes,
    mapped_node_bytes,
    node_notice,
)
from iskander.interprocess.memory.numa import prefer_node_for

_F_SEAL_FUTURE_WRITE = 0x10
SEALED_LENGTH = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Seals of memory whose length and seals cannot change any more."""
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_RESERVED = os.MFD_HUGETLB | os.MFD_HUGE_2MB


class Segment:
    """A shared mapping of a fixed length.

    Attributes:
        fd: Descriptor of the memfd; the segment owns it.
        view: The mapped bytes; read-only if mapped so.
        address: Address of the mapping in this process.
        backing: Actual backing, as far as the creator knows.
    """

    __slots__ = ("_mapping", "address", "backing", "fd", "view")

    def __init__(self, fd: int, length_bytes: int, *, is_writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self.fd = fd
        self._mapping = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, prot=access)
        self.view = memoryview(self._mapping)
        self.address = address_of(self.view)
        self.backing = Backing(length_bytes)

    def __repr__(self) -> str:
        access = "ro" if self.view.readonly else "rw"
        return f"<Segment fd={self.fd} {len(self.view)} bytes {access}>"

    def __len__(self) -> int:
        return len(self.view)

    @classmethod
    def create(
        cls,
        label: str,
        length_bytes: int,
        options: BackingOptions = ANY_MEMORY,
        *,
        is_read_only: bool = False,
    ) -> Segment:
        """Create and seal a segment; its backing is the requested backing as far as available.

        The label appears in `/proc/PID/fd` and cannot be opened. The length is rounded up to whole
        pages. With `is_read_only`, no other process can map it writable. Raises `SegmentError` if
        the system lacks the memory.
        """
        length_bytes = _whole_pages(
            length_bytes, HUGE_PAGE_BYTES if options.is_huge else mmap.PAGESIZE
        )
        failure = segment = None
        if options.is_huge:
            try:
                segment = cls._create(label, length_bytes, options, _RESERVED)
            except OSError as error:
                failure = error
        try:
            segment = segment or cls._create(label, length_bytes, options, 0)
        except OSError as error:
            raise SegmentError(
                f"creating a segment of {length_bytes} bytes failed: {error.strerror}"
            ) from None
        if failure is not None:
            # Transparent huge pages can replace the reserved ones.
            huge_bytes = mapped_huge_bytes(segment.address)
            segment.backing = segment.backing._replace(huge_bytes=huge_bytes)
            if huge_bytes < length_bytes:
                segment._add_notice(huge_pages_notice(length_bytes, huge_bytes, failure))
        seals = SEALED_LENGTH | (_F_SEAL_FUTURE_WRITE if is_read_only else 0)
        fcntl.fcntl(segment.fd, fcntl.F_ADD_SEALS, seals)
        return segment

    @classmethod
    def _create(cls, label: str, length_bytes: int, options: BackingOptions, flags: int) -> Segment:
        """Map and populate a new memfd; close the memfd again on `OSError`."""
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, length_bytes)
            segment = cls(fd, length_bytes, is_writable=True)
        except OSError:
            os.close(fd)
            raise
        try:
            if options.node is not None:
                failure = prefer_node_for(segment.address, length_bytes, options.node)
                segment._add_notice(failure)
                if not failure:
                    segment.backing = segment.backing._replace(node=options.node)
            if options.is_huge and not flags:
                # This call fails on kernels without transparent huge pages.
                with contextlib.suppress(OSError):
                    segment._mapping.madvise(mmap.MADV_HUGEPAGE)
            # A node or cgroup without enough reserved pages fails here, not earlier.
            segment._populate(_MADV_POPULATE_WRITE)
        except OSError:
            segment.close()
            raise
        if segment.backing.node is not None:
            node_bytes = mapped_node_bytes(segment.address)
            segment._add_notice(node_notice(segment.backing.node, node_bytes))
        if flags:
            segment.backing = segment.backing._replace(huge_bytes=length_bytes)
        if options.is_locked:
            # Reserved huge pages are never swapped out.
            error = 0 if flags else segment._call_libc("mlock")
            segment.backing = segment.backing._replace(is_locked=not error)
            segment._add_notice(lock_notice(length_bytes, error) if error else "")
        return segment

    @classmethod
    def attach(cls, fd: int, length_bytes: int, *, is_writable: bool) -> Segment:
        """Map a received segment, which then owns the descriptor, and populate its page tables.

        Raises `SegmentError` if the segment is shorter than declared, or unsealed: the sender could
        truncate the memory under a reader.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if not seals & fcntl.F_SEAL_SHRINK or not seals & fcntl.F_SEAL_GROW:
                raise SegmentError("received an unsealed segment")
            page_bytes = os.fstatvfs(fd).f_bsize
            if page_bytes > mmap.PAGESIZE:
                # No part of a huge page can be unmapped.
                length_bytes = _whole_pages(length_bytes, page_bytes)
            if os.fstat(fd).st_size < length_bytes:
                raise SegmentError(f"received a segment with fewer than {length_bytes} bytes")
            segment = cls(fd, length_bytes, is_writable=is_writable)
            segment._populate(_MADV_POPULATE_WRITE if is_writable else _MADV_POPULATE_READ)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"a segment cannot be mapped: {error.strerror}") from None
        except SegmentError:
            os.close(fd)
            raise
        return segment

    def close(self) -> None:
        """Unmap the segment and close its descriptor; the last holder to close frees the memory."""
        self.view.release()
        # The memory stays mapped while views exist, such as in the frames of a cancelled call.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.fd)

    def _populate(self, advice: int) -> None:
        """Fault all pages in, which takes half a second per gibibyte."""
        # `mmap.madvise` would hold the GIL meanwhile.
        error = self._call_libc("madvise", ctypes.c_int(advice))
        if error:
            raise OSError(error, os.strerror(error))

    def _call_libc(self, name: str, *arguments: object) -> int:
        """Call a libc function on the mapping; return 0 or the errno."""
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
        address, length = ctypes.c_void_p(self.address), ctypes.c_size_t(len(self))
        return ctypes.get_errno() if call(address, length, *arguments) else 0

    def _add_notice(self, notice: str) -> None:
        if notice:
            notices = (*self.backing.notices, notice)
            self.backing = self.backing._replace(notices=notices)


def _whole_pages(length_bytes: int, page_bytes: int) -> int:
    return -(-length_bytes // page_bytes) * page_bytes


def private_pages(length_bytes: int) -> memoryview:
    """Return private memory in small pages, which is unmapped with its last view.

    The kernel clears a small page in about a microsecond, a huge one in 0.3 to 6 ms.
    """
    pages = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(pages)


def address_of(view: memoryview) -> int:
    """Return the address of a view in this process."""
    # NumPy returns the address of read-only memory too; ctypes does not.
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
