"""glibc's allocator: large blocks are kept for reuse, and free memory is returned on demand.

Only glibc has these functions; elsewhere nothing happens. Source: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""The most that glibc takes."""
TRIM_THRESHOLD_BYTES: Final = 512 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""


def keep_large_blocks() -> None:
    """Let malloc keep the blocks of large messages instead of mapping and faulting each anew.

    With the defaults every message of megabytes is mapped, cleared by the kernel page by page and
    unmapped again.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def return_free_memory() -> None:
    """Give the free pages of the heap back to the system; 45 ms for 1 GiB, without the GIL."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
