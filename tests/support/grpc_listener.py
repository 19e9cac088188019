"""A listener of the HTTP/2 transport on loopback, with one function for all calls."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator

import uvloop

from iskander.config.schema import Config
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.listener import Listener
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits

CALLS_MAX = 100
CONNECTIONS_MAX = 1000
MESSAGE_BYTES = 16 << 20
START_S = 10.0


@contextlib.contextmanager
def listening(serve: Callable[[Call], Awaitable[None]]) -> Iterator[int]:
    """Serve calls in a thread of this process; yields the port."""
    bound = socket.create_server(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    is_ready, loop = threading.Event(), uvloop.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        limits = ConnectionLimits(Config())
        listener = Listener(
            serve,
            serve_inline=lambda call: False,
            message_bytes=lambda path: MESSAGE_BYTES,
            calls_max=CALLS_MAX,
            connections_max=CONNECTIONS_MAX,
            add_details=lambda path, error: error,
            limits=limits,
        )
        await listener.listen(bound)
        is_ready.set()
        await stop.wait()
        await listener.stop(1.0)
        limits.stop()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),), name="listener")
    thread.start()
    try:
        assert is_ready.wait(START_S)
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
