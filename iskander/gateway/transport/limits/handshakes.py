"""Turns of TLS handshakes, which limit their share of the event loop's time.

The turns are those of all listeners together. A handshake begins when its first bytes have arrived,
and the server computes its part at once, which takes up to milliseconds with an RSA key. So one
handshake begins at a time, and the next one after a pause of `PAUSE_SHARE` times its cost. Sources
take turns, so that many handshakes of one source delay only that source.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Final

from iskander.foundation.clock import NS_PER_S
from iskander.gateway.transport.sources import Source

PAUSE_SHARE: Final = 4
"""Pause after a handshake, by its cost: waiting handshakes use a fifth of the loop's time."""
CLOSED_STATES: Final = (7, 8)
"""TCP_CLOSE and TCP_CLOSE_WAIT of tcp_states.h."""


class HandshakeTurns:
    """Handshakes that wait for their turn, by source; the listeners limit their number."""

    def __init__(self) -> None:
        # The first source is the next one.
        self._queues: dict[Source, deque[asyncio.Future[None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0

    async def wait(self, source: Source, cost_ns: int) -> None:
        """Wait for the turn of a handshake that takes `cost_ns` of processor time."""
        loop = asyncio.get_running_loop()
        if not self._queues and loop.time() >= self._next_s:
            self._charge(cost_ns)
            return
        turn: asyncio.Future[None] = loop.create_future()
        queue = self._queues.setdefault(source, deque())
        queue.append(turn)
        self._start_timer()
        try:
            await turn
        except asyncio.CancelledError:
            # `_next` skips a cancelled turn, but must not count it as waiting.
            with contextlib.suppress(ValueError):
                queue.remove(turn)
            if not queue and self._queues.get(source) is queue:
                del self._queues[source]
            self._start_timer()  # Its turn may have begun, for which the timer was stopped.
            raise
        self._charge(cost_ns)

    def _charge(self, cost_ns: int) -> None:
        loop = asyncio.get_running_loop()
        self._next_s = loop.time() + (1 + PAUSE_SHARE) * cost_ns / NS_PER_S
        self._start_timer()

    def _start_timer(self) -> None:
        if self._queues and self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._next_s, self._next)

    def _next(self) -> None:
        """Begin the next handshake; its `wait` starts the timer again."""
        self._timer = None
        while self._queues:
            source = next(iter(self._queues))
            queue = self._queues.pop(source)
            turn = queue.popleft()
            if queue:
                self._queues[source] = queue
            if not turn.done():
                turn.set_result(None)
                return


async def first_bytes(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Wait until a connection has input, and do not read it."""
    arrived: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _finish, arrived)
    try:
        await arrived
    finally:
        loop.remove_reader(connection)


def has_ended(connection: socket.socket) -> bool:
    """Return whether the peer has closed a TCP connection, even if its input is not read yet."""
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return False
    return state in CLOSED_STATES


def _finish(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)
