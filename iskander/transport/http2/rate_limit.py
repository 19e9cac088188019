"""Rate limits of a connection on frames that carry nothing and on processor time without progress.

PING, SETTINGS, RST_STREAM, refused calls, empty and fragmented DATA each cost an answer or a call
and carry no message. A rate that no client needs is accepted; above it the connection ends. Replies
to what the server sent are free: PINGs that measure the round trip, and window updates.

Pure. Source: RFC 9113, section 10.5 (denial of service).
"""

from __future__ import annotations

from typing import Final

from iskander.clock import NS_PER_MS, NS_PER_S
from iskander.transport.cpu_allowance import PER_S_NS, CpuAllowance
from iskander.transport.http2.frames import Code, ConnectionBroken

BURST: Final = 1000
PER_S: Final = 500
PER_ANSWER: Final = 2.0
"""Free frames for each frame of an answer: a PING, and the window updates."""


class RateLimiter:
    """Two leaky buckets of one connection: frames, and processor time.

    Args:
        now_ns: The time.
    """

    def __init__(self, now_ns: int) -> None:
        self._spent = self._free = 0.0
        self._seen_ns = now_ns
        self._cpu = CpuAllowance(now_ns)

    def charge(self, now_ns: int, cost: float = 1.0) -> None:
        """Count a frame, or work that costs as much as `cost` frames.

        Raises:
            ConnectionBroken: The connection is over its rate.
        """
        leaked = (now_ns - self._seen_ns) * PER_S / NS_PER_S
        self._spent = max(self._spent - leaked, 0.0) + cost
        self._seen_ns = now_ns
        if self._spent > BURST:
            raise ConnectionBroken(
                Code.ENHANCE_YOUR_CALM,
                f"more than {PER_S} frames/s that carry no message",
                reason="frame_rate",
            )

    def charge_reply(self, now_ns: int, cost: float, answers: int) -> None:
        """Count a frame that is free where it replies to what was sent.

        Args:
            now_ns: The time.
            cost: Of the frame, where it replies to nothing.
            answers: Frames of answers sent since the last call.

        Raises:
            ConnectionBroken: The connection is over its rate.
        """
        free = min(self._free + answers * PER_ANSWER, BURST)
        if free >= cost:
            self._free = free - cost
        else:
            self._free = free
            self.charge(now_ns, cost)

    def charge_cpu(self, now_ns: int, used_ns: int) -> None:
        """Count processor time of this connection's input; negative for time that delivered.

        Raises:
            ConnectionBroken: The connection used too much for what it delivered.
        """
        if not self._cpu.charge(now_ns, used_ns):
            raise ConnectionBroken(
                Code.ENHANCE_YOUR_CALM,
                f"more than {PER_S_NS // NS_PER_MS} ms/s of processor time without messages",
                reason="cpu_time",
            )
