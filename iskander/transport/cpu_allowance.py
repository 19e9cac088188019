"""Processor time that one connection may use without delivering anything.

Pure.
"""

from __future__ import annotations

from typing import Final

from iskander.clock import NS_PER_MS, NS_PER_S

BURST_NS: Final = NS_PER_S
PER_S_NS: Final = 100 * NS_PER_MS


class CpuAllowance:
    """A leaky bucket of processor time.

    Args:
        now_ns: The time.
    """

    def __init__(self, now_ns: int) -> None:
        self._used_ns = 0
        self._seen_ns = now_ns

    def charge(self, now_ns: int, used_ns: int) -> bool:
        """Count processor time; negative for time that delivered.

        Returns:
            Whether the connection is within its allowance.
        """
        leaked = (now_ns - self._seen_ns) * PER_S_NS // NS_PER_S
        self._used_ns = max(self._used_ns - leaked + used_ns, 0)
        self._seen_ns = now_ns
        return self._used_ns <= BURST_NS
