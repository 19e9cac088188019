"""HTTP/1.1 ports for frontends: uvicorn's protocol on the gateway's own loop and sockets.

uvicorn takes requests apart and runs an application for each. What it leaves open is closed here:
a connection that says nothing, or takes nothing of its answer, ends; there are so many and no more.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from iskander.gateway.access.handshakes import Door

QUIET_S = 60.0
"""How long a connection may be without the whole head of a request."""
STALL_S = 30.0
"""How long a client may take nothing of an answer that is larger than the socket's buffers."""
LINGER_S = 5.0
"""How long the rest of a body that was refused is read and thrown away, so that its client, which
is still sending, gets to see the answer."""
HEAD_BYTES_MAX = 16_384
CONNECTIONS_SLACK = 64
"""Connections beyond the limit whose requests are answered, with a refusal; more are closed."""
BACKLOG = 1024
_STOP_TURN_S = 0.01
_ABORT_S = 1.0


class Http1Port:
    """Listens, and gives requests to an application.

    Args:
        app: Answers them. It looks at `is_full` itself.
        connections_max: Connections that are served at once.
        tls: What they are spoken to with; None: in the clear.
    """

    def __init__(
        self, app: ASGIApp, connections_max: int, tls: ssl.SSLContext | None = None
    ) -> None:
        self._tls = tls
        self._connections_max = connections_max
        self._state = ServerState()
        self._servers: list[asyncio.Server | Door] = []
        # A failure of the application is logged by our own handlers and answered with a bare 500.
        self._config = uvicorn.Config(
            app,
            ws="none",
            loop="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(QUIET_S),
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._config.load()

    @property
    def connections(self) -> int:
        """Those that are open."""
        return len(self._state.connections)

    @property
    def is_full(self) -> bool:
        """Whether there are more connections than are served."""
        return self.connections > self._connections_max

    async def listen(self, bound: socket.socket) -> None:
        """Take connections on a socket that is bound."""
        loop = asyncio.get_running_loop()
        self._servers.append(
            await loop.create_server(self._connect, sock=bound, backlog=BACKLOG)
            if self._tls is None
            else Door(bound, self._tls, self._connect, BACKLOG)
        )

    def close_door(self) -> None:
        """Take no more connections; those that are open go on."""
        for server in self._servers:
            server.close()

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        self.close_door()
        connections = self._state.connections
        for connection in list(connections):
            connection.shutdown()
        await self._wait_for_clients(grace_s)
        for connection in list(connections):
            connection.transport.abort()
        await self._wait_for_clients(_ABORT_S)

    async def _wait_for_clients(self, wait_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while self._state.connections or self._state.tasks:
                    await asyncio.sleep(_STOP_TURN_S)

    def _connect(self) -> _Connection:
        return _Connection(self._config, self._state, self._connections_max + CONNECTIONS_SLACK)


class _Connection(H11Protocol):
    """One connection, with the time that it may be quiet or not read."""

    def __init__(self, config: uvicorn.Config, state: ServerState, most: int) -> None:
        super().__init__(config, state, {})
        self._most = most
        self._quiet: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()
        else:
            self._await_request(QUIET_S)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._quiet, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_request()

    def on_response_complete(self) -> None:
        is_unread = self.conn.their_state is h11.SEND_BODY
        self._await_request(LINGER_S if is_unread else QUIET_S)
        super().on_response_complete()
        self._note_request()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()  # An answer has begun, or was the last.

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
        super().resume_writing()

    def _await_request(self, wait_s: float) -> None:
        if self._quiet is not None:
            self._quiet.cancel()
        if not self.transport.is_closing():
            self._quiet = self.loop.call_later(wait_s, self.transport.abort)

    def _note_request(self) -> None:
        """Once its head is there, time is the application's business."""
        if self.cycle is not None and not self.cycle.response_complete and self._quiet is not None:
            self._quiet.cancel()
