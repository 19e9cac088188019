"""HTTP/1.1 ports for frontends: uvicorn's protocol on the gateway's own loop and sockets.

uvicorn takes requests apart and runs an application for each. Limits, turns and timeouts are ours:
`http1_connection` has those of a connection, and `listening` those of all.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.connection_listener import ConnectionListener
from iskander.transport.http1.connection import HEAD_BYTES_MAX, Connection

CONNECTIONS_SLACK = 64
"""Connections beyond the limit whose requests are answered, with a refusal; more are closed."""
_STOP_TURN_S = 0.01
_ABORT_S = 1.0
_NEVER_S = 86_400
"""uvicorn's own timer between requests, for which `timeouts.idle_s` stands."""


class Http1Listener(ConnectionListener[Connection]):
    """Listens, and gives requests to an application.

    Args:
        app: Answers them. It refuses those whose `scope` says `is_surplus`.
        connections_max: Connections that are served at once.
        limits: Over the connections of all listeners.
        tls: What they are spoken to with; None: in the clear.
        slack: Connections beyond those, which the application refuses.
        life_s: The longest life of a connection; None for as long as it likes.
    """

    def __init__(
        self,
        app: ASGIApp,
        connections_max: int,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        *,
        slack: int = CONNECTIONS_SLACK,
        life_s: float | None = None,
    ) -> None:
        super().__init__(connections_max, limits, tls, slack=slack)
        self.life_s = life_s
        self._state = ServerState()
        self._state.connections = self.connections  # type: ignore[assignment]
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
            timeout_keep_alive=_NEVER_S,
            h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        )
        self._config.load()

    @property
    def unsent(self) -> int:
        """Connections whose clients have not read all of their answers."""
        return sum(connection.unsent_bytes > 0 for connection in self.connections)

    def connection(self) -> Connection:
        """The server's end of a new connection."""
        return Connection(self._config, self._state, self)

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and end what is still open after `grace_s`."""
        await super().stop(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                while self._state.tasks:
                    await asyncio.sleep(_STOP_TURN_S)
