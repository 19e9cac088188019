"""Admin HTTP server: probes, `/metrics`, `/events`, and the page with `/status.json`.

It shares the event loop with the batches: few and short connections, pages rendered in small steps,
and cached for a tenth of a second. Import this module late: it loads h11 and starlette.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.foundation.logs import gateway as log
from iskander.gateway.telemetry.status.document import Status
from iskander.gateway.transport.addresses import HTTP_INSTALL, PORT_MAX
from iskander.gateway.transport.http1.listener import Http1Listener
from iskander.gateway.transport.http1.sites import SitePolicy
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sockets import keep_alive
from iskander.gateway.transport.tls import ContextSource

if TYPE_CHECKING:
    from iskander.gateway.telemetry.page.renderer import PageRenderer

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HTML_TYPE = "text/html; charset=utf-8"
JSON_TYPE = "application/json"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROBES = ("/livez", "/readyz")
"""Paths that answer every host, but a host of others without names of models."""
CONNECTIONS_MAX = 32
"""Probes and one or two scrapers use five."""
CONNECTION_S = 30.0
"""Maximum lifetime of a connection, except for a stream of events."""
STOP_S = 1
PAGE_HEADERS = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
DATA_POLICY = "default-src 'none'; frame-ancestors 'none'"
REUSE_NS = 100 * NS_PER_MS
"""Cache lifetime of a page, which limits rendering to ten pages a second."""


class EventApp(Protocol):
    """Application that serves streams of events.

    Attributes:
        streams_max: Its connections.
    """

    streams_max: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""


class AdminServer:
    """The HTTP server; without `limits` it has connection limits of its own, from `config`.

    `reasons` returns why the gateway is not ready; `render` the page for Prometheus, given whether
    it is OpenMetrics; `read_status` the content of the page, None for no page; `events` answers
    `/events`; `config` has the hosts and origins that may read them.
    """

    def __init__(
        self,
        address: str,
        reasons: Callable[[], list[str]],
        render: Callable[[bool], Awaitable[bytes]],
        limits: ConnectionLimits | None = None,
        read_status: Callable[[], Awaitable[Status]] | None = None,
        *,
        config: Config | None = None,
        tls: ContextSource | None = None,
        events: EventApp | None = None,
    ) -> None:
        self._address, self._limits = address, limits
        self._config = config or Config()
        self._sites = SitePolicy(self._config.access, address, probes=PROBES)
        self._reasons, self._render, self._read_status = reasons, render, read_status
        self._tls = tls
        self._events = events
        self._renderer: PageRenderer | None = None
        self._own_limits: ConnectionLimits | None = None
        self._listener: Http1Listener | None = None
        self._lock = asyncio.Lock()
        self._cache: dict[str, tuple[int, bytes]] = {}

    async def start(self) -> str:
        """Listen; return the address with its port. Raises ConfigError if invalid or in use."""
        bound = _bind(self._address)
        limits = self._limits
        if limits is None:
            limits = self._own_limits = ConnectionLimits(self._config)
        pages = {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._metrics}
        if self._read_status is not None:
            pages["/status.json"] = self._status
            if find_spec("jinja2") is not None:
                pages["/"] = self._page
            else:
                log.page_missing(install=HTTP_INSTALL)
        routes = [Route(path, page) for path, page in pages.items()]
        routes.append(Route("/events", self._events or self._no_events, methods=["GET"]))
        app = Starlette(routes=routes)
        app.router.redirect_slashes = False
        connections_max = CONNECTIONS_MAX + (self._events.streams_max if self._events else 0)
        self._listener = Http1Listener(
            app, connections_max, limits, self._tls, sites=self._sites, slack=0, life_s=CONNECTION_S
        )
        keep_alive(bound)
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
        if not request.scope["is_own_host"]:
            reasons = ["not ready"] if reasons else []  # A web page of another site may ask.
        if "application/json" in request.headers.get("accept", ""):
            return JSONResponse({"ready": not reasons, "reasons": reasons}, status)
        return PlainTextResponse("".join(f"{line}\n" for line in reasons or ["ready"]), status)

    async def _no_events(self, _: Request) -> Response:
        return PlainTextResponse("this server has no event stream (`events.enabled`)\n", 404)

    async def _metrics(self, request: Request) -> Response:
        is_openmetrics = "application/openmetrics-text" in request.headers.get("accept", "")
        kind = OPENMETRICS_TYPE if is_openmetrics else TEXT_TYPE
        page = await self._cached(kind, lambda: self._render(is_openmetrics))
        return Response(page, headers={"content-type": kind})

    async def _page(self, _: Request) -> Response:
        page = await self._cached(HTML_TYPE, self._render_page)
        assert self._renderer is not None
        policy = {"content-security-policy": self._renderer.policy}
        return Response(page, headers={**PAGE_HEADERS, **policy, "content-type": HTML_TYPE})

    async def _status(self, _: Request) -> Response:
        body = await self._cached(JSON_TYPE, self._render_status)
        policy = {"content-security-policy": DATA_POLICY}
        return Response(body, headers={**PAGE_HEADERS, **policy, "content-type": JSON_TYPE})

    async def _render_page(self) -> bytes:
        if self._renderer is None:
            # Templates are compiled at the first request, beside the loop: 50 ms.
            self._renderer = await asyncio.to_thread(_load_renderer)
        assert self._read_status is not None
        return await self._renderer.render(await self._read_status())

    async def _render_status(self) -> bytes:
        assert self._read_status is not None
        return msgspec.json.encode(await self._read_status())

    async def _cached(self, kind: str, render: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the page of a content type, which is rendered at most every `REUSE_NS`."""
        async with self._lock:
            at_ns, page = self._cache.get(kind, (0, b""))
            if not page or now_ns() - at_ns > REUSE_NS:
                page = await render()
                self._cache[kind] = now_ns(), page
        return page


def _load_renderer() -> PageRenderer:
    from iskander.gateway.telemetry.page.renderer import PageRenderer

    return PageRenderer()


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
