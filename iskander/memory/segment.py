"""One shared mapping: made as a memfd, sealed, handed over as a descriptor, mapped by both sides.

A segment has no name in any file system. When its last holder ends, however it ends, the kernel
takes the memory back; nobody who was not handed the descriptor can open it.

    creator   memfd_create -> ftruncate -> mmap RW -> mbind -> populate -> lock -> seal
    receiver  check seals and length -> mmap RO or RW -> populate its own page tables

Sealed against shrinking and growing, so that no peer can make the other fault (a read past a
truncated file ends a process with SIGBUS). An input arena is also sealed against future writes:
the creator's mapping stays writable and nobody can make another.

Huge pages, a lock and a node are had where the system gives them; `backing` says what was had. The
creator's lock and policy are the memory's own, so a receiver asks for nothing.

Runs on: gateway (creates), workers and clients that share memory (attach). Nothing else
but a loan imports mmap.

Source: memfd_create(2), fcntl(2) file sealing, madvise(2), mlock(2), shmem_enabled in
Documentation/admin-guide/mm/transhuge.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os

from iskander.errors import SegmentError
from iskander.memory.backing import (
    ANY_MEMORY,
    HUGE_PAGE_BYTES,
    Backing,
    BackingOptions,
    mapped_huge_bytes,
    mapped_node_bytes,
    not_huge,
    not_locked,
    not_of_node,
)
from iskander.memory.numa import prefer_node_for

F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 0x01
_F_SEAL_SHRINK = 0x02
_F_SEAL_GROW = 0x04
_F_SEAL_FUTURE_WRITE = 0x10
SEALED_LENGTH = _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL
"""Of memory whose length nobody can change any more, nor that this is so."""
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_RESERVED = os.MFD_HUGETLB | os.MFD_HUGE_2MB


class Segment:
    """A shared mapping of a fixed length.

    Attributes:
        fd: The memfd, to be handed over; the segment owns it.
        view: The mapped bytes, as an unsigned byte memoryview; read-only where mapped so.
        address: Where the mapping begins in this process.
        backing: What memory it is, as far as its creator knows.
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
        """Make a segment of the memory that is wanted, or else of what there is, and seal it.

        Args:
            label: What `/proc/PID/fd` shows; not a name that anyone can open.
            length_bytes: Rounded up to whole pages, or whole huge pages where those are wanted.
            options: What memory is wanted.
            is_read_only: No other process can ever map it writable.

        Raises:
            SegmentError: The system has not that much memory.
        """
        length_bytes = _whole(length_bytes, HUGE_PAGE_BYTES if options.is_huge else mmap.PAGESIZE)
        refusal = segment = None
        if options.is_huge:
            try:
                segment = cls._make(label, length_bytes, options, _RESERVED)
            except OSError as error:
                refusal = error
        try:
            segment = segment or cls._make(label, length_bytes, options, 0)
        except OSError as error:
            raise SegmentError(
                f"a segment of {length_bytes} bytes was refused: {error.strerror}"
            ) from None
        if refusal is not None:
            segment._complain_of_small_pages(refusal)
        seals = _F_SEAL_SHRINK | _F_SEAL_GROW
        if is_read_only:
            seals |= _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(segment.fd, F_ADD_SEALS, seals | _F_SEAL_SEAL)
        return segment

    @classmethod
    def _make(cls, label: str, length_bytes: int, options: BackingOptions, flags: int) -> Segment:
        """Map and populate a new memfd.

        Raises:
            OSError: There is not that much memory of this kind; nothing is left of it.
        """
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
        try:
            os.ftruncate(fd, length_bytes)
            segment = cls(fd, length_bytes, is_writable=True)
        except OSError:
            os.close(fd)
            raise
        try:
            if options.node is not None:
                segment._prefer(options.node)
            if options.is_huge and not flags:
                # Not every kernel knows of huge pages.
                with contextlib.suppress(OSError):
                    segment._mapping.madvise(mmap.MADV_HUGEPAGE)
            # Reserved pages that a node or a cgroup does not have are missed here, not before.
            segment._populate(_MADV_POPULATE_WRITE)
        except OSError:
            segment.close()
            raise
        if segment.backing.node is not None:
            segment._complain(not_of_node(segment.backing.node, mapped_node_bytes(segment.address)))
        if flags:
            segment.backing = segment.backing._replace(huge_bytes=length_bytes)
        if options.is_locked:
            segment._lock(is_reserved=bool(flags))
        return segment

    @classmethod
    def attach(cls, fd: int, length_bytes: int, *, is_writable: bool) -> Segment:
        """Map a segment that was handed over, and fault in this process's page tables.

        The descriptor belongs to the segment from here on.

        Args:
            fd: The memfd.
            length_bytes: At most the segment's; rounded up to whole huge pages where it has them,
                since no part of one can be unmapped.
            is_writable: Whether to map it so.

        Raises:
            SegmentError: It is shorter than was said, or not sealed: its maker could take the
                memory away under a reader.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            if not seals & _F_SEAL_SHRINK or not seals & _F_SEAL_GROW:
                raise SegmentError("a segment was handed over unsealed")
            page_bytes = os.fstatvfs(fd).f_bsize
            if page_bytes > mmap.PAGESIZE:
                length_bytes = _whole(length_bytes, page_bytes)
            if os.fstat(fd).st_size < length_bytes:
                raise SegmentError(
                    f"a segment was handed over with fewer than {length_bytes} bytes"
                )
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
        """Unmap and close; the memory goes when the other holders have closed too.

        It stays mapped for whoever still looks at it: the frames of a call that was cancelled are
        kept until a collection, and a model may keep what it was given.
        """
        self.view.release()
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.fd)

    def _populate(self, advice: int) -> None:
        """Fault all pages in: half a second a gibibyte, in which other threads go on.

        `mmap.madvise` would keep the interpreter for as long.

        Raises:
            OSError: There are not that many.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        where = (ctypes.c_void_p(self.address), ctypes.c_size_t(len(self)))
        if libc.madvise(*where, ctypes.c_int(advice)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def _prefer(self, node: int) -> None:
        refusal = prefer_node_for(self.address, len(self), node)
        self._complain(refusal)
        if not refusal:
            self.backing = self.backing._replace(node=node)

    def _complain_of_small_pages(self, refusal: OSError) -> None:
        """The system may have put huge pages together by itself; then nothing is missing."""
        huge_bytes = mapped_huge_bytes(self.address)
        self.backing = self.backing._replace(huge_bytes=huge_bytes)
        if huge_bytes < len(self):
            self._complain(not_huge(len(self), huge_bytes, refusal))

    def _lock(self, *, is_reserved: bool) -> None:
        """Keep the memory from being swapped out; reserved huge pages never are."""
        libc = ctypes.CDLL(None, use_errno=True)
        where = (ctypes.c_void_p(self.address), ctypes.c_size_t(len(self)))
        if is_reserved or not libc.mlock(*where):
            self.backing = self.backing._replace(is_locked=True)
        else:
            self._complain(not_locked(len(self), ctypes.get_errno()))

    def _complain(self, complaint: str) -> None:
        if complaint:
            complaints = (*self.backing.complaints, complaint)
            self.backing = self.backing._replace(complaints=complaints)


def _whole(length_bytes: int, page_bytes: int) -> int:
    return -(-length_bytes // page_bytes) * page_bytes


def private_pages(length_bytes: int) -> memoryview:
    """Memory of this process alone, in small pages; unmapped when its last view is gone.

    The kernel clears a page when it is written to first: a small one in about a microsecond, where
    a huge one takes 0.3 to 6 ms.
    """
    pages = mmap.mmap(-1, length_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return memoryview(pages)


def address_of(view: memoryview) -> int:
    """Where a view begins in this process."""
    # NumPy gives the address of read-only memory too, which ctypes does not.
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
