"""Listener for local processes; reads one greeting frame per connection.

A connection without a greeting is closed after a second and does not delay others. At
`GREETINGS_MAX` pending greetings, the oldest one of the process with the most is closed.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from iskander.errors import IskanderError
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import network as log
from iskander.gateway.auth.shares import SourceTable
from iskander.gateway.transport.origin import process_of

GREETING_TIMEOUT_S = 1.0
GREETINGS_MAX = 64
ACCEPT_PAUSE_S = 1.0
"""Pause after an accept error: the connection stays pending, so each iteration would retry."""


@dataclass(eq=False)
class _Greeting:
    """A pending greeting of a process, by its user and number."""

    process: tuple[int, int]
    task: asyncio.Task[None]
    accepted_ns: int


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
        self._greetings: SourceTable[_Greeting] = SourceTable()
        self._tasks: set[asyncio.Task[None]] = set()
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
        for task in self._tasks:
            task.cancel()

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
            oldest = self._greetings.oldest_idle(attrgetter("accepted_ns"))
            if oldest is not None:
                self._greetings.remove(oldest.process, oldest)
                oldest.task.cancel()
        task = self._loop.create_task(self._greet(connection))
        greeting = _Greeting(process_of(connection), task, now_ns())
        self._greetings.add(greeting.process, greeting)
        self._tasks.add(task)
        task.add_done_callback(partial(self._on_greeted, connection, greeting))

    def _on_greeted(
        self, connection: socket.socket, greeting: _Greeting, task: asyncio.Task[None]
    ) -> None:
        self._tasks.discard(task)
        self._greetings.remove(greeting.process, greeting)
        # A task that is cancelled before its first step runs no code of its own.
        if task.cancelled():
            connection.close()

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
