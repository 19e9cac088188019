"""Admin HTTP server: `/livez`, `/readyz` and `/metrics`.

It shares the event loop with the batches: few and short connections, pages rendered in small steps,
and cached for a tenth of a second. Import this module late: it loads uvicorn and starlette.

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
"""Probes and one or two scrapers use five."""
CONNECTION_S = 30.0
"""Maximum lifetime of a connection."""
STOP_S = 1
REUSE_NS = 100 * NS_PER_MS
"""Cache lifetime of a page, which limits rendering to ten pages a second."""


class PageSource(Protocol):
    """Content of the pages."""

    def reasons(self) -> list[str]:
        """Return the reasons for not being ready; empty if ready."""

    async def render(self, *, is_openmetrics: bool) -> bytes:
        """Render the page for Prometheus."""


class AdminServer:
    """The HTTP server; without `limits` it has connection limits of its own."""

    def __init__(
        self, address: str, source: PageSource, limits: ConnectionLimits | None = None
    ) -> None:
        self._address = address
        self._source = source
        self._limits = limits
        self._own_limits: ConnectionLimits | None = None
        self._listener: Http1Listener | None = None

    async def start(self) -> str:
        """Listen; return the address with the allocated port.

        Raises:
            ConfigError: The address is invalid or in use.
        """
        bound = _bind(self._address)
        if self._limits is None:
            self._limits = self._own_limits = ConnectionLimits(Config())
        app = _Pages(self._source).app()
        self._listener = Http1Listener(
            app, CONNECTIONS_MAX, self._limits, slack=0, life_s=CONNECTION_S
        )
        host, port = bound.getsockname()[:2]
        await self._listener.listen(bound)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, finish the current responses, and close all connections."""
        if self._listener is not None:
            await self._listener.stop(STOP_S)
        if self._own_limits is not None:
            self._own_limits.stop()


class _Pages:
    """Routes and cached pages."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._lock = asyncio.Lock()
        self._cache: dict[str, tuple[int, bytes]] = {}

    def app(self) -> Starlette:
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
            at_ns, page = self._cache.get(kind, (0, b""))
            if not page or now_ns() - at_ns > REUSE_NS:
                page = await self._source.render(is_openmetrics=is_openmetrics)
                self._cache[kind] = now_ns(), page
        return Response(page, headers={"content-type": kind})


def _bind(address: str) -> socket.socket:
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
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"admin.address {address}: {reason}") from None
    return listener
