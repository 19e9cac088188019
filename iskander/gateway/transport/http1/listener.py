"""HTTP/1.1 listener: runs an ASGI application on the gateway's event loop and sockets.

Turns and timeouts are in `http1/connection.py`, limits in `connection_listener.py`.

Runs on: gateway loop. Source: RFC 9112.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine

from starlette.types import ASGIApp

from iskander.gateway.transport.connection_listener import ConnectionListener
from iskander.gateway.transport.http1.connection import Connection
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.tls import ContextSource

CONNECTIONS_SLACK = 64
"""Connections above the limit whose requests are rejected; further ones are closed."""
_POLL_S = 0.01
_ABORT_S = 1.0


class Http1Listener(ConnectionListener[Connection]):
    """Listener that passes requests to an ASGI application.

    Args:
        app: Must reject a request if `is_surplus` in its scope is true.
        sites: Rejects requests of web pages of other sites.
        life_s: Maximum lifetime of a connection; None for no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        connections_max: int,
        limits: ConnectionLimits,
        tls: ContextSource | None = None,
        *,
        sites: SitePolicy,
        slack: int = CONNECTIONS_SLACK,
        life_s: float | None = None,
    ) -> None:
        super().__init__(connections_max, limits, tls, slack=slack)
        self.sites = sites
        self.life_s = life_s
        self.app = app
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def unsent(self) -> int:
        """Number of connections with unsent response bytes."""
        return sum(connection.unsent_bytes > 0 for connection in self.connections)

    def connection(self) -> Connection:
        """Create the protocol object of a new connection."""
        return Connection(self)

    def run(self, call: Coroutine[None, None, None]) -> None:
        """Run a call of the application."""
        task = self.loop.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, grace_s: float) -> None:
        """Stop listening, and abort open connections after `grace_s`."""
        await super().stop(grace_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                while self._tasks:
                    await asyncio.sleep(_POLL_S)
