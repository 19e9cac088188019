"""Listening sockets whose connections begin with a TLS handshake.

Nobody is known before that is over, so handshakes have a limit of their own; where there are more,
the oldest give their places up: those that are meant to be finished are by then.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

HANDSHAKE_S = 10.0
"""How long a client may take."""
HANDSHAKES_MAX = 128
"""Of one socket."""
SHUTDOWN_S = 1.0
PAUSE_S = 0.1
"""Where the system has no descriptor for another connection."""

log = logging.getLogger("iskander.tls")


class Door:
    """A listening socket whose connections begin with a handshake; as `asyncio.Server` is closed.

    Args:
        listening: The socket, bound; from now on this one's.
        context: Of the handshakes.
        connect: Makes a connection's protocol.
        backlog: Connections that the system keeps until they are taken.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        connect: Callable[[], Any],
        backlog: int,
    ) -> None:
        self._listening = listening
        self._context = context
        self._connect = connect
        self._handshakes: dict[asyncio.Task[None], None] = {}
        listening.setblocking(False)
        listening.listen(backlog)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def close(self) -> None:
        """Take no more connections; those that are open go on."""
        self._accepting.cancel()
        for handshake in list(self._handshakes):
            handshake.cancel()
        self._listening.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError:
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self._handshakes) >= HANDSHAKES_MAX:
                next(iter(self._handshakes)).cancel()
            handshake = loop.create_task(self._shake(connection))
            self._handshakes[handshake] = None
            handshake.add_done_callback(self._forget)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connect,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )
        except OSError:
            connection.close()  # It spoke no TLS, not in time, or is gone.
        except asyncio.CancelledError:
            connection.close()
            raise

    def _forget(self, handshake: asyncio.Task[None]) -> None:
        self._handshakes.pop(handshake, None)
        if not handshake.cancelled() and handshake.exception() is not None:
            log.error("a handshake failed", exc_info=handshake.exception())
