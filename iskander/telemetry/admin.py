"""The operator's HTTP port: is it alive, is it ready, what does it count.

It shares the loop with the batches, so it is held short: few connections, none for long, pages in
short turns, and no page made anew more often than a tenth of a second. Whoever imports this file
late pays for uvicorn and starlette only where there is such a port.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from iskander.clock import NS_PER_MS, now_ns
from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.transport.addresses import PORT_MAX
from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.http1.listener import Http1Listener

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
CONNECTIONS_MAX = 32
"""Probes and one or two scrapers need five."""
CONNECTION_S = 30.0
"""The longest life of a connection, whatever it does or leaves undone."""
STOP_S = 1
REUSE_NS = 100 * NS_PER_MS
"""A page of this age is given again: someone who asks in a loop costs ten pages a second."""


class PageSource(Protocol):
    """Who knows what is answered."""

    def reasons(self) -> list[str]:
        """Why the gateway is not ready; empty where it is."""
        ...

    async def render(self, *, is_openmetrics: bool) -> bytes:
        """The page for Prometheus."""
        ...


class AdminServer:
    """Serves `/livez`, `/readyz` and `/metrics`.

    Args:
        address: `HOST:PORT`; port 0 takes a free one.
        source: What is told.
        limits: Over the connections of all listeners; None: its own.
    """

    def __init__(
        self, address: str, source: PageSource, limits: ConnectionLimits | None = None
    ) -> None:
        self._address = address
        self._source = source
        self._limits = limits
        self._own_limits: ConnectionLimits | None = None
        self._port: Http1Listener | None = None

    async def start(self) -> str:
        """Listen; the address with the port that was taken.

        Raises:
            ConfigError: Nobody can listen there; says why.
        """
        bound = _bind(self._address)
        if self._limits is None:
            self._limits = self._own_limits = ConnectionLimits(Config())
        self._port = Http1Listener(
            _Pages(self._source).app(),
            CONNECTIONS_MAX,
            self._limits,
            slack=0,
            life_s=CONNECTION_S,
        )
        host, port = bound.getsockname()[:2]
        await self._port.listen(bound)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Listen no more, let answers that are under way finish, and close what is left."""
        if self._port is not None:
            await self._port.stop(STOP_S)
        if self._own_limits is not None:
            self._own_limits.stop()


class _Pages:
    """What is answered."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = asyncio.Lock()
        self._made: dict[str, tuple[int, bytes]] = {}

    def app(self) -> Starlette:
        """The application; a path that is not named here is not found."""
        app = Starlette(
            routes=[
                Route("/livez", self._livez),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
            ]
        )
        app.router.redirect_slashes = False
        return app

    async def _livez(self, _: Request) -> Response:
        """The loop turns: that is all that it says."""
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        reasons = self._source.reasons()
        status = 503 if reasons else 200
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"ready": not reasons, "reasons": reasons}, status)
        return PlainTextResponse("".join(f"{line}\n" for line in reasons or ["ready"]), status)

    async def _metrics(self, request: Request) -> Response:
        is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        kind = OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE
        async with self._lock:
            at_ns, page = self._made.get(kind, (0, b""))
            if not page or now_ns() - at_ns > REUSE_NS:
                page = await self._source.render(is_openmetrics=is_openmetrics)
                self._made[kind] = now_ns(), page
        return Response(page, headers={"content-type": kind})


def _bind(address: str) -> socket.socket:
    """A socket that is bound.

    Raises:
        ConfigError: Nobody can listen there; says why.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"admin.address {address}: wanted HOST:PORT or [IPV6]:PORT")
    listener = None
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        why = error.strerror if isinstance(error, OSError) else "that is no host's name"
        raise ConfigError(f"admin.address {address}: {why}") from None
    return listener
