"""Rate limits on frames that carry no message and on CPU time without progress.

PING, SETTINGS, RST_STREAM, rejected calls, empty and fragmented DATA each cost a response or a call
and carry no message. The allowed rate exceeds the need of any client; a connection above it is
closed. Replies to the server's own frames are free: PINGs that measure the round trip, and window
updates.

Pure. Source: RFC 9113, section 10.5 (denial of service).
"""

from __future__ import annotations

from typing import Final

from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.gateway.transport.http2.frames import ConnectionBroken, ErrorCode
from iskander.gateway.transport.limits.cpu_allowance import PER_S_NS, CpuAllowance

BURST: Final = 1000
PER_S: Final = 500
FREE_PER_RESPONSE_FRAME: Final = 2.0
"""Free frames for each response frame: a PING, and the window updates."""


class RateLimiter:
    """Two leaky buckets of one connection; raises `ConnectionBroken` above either rate."""

    def __init__(self, now_ns: int) -> None:
        self._level = self._free = 0.0
        self._charged_ns = now_ns
        self._cpu = CpuAllowance(now_ns)

    def charge(self, now_ns: int, cost: float = 1.0) -> None:
        """Charge a frame, or work that costs as much as `cost` frames."""
        leaked = (now_ns - self._charged_ns) * PER_S / NS_PER_S
        self._level = max(self._level - leaked, 0.0) + cost
        self._charged_ns = now_ns
        if self._level > BURST:
            message = f"rate limit exceeded: {PER_S} frames/s without a message"
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message, "frame_rate")

    def charge_reply(self, now_ns: int, cost: float, response_frames: int) -> None:
        """Charge a frame; `response_frames` sent since the last call make replies to them free."""
        free = min(self._free + response_frames * FREE_PER_RESPONSE_FRAME, BURST)
        if free >= cost:
            self._free = free - cost
        else:
            self._free = free
            self.charge(now_ns, cost)

    def charge_cpu(self, now_ns: int, used_ns: int) -> None:
        """Charge CPU time of input processing, negative if less than was granted for messages."""
        if not self._cpu.charge(now_ns, used_ns):
            message = f"CPU limit exceeded: {PER_S_NS // NS_PER_MS} ms/s without a message"
            raise ConnectionBroken(ErrorCode.ENHANCE_YOUR_CALM, message, "cpu_time")
