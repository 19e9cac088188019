"""When the loop looks again: at a moment, or at once, where sleeping would cost time.

A core that sleeps takes tens of microseconds to be woken, several times for each batch. A loop that
looks again and again has the next message at once; it yields to whoever else wants the core.

Runs on: gateway loop. Source: sched_yield(2).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from iskander.clock import NS_PER_MS, NS_PER_US, now_ns
from iskander.scheduling.request import NEVER_NS


class Alarm:
    """Calls back at a moment; one that was set for earlier stays, and finds nothing to do.

    Args:
        look: Called then.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._moment_ns = NEVER_NS

    def set(self, moment_ns: int, now: int) -> None:
        """Look again at a moment, or before."""
        if moment_ns >= self._moment_ns:
            return
        self.clear()
        self._moment_ns = moment_ns
        # Whole milliseconds, as the loop's timers are: never before the moment.
        delay_s = -(-max(moment_ns - now, 0) // NS_PER_MS) / 1000
        self._timer = self._loop.call_later(delay_s, self._ring)

    def clear(self) -> None:
        """Forget the moment."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._moment_ns = None, NEVER_NS

    def _ring(self) -> None:
        self._timer, self._moment_ns = None, NEVER_NS
        self._look()


class BusyPolling:
    """Keeps the loop from sleeping for a while after its last work.

    Args:
        spell_us: For how long; 0: not at all.
    """

    def __init__(self, spell_us: int) -> None:
        self._spell_ns = spell_us * NS_PER_US
        self._loop = asyncio.get_running_loop()
        self._until_ns = 0
        self._is_on = False

    def note(self, now: int) -> None:
        """There was work."""
        if self._spell_ns:
            self._until_ns = now + self._spell_ns
            if not self._is_on:
                self._is_on = True
                self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Let others have the core, and the loop its look at the sockets."""
        self._is_on = now_ns() < self._until_ns
        if self._is_on:
            os.sched_yield()
            self._loop.call_soon(self._turn)
