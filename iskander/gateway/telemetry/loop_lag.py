"""Event loop lag: lateness of a timer with a period of 50 ms.

Messages are as late at that moment, because of a long callback or another process on the core.
Timers have a resolution of 1 ms, so a lag of 1 ms is noise.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, Histogram

TICK_S = 0.05


class LoopLag:
    """Measures the lag of the running loop; `lag_ns` counts ticks by lateness."""

    def __init__(self) -> None:
        self.lag_ns = Histogram(LATENCY_BOUNDS_NS)
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the timer of the next tick."""
        self._due_ns = now_ns() + int(TICK_S * NS_PER_S)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.lag_ns.record(max(now_ns() - self._due_ns, 0))
        self.start()
