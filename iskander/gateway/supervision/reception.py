"""Where workers come in: the attach socket, who may, and what they say first.

A peer that says nothing, or nonsense, is refused after a second and holds nobody up.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from iskander.errors import IskanderError
from iskander.wire import attach
from iskander.wire.channel import FRAME_BYTES_MAX
from iskander.wire.messages import Hello, Refused, require_protocol

log = logging.getLogger("iskander.reception")

HELLO_S = 1.0
GREETINGS_MAX = 64
ACCEPT_PAUSE_S = 1.0
"""After the system refused a connection, such as for want of descriptors: it stays there, and would
be tried without end."""


class Reception:
    """The attach socket.

    Args:
        path: Of the socket; the runtime directory's lock is held.
        take_on: Called with the connection, the peer's pid and its hello; it may refuse by
            raising an `IskanderError`, which is what the peer is told.
    """

    def __init__(self, path: Path, take_on: Callable[[socket.socket, int, Hello], None]) -> None:
        self._path = path
        self._take_on = take_on
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = attach.listen(str(path))
        self._greetings: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None

    def open(self) -> None:
        """Begin to let workers in."""
        assert self._listener is not None
        self._loop.add_reader(self._listener, self._on_connect)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._listener is None:
            return
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = None
        self._path.unlink(missing_ok=True)
        for greeting in self._greetings:
            greeting.cancel()

    def _on_connect(self) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.error("a worker cannot come in: %s", error)
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
            async with asyncio.timeout(HELLO_S):
                frame = await self._loop.sock_recv(connection, FRAME_BYTES_MAX)
            attach.require_peer(connection)
            hello = attach.read_hello(frame)
            require_protocol(hello.protocol)
            self._take_on(connection, attach.peer_of(connection).pid, hello)
        except (IskanderError, OSError) as error:
            log.warning("a worker was not taken on: %s", error or "it said nothing")
            with contextlib.suppress(OSError):
                attach.send_answer(connection, Refused("protocol", str(error)))
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
