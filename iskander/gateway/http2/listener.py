"""Listening sockets, and all connections that came over them: keepalive and the orderly end.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.http2.call import Call
from iskander.gateway.http2.connection import SCRATCH_BYTES, Connection

log = logging.getLogger("iskander.http2")

CONNECTIONS_MAX = 10_000
BACKLOG = 1024
LOOK_AFTER_S = 5.0
TURN_S = 0.01


class Listener:
    """A gRPC server without methods: every call goes to one function.

    Args:
        serve: Answers a call, by its path; may end with `RpcError`.
        message_bytes: The largest message taken.
        calls_max: Open calls of one connection.
    """

    def __init__(
        self, serve: Callable[[Call], Awaitable[None]], *, message_bytes: int, calls_max: int
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.serve = serve
        self.message_bytes = message_bytes
        self.calls_max = calls_max
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._caring: asyncio.TimerHandle | None = None

    async def listen(self, listening: socket.socket) -> None:
        """Take connections from a socket that is bound."""
        is_unix = listening.family == socket.AF_UNIX
        create = self.loop.create_unix_server if is_unix else self.loop.create_server
        self._servers.append(await create(self._connect, sock=listening, backlog=BACKLOG))
        if self._caring is None:
            self._care()

    def close_door(self) -> None:
        """Take no more connections."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, ask all clients to go, and end what is still open after `grace_s`."""
        self.close_door()
        deadline_ns = now_ns() + int(grace_s * NS_PER_S)
        while self.connections and now_ns() < deadline_ns:
            for connection in list(self.connections):
                connection.leave()
            await asyncio.sleep(TURN_S)
        if self.connections:
            log.info("%d connections are cut", len(self.connections))
        for connection in list(self.connections):
            connection.abort()
        if self._caring is not None:
            self._caring.cancel()
        with contextlib.suppress(TimeoutError):
            # One turn more, in which the transports close their sockets.
            async with asyncio.timeout(1.0):
                while self.connections:
                    await asyncio.sleep(0)

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self.connections) >= CONNECTIONS_MAX:
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
