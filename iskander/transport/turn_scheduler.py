"""Deficit round-robin over connections whose input was not all processed in one turn of the loop.

A connection processes what it has read for at most a quantum of time. If input is left, or the last
frame took longer than the quantum, the connection stops reading and waits here. Each turn of the
loop, after the reads of all other connections, the waiting ones get their next quanta, for at most
`TURN_NS` together. A connection whose turn used much processor time and delivered no messages then
pauses for as long, also where no other connection waits: so header blocks that take milliseconds
each leave half of the time to all others.

Runs on: gateway loop. Source: Shreedhar and Varghese, Efficient fair queuing using deficit
round-robin, 1995.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

from iskander.clock import NS_PER_S, NS_PER_US, now_ns, thread_cpu_ns

QUANTUM_NS: Final = 500 * NS_PER_US
"""Of one connection in one turn."""
TURN_NS: Final = 1000 * NS_PER_US
"""Of all waiting connections in one turn."""
WASTED_NS_MAX: Final = 1000 * NS_PER_US
"""Processor time of a turn beyond what its messages are granted; above it the connection pauses for
as long."""
GAP_NS: Final = 30 * NS_PER_US
"""Small reads of one socket that are no further apart may be of one turn of the loop."""
LARGE_READ_BYTES: Final = 16_384


class TurnTaker(Protocol):
    """A connection with input that is left over.

    Attributes:
        deficit_ns: Time that it may use; negative where it has used more than its share.
        wasted_ns: Processor time of its last turn that delivered nothing.
    """

    deficit_ns: int
    wasted_ns: int

    def take_turn(self, until_ns: int) -> bool:
        """Process input until that time; return whether some is left."""

    def note_cpu(self, used_ns: int) -> bool:
        """Account for processor time of a turn; return whether the connection goes on."""


class TurnScheduler:
    """The waiting connections of one listener or of several.

    Args:
        loop: The gateway's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[TurnTaker] = deque()
        self._present = 0
        self._is_counting = False

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, connection: TurnTaker) -> None:
        """Call a connection's `take_turn` until it has no input left; it must not wait already."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._run)

    def present(self) -> int:
        """The number of the loop's present turn, which costs a callback to count."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._end_turn)
        return self._present

    def _end_turn(self) -> None:
        self._present += 1
        self._is_counting = False

    def _run(self) -> None:
        waiting = self._waiting
        is_alone = len(waiting) == 1
        began_ns = now = now_ns()
        for _ in range(len(waiting)):
            connection = waiting[0]
            deficit_ns = min(connection.deficit_ns + QUANTUM_NS, QUANTUM_NS)
            if is_alone or deficit_ns > 0:
                cpu_ns = thread_cpu_ns()
                deficit_ns = max(deficit_ns, QUANTUM_NS // 2)
                is_left = connection.take_turn(now + deficit_ns)
                cpu_ns = thread_cpu_ns() - cpu_ns
                ended_ns = now_ns()
                connection.deficit_ns = deficit_ns - (ended_ns - now)
                now = ended_ns
                is_left = connection.note_cpu(cpu_ns) and is_left
                if is_left and connection.wasted_ns > WASTED_NS_MAX:
                    is_left = False
                    self._loop.call_later(connection.wasted_ns / NS_PER_S, self.wait, connection)
            else:
                connection.deficit_ns = deficit_ns
                is_left = True
            waiting.popleft()
            if is_left:
                waiting.append(connection)
            if now - began_ns > TURN_NS:
                break
        if waiting:
            self._loop.call_soon(self._run)


class ReadBurst:
    """Reads of one connection in one turn: libuv reads a socket up to 32 times in a row.

    Reads that are far apart are not of one turn. The scheduler tells it of the others: of large
    ones, which may take milliseconds where their memory is new, and of small ones once they have
    taken half of the limit.

    Args:
        turns: Of the connection's listener.
    """

    __slots__ = ("_began_ns", "_ended_ns", "_turn", "_turns")

    def __init__(self, turns: TurnScheduler) -> None:
        self._turns = turns
        self._began_ns = self._ended_ns = 0
        self._turn = -1

    def is_long(self, began_ns: int, ended_ns: int, nbytes: int, limit_ns: int) -> bool:
        """Note that a read was processed; return whether the burst took longer than the limit."""
        is_same_turn = began_ns - self._ended_ns <= GAP_NS
        if nbytes >= LARGE_READ_BYTES or (
            is_same_turn and ended_ns - self._began_ns > limit_ns // 2
        ):
            turn = self._turns.present()
            is_same_turn = turn == self._turn
            self._turn = turn
        if not is_same_turn:
            self._began_ns = began_ns
        self._ended_ns = ended_ns
        return ended_ns - self._began_ns > limit_ns
