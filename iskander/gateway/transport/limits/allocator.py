"""Settings of glibc's malloc: keeps large blocks on the heap, trims the heap on demand.

No effect with other C libraries. Source: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Final

MMAP_THRESHOLD_BYTES: Final = 32 << 20
"""Maximum that glibc accepts."""
TRIM_THRESHOLD_BYTES: Final = 512 << 20
"""Free bytes at the top of the heap above which `free` trims it."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Source: malloc.h of glibc."""


def keep_large_blocks() -> None:
    """Allocate blocks up to 32 MiB on the heap, and keep up to 512 MiB of it free.

    By default, malloc maps each large block anew.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def return_free_memory() -> None:
    """Return free heap pages to the system; 45 ms for 1 GiB, GIL released."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
