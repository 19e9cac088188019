"""A unix socket at which processes of this machine say first what they want.

A peer that says nothing is let go after a second and holds nobody up.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable

from iskander.errors import IskanderError

log = logging.getLogger("iskander.doorstep")

GREETING_S = 1.0
GREETINGS_MAX = 64
ACCEPT_PAUSE_S = 1.0
"""After the system refused a connection, such as for want of descriptors: it stays there, and would
be tried without end."""


class LocalListener:
    """Where connections come in.

    Args:
        listener: That listens, and does not block.
        frame_bytes: Of a first frame, at most.
        greet: Called with a connection and its first frame; whoever is taken on is its from there.
            It may refuse by raising an `IskanderError`, also later where it returns something to
            wait for.
        refuse: Called with a connection that is closed then, and why; an error without a text means
            that nothing was said.
    """

    def __init__(
        self,
        listener: socket.socket,
        frame_bytes: int,
        greet: Callable[[socket.socket, bytes], Awaitable[None] | None],
        refuse: Callable[[socket.socket, Exception], None],
    ) -> None:
        self._listener = listener
        self._frame_bytes = frame_bytes
        self._greet = greet
        self._refuse = refuse
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to let peers in."""
        self._loop.add_reader(self._listener, self._on_connect)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for greeting in self._greetings:
            greeting.cancel()

    def _on_connect(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("a process of this machine cannot come in: %s", error)
            self._loop.remove_reader(self._listener)
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self.open)
            return
        connection.setblocking(False)
        if len(self._greetings) >= GREETINGS_MAX:
            connection.close()
            return
        greeting = self._loop.create_task(self._hear(connection))
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _hear(self, connection: socket.socket) -> None:
        try:
            async with asyncio.timeout(GREETING_S):
                frame = await self._loop.sock_recv(connection, self._frame_bytes)
            greeted = self._greet(connection, frame)
            if greeted is not None:
                await greeted
        except (IskanderError, OSError) as error:
            with contextlib.suppress(OSError):
                self._refuse(connection, error)
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
