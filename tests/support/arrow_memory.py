"""What Arrow takes of memory for a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

Made = TypeVar("Made")

_POOLS: list[pa.MemoryPool] = []
"""Arrays end the process where they outlive the pool that they are from."""


def peak_of(call: Callable[[], Made]) -> tuple[Made, int]:
    """What a call makes, and the most bytes that Arrow had at a time for it."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        return call(), pool.max_memory()
    finally:
        pa.set_memory_pool(default)
