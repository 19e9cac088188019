"""Wake-ups of the dispatcher at a set time, and busy polling after work.

Waking a sleeping core costs tens of microseconds, several times for each batch. A polling loop
receives the next message at once, and yields the core to other threads.

Runs on: gateway loop. Source: sched_yield(2).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from iskander.foundation.clock import NS_PER_MS, NS_PER_US, now_ns
from iskander.gateway.scheduling.request import NEVER_NS


class Alarm:
    """Timer that runs a callback once, at the earliest time that was set."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._time_ns = NEVER_NS

    def set(self, time_ns: int, now: int) -> None:
        """Run the callback at a time, or earlier if an earlier time is set."""
        if time_ns >= self._time_ns:
            return
        self.clear()
        self._time_ns = time_ns
        # Rounded up to the loop's resolution of a millisecond, so that it never fires early.
        delay_s = -(-max(time_ns - now, 0) // NS_PER_MS) / 1000
        self._timer = self._loop.call_later(delay_s, self._fire)

    def clear(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._time_ns = None, NEVER_NS

    def _fire(self) -> None:
        self._timer, self._time_ns = None, NEVER_NS
        self._callback()


class BusyPolling:
    """Keeps the event loop from sleeping for `duration_us` after the last work; 0: disabled."""

    def __init__(self, duration_us: int) -> None:
        self._duration_ns = duration_us * NS_PER_US
        self._loop = asyncio.get_running_loop()
        self._until_ns = 0
        self._is_on = False

    def note(self, now: int) -> None:
        """Start or extend polling."""
        if self._duration_ns:
            self._until_ns = now + self._duration_ns
            if not self._is_on:
                self._is_on = True
                self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """Yield the core once, and schedule the next loop iteration."""
        self._is_on = now_ns() < self._until_ns
        if self._is_on:
            os.sched_yield()
            self._loop.call_soon(self._poll)
