"""How late the loop comes to what is due: how long something held it.

A timer that is due every 50 ms says by its lateness what any message would have waited for at that
moment, be it for a long step of the gateway's own or for a core that another process had. Timers
are in whole milliseconds, so that one of lateness means nothing.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio

from iskander.clock import NS_PER_S, now_ns
from iskander.measurement.histogram import LATENCY_BOUNDS_NS, Histogram

TICK_S = 0.05


class LoopLag:
    """Measures the loop that it is started on, until it is stopped.

    Attributes:
        lag_ns: How late each tick was.
    """

    def __init__(self) -> None:
        self.lag_ns = Histogram(LATENCY_BOUNDS_NS)
        self._due_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tick from now on."""
        self._due_ns = now_ns() + int(TICK_S * NS_PER_S)
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Tick no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self.lag_ns.record(max(now_ns() - self._due_ns, 0))
        self.start()
