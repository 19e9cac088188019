"""Listening sockets, and all connections that came over them: a limit, care, and the end.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.access.handshakes import Door
from iskander.gateway.connection_limits import ConnectionLimits

SCRATCH_BYTES = 1 << 18
BACKLOG = 1024
LOOK_AFTER_S = 5.0
TURN_S = 0.01


class Peer(Protocol):
    """The server's end of a connection."""

    def look_after(self, now: int) -> None:
        """End it where the peer is not there any more."""

    def leave(self) -> None:
        """Ask the peer to go, in order; once or again and again."""

    def abort(self) -> None:
        """Close now, whatever is unsent."""


Connection = TypeVar("Connection", bound=Peer)


class Listening(Generic[Connection]):
    """What the listeners of all protocols have in common.

    Args:
        connections_max: At once; more are closed as they come.
        limits: Over the connections of all listeners.
        tls: What they are spoken to with; None: in the clear.

    Attributes:
        loop: Of the gateway.
        scratch: Where sockets are read into; a read is taken apart before the next.
        connections: The open ones.
        budget: The memory of received bytes.
        timeouts: The settings.
        turns: Where connections wait whose input was not all processed.
    """

    def __init__(
        self,
        connections_max: int,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self.turns = limits.turns
        self._ended = limits.ended
        self.budget = limits.budget
        self.timeouts = limits.timeouts
        self._connections_max = connections_max
        self._tls = tls
        self._servers: list[asyncio.Server | Door] = []
        self._caring: asyncio.TimerHandle | None = None

    async def listen(self, listening: socket.socket) -> None:
        """Take connections from a socket that is bound; over TLS where it is not a file's."""
        is_unix = listening.family == socket.AF_UNIX
        if self._tls is not None and not is_unix:
            self._servers.append(Door(listening, self._tls, self._connect, BACKLOG))
        else:
            create = self.loop.create_unix_server if is_unix else self.loop.create_server
            self._servers.append(await create(self._connect, sock=listening, backlog=BACKLOG))
        if self._caring is None:
            self._care()

    def close_door(self) -> None:
        """Take no more connections."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, ask all peers to go, and end what is still open after `grace_s`."""
        self.close_door()
        deadline_ns = now_ns() + int(grace_s * NS_PER_S)
        while self.connections and now_ns() < deadline_ns:
            for connection in list(self.connections):
                connection.leave()
            await asyncio.sleep(TURN_S)
        if self.connections:
            self.on_cut(len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._caring is not None:
            self._caring.cancel()
        with contextlib.suppress(TimeoutError):
            # One turn more, in which the transports close their sockets.
            async with asyncio.timeout(1.0):
                while self.connections:
                    await asyncio.sleep(0)

    def count_ended(self, reason: str) -> None:
        """Count a connection that the server ended."""
        self._ended[reason] += 1

    @abstractmethod
    def connection(self) -> asyncio.BaseProtocol:
        """The server's end of a new connection."""

    def on_too_many(self) -> None:
        """Count a connection that is closed at once, since there are as many as may be."""
        self.count_ended("too_many_connections")

    def on_cut(self, count: int) -> None:
        """So many connections did not end in time."""

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self.connections) >= self._connections_max:
            self.on_too_many()
            return _Closed()
        return self.connection()

    def _care(self) -> None:
        now = now_ns()
        for connection in list(self.connections):
            connection.look_after(now)
        self._caring = self.loop.call_later(LOOK_AFTER_S, self._care)


class _Closed(asyncio.Protocol):
    """Stands for a connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
