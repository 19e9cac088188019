"""A listening ROUTER: all peers that came to its socket, and the orderly end.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.zmtp.connection import Connection, Session

SCRATCH_BYTES = 1 << 18
BACKLOG = 1024
LOOK_AFTER_S = 5.0
TURN_S = 0.01
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A peer that is gone without a word is noticed after a minute and a half. Source: tcp(7)."""


class Listener:
    """Connections of peers.

    Args:
        open_session: Makes the session of a peer that has said its identity.
        on_broken: Told why a connection was ended.
        message_bytes: The largest message taken.
        connections_max: Peers at once; more are closed as they come.
    """

    def __init__(
        self,
        open_session: Callable[[Connection, bytes], Session],
        on_broken: Callable[[str], None],
        *,
        message_bytes: int,
        connections_max: int,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.open = open_session
        self.on_broken = on_broken
        self.message_bytes = message_bytes
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self._connections_max = connections_max
        self._servers: list[asyncio.Server] = []
        self._caring: asyncio.TimerHandle | None = None

    async def listen(self, listening: socket.socket) -> None:
        """Take connections from a socket that is bound."""
        is_unix = listening.family == socket.AF_UNIX
        if not is_unix:
            for option in KEEPALIVE:
                listening.setsockopt(*option)  # Those that are accepted inherit it.
        create = self.loop.create_unix_server if is_unix else self.loop.create_server
        self._servers.append(await create(self._connect, sock=listening, backlog=BACKLOG))
        if self._caring is None:
            self._care()

    def close_door(self) -> None:
        """Take no more connections."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, send what was said, and end what is still open after `grace_s`."""
        self.close_door()
        if self._caring is not None:
            self._caring.cancel()
        for connection in list(self.connections):
            connection.close()
        deadline_ns = now_ns() + int(grace_s * NS_PER_S)
        while self.connections and now_ns() < deadline_ns:
            await asyncio.sleep(TURN_S)
        for connection in list(self.connections):
            connection.abort()
        with contextlib.suppress(TimeoutError):
            # One turn more, in which the transports close their sockets.
            async with asyncio.timeout(1.0):
                while self.connections:
                    await asyncio.sleep(0)

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self.connections) >= self._connections_max:
            self.on_broken(f"{self._connections_max} peers are connected, the limit")
            return _Closed()
        return Connection(self)

    def _care(self) -> None:
        now = now_ns()
        for connection in list(self.connections):
            connection.look_after(now)
        self._caring = self.loop.call_later(LOOK_AFTER_S, self._care)


class _Closed(asyncio.Protocol):
    """Stands for a connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
