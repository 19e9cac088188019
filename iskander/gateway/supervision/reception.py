"""Where workers come in: the attach socket, who may, and what they say first.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from iskander.errors import IskanderError, ProtocolError
from iskander.gateway.doorstep import Doorstep
from iskander.wire import attach
from iskander.wire.channel import FRAME_BYTES_MAX
from iskander.wire.messages import Hello, Refused, require_protocol

TakeOn: TypeAlias = Callable[[socket.socket, int, Hello], Awaitable[None]]

log = logging.getLogger("iskander.reception")


class Reception:
    """The attach socket.

    Args:
        path: Of the socket; the runtime directory's lock is held.
        take_on: Called with the connection, the peer's pid and its hello; it may refuse by
            raising an `IskanderError`, which is what the peer is told.
    """

    def __init__(self, path: Path, take_on: TakeOn) -> None:
        self._path = path
        self._take_on = take_on
        self._doorstep: Doorstep | None = None

    def open(self) -> None:
        """Begin to let workers in."""
        listening = attach.listen(str(self._path))
        self._doorstep = Doorstep(listening, FRAME_BYTES_MAX, self._greet, self._refuse)
        self._doorstep.open()

    def close(self) -> None:
        """Let nobody in any more."""
        if self._doorstep is not None:
            self._doorstep.close()
            self._doorstep = None
            self._path.unlink(missing_ok=True)

    async def _greet(self, connection: socket.socket, frame: bytes) -> None:
        attach.require_peer(connection)
        hello = attach.read_hello(frame)
        require_protocol(hello.protocol)
        await self._take_on(connection, attach.peer_of(connection).pid, hello)

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        log.warning("a worker was not taken on: %s", str(error) or "it said nothing")
        if isinstance(error, TimeoutError):
            return  # It may only have been slow: whom nobody answers asks again.
        code = error.code if isinstance(error, IskanderError) else ProtocolError.code
        attach.send_answer(connection, Refused(code, str(error)))
