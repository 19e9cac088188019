"""A listening ROUTER: all peers that came to its socket, and the orderly end.

Runs on: gateway loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.connection_listener import ConnectionListener
from iskander.transport.zmtp.connection import Connection
from iskander.transport.zmtp.context import Session

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A peer that is gone without a word is noticed after a minute and a half. Source: tcp(7)."""


class Listener(ConnectionListener[Connection]):
    """Connections of peers.

    Args:
        open_session: Makes the session of a peer that has said its identity.
        on_broken: Told why a connection was ended.
        message_bytes: The largest message taken.
        connections_max: Peers at once; more are closed as they come.
        limits: Over the connections of all listeners.
    """

    def __init__(
        self,
        open_session: Callable[[Connection, bytes], Session],
        on_broken: Callable[[str], None],
        *,
        message_bytes: int,
        connections_max: int,
        limits: ConnectionLimits,
    ) -> None:
        super().__init__(connections_max, limits)
        self.open = open_session
        self.on_broken = on_broken
        self.message_bytes = message_bytes

    async def listen(self, listening: socket.socket) -> None:
        """Take connections from a socket that is bound."""
        if listening.family != socket.AF_UNIX:
            for option in KEEPALIVE:
                listening.setsockopt(*option)  # Those that are accepted inherit it.
        await super().listen(listening)

    def connection(self) -> Connection:
        """The server's end of a new connection."""
        return Connection(self)

    def on_too_many(self) -> None:
        """Count it among those that were ended."""
        super().on_too_many()
        self.on_broken(f"{self._connections_max} peers are connected, the limit")
