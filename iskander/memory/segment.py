"""One shared mapping: made as a memfd, sealed, handed over as a descriptor, mapped by both sides.

A segment has no name in any file system. When its last holder ends, however it ends, the kernel
takes the memory back; nobody who was not handed the descriptor can open it.

    creator   memfd_create -> ftruncate -> mmap RW -> mbind -> populate -> seal
    receiver  check seals and length -> mmap RO or RW -> populate its own page tables

Sealed against shrinking and growing, so that no peer can make the other fault (a read past a
truncated file ends a process with SIGBUS). An input arena is also sealed against future writes:
the creator's mapping stays writable and nobody can make another.

Runs on: gateway (creates) and worker (attaches). Nothing else imports mmap.

Source: memfd_create(2), fcntl(2) file sealing, madvise(2), mbind(2).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

from iskander.errors import SegmentError

_F_ADD_SEALS = 1033
_F_GET_SEALS = 1034
_F_SEAL_SEAL = 0x01
_F_SEAL_SHRINK = 0x02
_F_SEAL_GROW = 0x04
_F_SEAL_FUTURE_WRITE = 0x10
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MPOL_BIND = 2
_SYS_MBIND = 237
"""Of x86-64; other machines run without a memory policy."""


class Segment:
    """A shared mapping of a fixed length.

    Attributes:
        fd: The memfd, to be handed over; the segment owns it.
        view: The mapped bytes, as an unsigned byte memoryview; read-only where mapped so.
        address: Where the mapping begins in this process.
    """

    __slots__ = ("_mapping", "address", "fd", "view")

    def __init__(self, fd: int, length_bytes: int, *, is_writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
        self.fd = fd
        self._mapping = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, prot=access)
        self.view = memoryview(self._mapping)
        self.address = _address_of(self.view)

    def __repr__(self) -> str:
        access = "ro" if self.view.readonly else "rw"
        return f"<Segment fd={self.fd} {len(self.view)} bytes {access}>"

    def __len__(self) -> int:
        return len(self.view)

    @classmethod
    def create(
        cls, label: str, length_bytes: int, *, node: int | None = None, is_read_only: bool = False
    ) -> Segment:
        """Make a segment, bind it to a NUMA node, populate it and seal it.

        Args:
            label: What `/proc/PID/fd` shows; not a name that anyone can open.
            length_bytes: Rounded up to whole pages.
            node: NUMA node to take the pages from; None for the kernel's choice.
            is_read_only: No other process can ever map it writable.

        Raises:
            SegmentError: The system has not that much memory, or refuses the policy.
        """
        length_bytes = -(-length_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SegmentError(f"a segment was refused: {error.strerror}") from None
        try:
            os.ftruncate(fd, length_bytes)
            segment = cls(fd, length_bytes, is_writable=True)
            if node is not None:
                _bind_to_node(segment.address, length_bytes, node)
            segment._mapping.madvise(_MADV_POPULATE_WRITE)
        except OSError as error:
            os.close(fd)
            raise SegmentError(
                f"a segment of {length_bytes} bytes was refused: {error.strerror}"
            ) from None
        seals = _F_SEAL_SHRINK | _F_SEAL_GROW
        if is_read_only:
            seals |= _F_SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, _F_ADD_SEALS, seals | _F_SEAL_SEAL)
        return segment

    @classmethod
    def attach(cls, fd: int, length_bytes: int, *, is_writable: bool) -> Segment:
        """Map a segment that was handed over, and fault in this process's page tables.

        The descriptor belongs to the segment from here on.

        Raises:
            SegmentError: It is shorter than was said, or not sealed: its maker could take the
                memory away under a reader.
        """
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
            if not seals & _F_SEAL_SHRINK or not seals & _F_SEAL_GROW:
                raise SegmentError("a segment was handed over unsealed")
            if os.fstat(fd).st_size < length_bytes:
                raise SegmentError(
                    f"a segment was handed over with fewer than {length_bytes} bytes"
                )
            segment = cls(fd, length_bytes, is_writable=is_writable)
            segment._mapping.madvise(_MADV_POPULATE_WRITE if is_writable else _MADV_POPULATE_READ)
        except OSError as error:
            os.close(fd)
            raise SegmentError(f"a segment cannot be mapped: {error.strerror}") from None
        except SegmentError:
            os.close(fd)
            raise
        return segment

    def close(self) -> None:
        """Unmap and close; the memory goes when the other holders have closed too."""
        self.view.release()
        self._mapping.close()
        os.close(self.fd)


def _address_of(view: memoryview) -> int:
    # NumPy gives the address of read-only memory too, which ctypes does not.
    import numpy as np

    return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)


def _bind_to_node(address: int, length_bytes: int, node: int) -> None:
    if os.uname().machine != "x86_64":
        return
    words = node // 64 + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // 64] = 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.syscall(
        _SYS_MBIND,
        ctypes.c_void_p(address),
        ctypes.c_ulong(length_bytes),
        _MPOL_BIND,
        mask,
        ctypes.c_ulong(words * 64 + 1),
        0,
    )
    # A kernel without NUMA, or a sandbox, has no policies to give; the memory is as good there.
    if refused and ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
