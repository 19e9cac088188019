"""Listener for local processes; reads one greeting frame per connection.

A connection without a greeting is closed after a second and does not delay others. At
`GREETINGS_MAX` pending greetings, new connections are closed.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from iskander.errors import IskanderError
from iskander.logs import network as log

GREETING_TIMEOUT_S = 1.0
GREETINGS_MAX = 64
ACCEPT_PAUSE_S = 1.0
"""Pause after an accept error: the connection stays pending, so each iteration would retry."""


class LocalListener:
    """Unix socket listener with a greeting.

    Args:
        listener: Listening, non-blocking.
        frame_bytes: Size limit of the greeting.
        greet: Receives a connection and its greeting. It owns the connection unless it or its
            awaitable raises `IskanderError` or `OSError`.
        reject: Called before a failed connection is closed; an error without text is a timeout.
    """

    def __init__(
        self,
        listener: socket.socket,
        frame_bytes: int,
        greet: Callable[[socket.socket, bytes], Awaitable[None] | None],
        reject: Callable[[socket.socket, Exception], None],
    ) -> None:
        self._listener = listener
        self._frame_bytes = frame_bytes
        self._on_greeting = greet
        self._reject = reject
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Start accepting."""
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Close the listening socket; cancel greetings in progress and close their connections."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for greeting in self._greetings:
            greeting.cancel()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.local_accept_failed(reason=str(error), pause_s=ACCEPT_PAUSE_S)
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self.open)
            return
        connection.setblocking(False)
        if len(self._greetings) >= GREETINGS_MAX:
            connection.close()
            return
        greeting = self._loop.create_task(self._greet(connection))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                frame = await self._loop.sock_recv(connection, self._frame_bytes)
            pending = self._on_greeting(connection, frame)
            if pending is not None:
                await pending
        except (IskanderError, OSError) as error:
            with contextlib.suppress(OSError):
                self._reject(connection, error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
