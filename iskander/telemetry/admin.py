"""Admin HTTP server: `/livez`, `/readyz` and `/metrics`.

It shares the event loop with the batches: few and short connections, pages rendered in small steps,
and cached for a tenth of a second. Import this module late: it loads uvicorn and starlette.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

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


class AdminServer:
    """The HTTP server; without `limits` it has connection limits of its own.

    `reasons` returns why the gateway is not ready; `render` the page for Prometheus, given whether
    it is OpenMetrics.
    """

    def __init__(
        self,
        address: str,
        reasons: Callable[[], list[str]],
        render: Callable[[bool], Awaitable[bytes]],
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._address, self._limits = address, limits
        self._reasons, self._render = reasons, render
        self._own_limits: ConnectionLimits | None = None
        self._listener: Http1Listener | None = None
        self._lock = asyncio.Lock()
        self._cache: dict[str, tuple[int, bytes]] = {}

    async def start(self) -> str:
        """Listen; return the address with its port. Raises ConfigError if invalid or in use."""
        bound = _bind(self._address)
        limits = self._limits
        if limits is None:
            limits = self._own_limits = ConnectionLimits(Config())
        pages = {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._metrics}
        app = Starlette(routes=[Route(path, page) for path, page in pages.items()])
        app.router.redirect_slashes = False
        self._listener = Http1Listener(app, CONNECTIONS_MAX, limits, slack=0, life_s=CONNECTION_S)
        host, port = bound.getsockname()[:2]
        await self._listener.listen(bound)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, finish the current responses, and close all connections."""
        if self._listener is not None:
            await self._listener.stop(STOP_S)
        if self._own_limits is not None:
            self._own_limits.stop()

    async def _livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        reasons = self._reasons()
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
                page = await self._render(is_openmetrics)
                self._cache[kind] = now_ns(), page
        return Response(page, headers={"content-type": kind})


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > PORT_MAX:
        raise ConfigError(f"admin.address {address}: expected HOST:PORT or [IPV6]:PORT")
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
