"""The operator's HTTP port: is it alive, is it ready, what does it count.

It shares the loop with the batches, so it is held short: few connections, none for long, pages in
short turns, and no page made anew more often than a tenth of a second. Whoever imports this file
late pays for uvicorn and starlette only where there is such a port.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from iskander.clock import NS_PER_MS, now_ns
from iskander.errors import ConfigError
from iskander.gateway.addresses import PORT_MAX

TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
CONNECTIONS_MAX = 32
"""Beyond them a connection is closed as it comes; probes and one or two scrapers need five."""
CONNECTION_S = 30.0
"""The longest life of a connection, whatever it does or leaves undone."""
IDLE_S = 5
STOP_S = 1
HEAD_BYTES_MAX = 16_384
REUSE_NS = 100 * NS_PER_MS
"""A page of this age is given again: someone who asks in a loop costs ten pages a second."""


class Source(Protocol):
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
    """

    def __init__(self, address: str, source: Source) -> None:
        self._address = address
        self._http = _Http(_http_config(_Pages(source).app()))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; the address with the port that was taken.

        Raises:
            ConfigError: Nobody can listen there; says why.
        """
        listener = _listen(self._address)
        host, port = listener.getsockname()[:2]
        self._task = asyncio.create_task(self._http.serve([listener]), name="admin")
        while not self._http.started and not self._task.done():
            await asyncio.sleep(0)
        if self._task.done():
            self._task.result()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def stop(self) -> None:
        """Listen no more, let answers that are under way finish, and close what is left."""
        if self._task is None:
            return
        self._http.stopping.set()
        await self._task
        for connection in list(self._http.server_state.connections):
            connection.transport.abort()


class _Pages:
    """What is answered."""

    def __init__(self, source: Source) -> None:
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


class _Http(uvicorn.Server):
    """uvicorn without what it does for itself: it takes no signals and wakes up for no clock.

    Its own loop looks ten times a second whether to end, which an idle gateway would notice.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(H11Protocol):
    """One of few, and not for long; uvicorn itself waits for ever for the first request's end."""

    _end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS_MAX:
            transport.abort()
        else:
            self._end = self.loop.call_later(CONNECTION_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._end is not None:
            self._end.cancel()
        super().connection_lost(exc)


def _http_config(app: Starlette) -> uvicorn.Config:
    # A failure is logged with its traceback, by our own handlers, and answered with a bare 500.
    return uvicorn.Config(
        app,
        http=_Connection,
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
        backlog=CONNECTIONS_MAX,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=STOP_S,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
    )


def _listen(address: str) -> socket.socket:
    """A socket that listens.

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
        listener.listen(CONNECTIONS_MAX)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        why = error.strerror if isinstance(error, OSError) else "that is no host's name"
        raise ConfigError(f"admin.address {address}: {why}") from None
    return listener
