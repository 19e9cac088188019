"""Peak of Arrow's memory during a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pyarrow as pa

Made = TypeVar("Made")

_POOLS: list[pa.MemoryPool] = []
"""Arrays crash the process if they outlive their pool."""


def peak_of(call: Callable[[], Made]) -> tuple[Made, int]:
    """The result of a call, and the peak of Arrow's memory during it."""
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    _POOLS.append(pool)
    pa.set_memory_pool(pool)
    try:
        return call(), pool.max_memory()
    finally:
        pa.set_memory_pool(default)
