"""How much work for nothing a client may make: pings, settings, resets, empty frames.

Each costs an answer or a call, and carries nothing. A rate that no client needs is let through, and
what is beyond it ends the connection. What a client says of an answer is free: a ping with which it
measures the way, and the windows that it opens again.

Pure. Source: RFC 9113, section 10.5 (denial of service).
"""

from __future__ import annotations

from typing import Final

from iskander.clock import NS_PER_S
from iskander.gateway.http2.frames import Code, ConnectionBroken

AT_ONCE: Final = 1000
PER_S: Final = 500
PER_ANSWER: Final = 2.0
"""What is free for each frame of an answer: a ping, and the windows."""


class Patience:
    """A bucket that leaks.

    Args:
        now_ns: The time.
    """

    def __init__(self, now_ns: int) -> None:
        self._spent = self._free = 0.0
        self._seen_ns = now_ns

    def spend(self, now_ns: int, cost: float = 1.0) -> None:
        """Count a frame, or what costs as much as so many.

        Raises:
            ConnectionBroken: There were too many.
        """
        leaked = (now_ns - self._seen_ns) * PER_S / NS_PER_S
        self._spent = max(self._spent - leaked, 0.0) + cost
        self._seen_ns = now_ns
        if self._spent > AT_ONCE:
            raise ConnectionBroken(Code.ENHANCE_YOUR_CALM, "too many frames for nothing")

    def hear(self, now_ns: int, cost: float, answers: int) -> None:
        """Count a frame that costs nothing where it comes of what was sent.

        Args:
            now_ns: The time.
            cost: Of the frame, where it comes of nothing.
            answers: Frames of answers sent since it was asked last.

        Raises:
            ConnectionBroken: There were too many.
        """
        free = min(self._free + answers * PER_ANSWER, AT_ONCE)
        if free >= cost:
            self._free = free - cost
        else:
            self._free = free
            self.spend(now_ns, cost)
