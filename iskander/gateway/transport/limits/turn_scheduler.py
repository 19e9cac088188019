"""Deficit round-robin scheduler for connections with unprocessed input.

A connection processes each read for at most a quantum of time. With input left, or after a longer
frame, it stops reading and is queued here. Each event loop iteration runs the queued connections
for at most `TURN_NS` together. A connection that used much processor time without delivering
messages pauses for the same time, even if it is the only one: header blocks that cost milliseconds
each leave half of the time to other connections.

Runs on: gateway loop. Source: Shreedhar and Varghese, Efficient fair queuing using deficit
round-robin, 1995.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from iskander.foundation.clock import NS_PER_S, NS_PER_US, now_ns, thread_cpu_ns

QUANTUM_NS: Final = 500 * NS_PER_US
"""Per connection and turn."""
TURN_NS: Final = 1000 * NS_PER_US
"""For all queued connections in one event loop iteration."""
WASTED_NS_MAX: Final = 1000 * NS_PER_US
"""Unproductive processor time of a turn; above it the connection pauses for the same time."""
GAP_NS: Final = 30 * NS_PER_US
"""Small reads further apart belong to different event loop iterations."""
LARGE_READ_BYTES: Final = 16_384


class TurnTaker(Protocol):
    """A connection with unprocessed input."""

    deficit_ns: int  # Time left for it; negative after it exceeded its share.
    wasted_ns: int  # Unproductive processor time of the last turn.

    def take_turn(self, until_ns: int) -> bool:
        """Process input until that time; return whether input is left."""

    def note_cpu(self, used_ns: int) -> bool:
        """Charge the processor time of a turn; return whether the connection stays open."""


class TurnScheduler:
    """Queue of the connections with unprocessed input, for one or more listeners."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[TurnTaker] = deque()
        self._iteration = 0
        self._is_counting = False

    def wait(self, connection: TurnTaker) -> None:
        """Queue a connection, which must not be queued; it takes turns until no input is left."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._run)

    def iteration(self) -> int:
        """Return the number of the current event loop iteration; schedules one callback."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._end_iteration)
        return self._iteration

    def _end_iteration(self) -> None:
        self._iteration += 1
        self._is_counting = False

    def _run(self) -> None:
        """Give each queued connection one turn, for at most `TURN_NS` in total."""
        waiting = self._waiting
        is_alone = len(waiting) == 1
        began_ns = now = now_ns()
        for _ in range(len(waiting)):
            connection = waiting[0]
            deficit_ns = min(connection.deficit_ns + QUANTUM_NS, QUANTUM_NS)
            if is_alone or deficit_ns > 0:
                cpu_ns = thread_cpu_ns()
                deficit_ns = max(deficit_ns, QUANTUM_NS // 2)
                has_input_left = connection.take_turn(now + deficit_ns)
                cpu_ns = thread_cpu_ns() - cpu_ns
                ended_ns = now_ns()
                connection.deficit_ns = deficit_ns - (ended_ns - now)
                now = ended_ns
                has_input_left = connection.note_cpu(cpu_ns) and has_input_left
                if has_input_left and connection.wasted_ns > WASTED_NS_MAX:
                    has_input_left = False
                    self._loop.call_later(connection.wasted_ns / NS_PER_S, self.wait, connection)
            else:
                connection.deficit_ns = deficit_ns
                has_input_left = True
            waiting.popleft()
            if has_input_left:
                waiting.append(connection)
            if now - began_ns > TURN_NS:
                break
        if waiting:
            self._loop.call_soon(self._run)


class ReadBurst:
    """Duration of a connection's reads in one event loop iteration: libuv reads up to 32 times.

    Small reads at most `GAP_NS` apart count as one iteration. The true iteration number is used for
    large reads, which cost milliseconds in new memory, and for all reads after half the limit.
    """

    __slots__ = ("_began_ns", "_ended_ns", "_iteration", "_turns")

    def __init__(self, turns: TurnScheduler) -> None:
        self._turns = turns
        self._began_ns = self._ended_ns = 0
        self._iteration = -1

    def is_long(self, began_ns: int, ended_ns: int, nbytes: int, limit_ns: int) -> bool:
        """Add a processed read; return whether the burst exceeds the limit."""
        is_same = began_ns - self._ended_ns <= GAP_NS
        if nbytes >= LARGE_READ_BYTES or (is_same and ended_ns - self._began_ns > limit_ns // 2):
            iteration = self._turns.iteration()
            is_same = iteration == self._iteration
            self._iteration = iteration
        if not is_same:
            self._began_ns = began_ns
        self._ended_ns = ended_ns
        return ended_ns - self._began_ns > limit_ns
