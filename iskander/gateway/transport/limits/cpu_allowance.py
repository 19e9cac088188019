"""Limit on the processor time that one connection uses without delivering messages.

Pure.
"""

from __future__ import annotations

from typing import Final

from iskander.foundation.clock import NS_PER_MS, NS_PER_S

BURST_NS: Final = NS_PER_S
PER_S_NS: Final = 100 * NS_PER_MS


class CpuAllowance:
    """Leaky bucket of processor time: holds `BURST_NS`, leaks `PER_S_NS` per second."""

    def __init__(self, now_ns: int) -> None:
        self._used_ns = 0
        self._updated_ns = now_ns

    def charge(self, now_ns: int, used_ns: int) -> bool:
        """Charge processor time, or credit it if negative; return whether the limit is kept."""
        leaked = (now_ns - self._updated_ns) * PER_S_NS // NS_PER_S
        self._used_ns = max(self._used_ns - leaked + used_ns, 0)
        self._updated_ns = now_ns
        return self._used_ns <= BURST_NS
