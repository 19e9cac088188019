"""ZMTP listener: a ROUTER socket for all peers.

Runs on: gateway loop.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from iskander.gateway.transport.connection_listener import ConnectionListener
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.sockets import keep_alive
from iskander.gateway.transport.zmtp.connection import Connection, Session


class Listener(ConnectionListener[Connection]):
    """Listening sockets and connections of all peers.

    Args:
        open_session: Creates the session of a peer from its identity.
        on_broken: Receives the reason why a connection was ended.
    """

    # A peer's queued messages would be lost with its connection.
    has_max_age = False

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
        """Accept peers on a bound socket."""
        keep_alive(listening)
        await super().listen(listening)

    def connection(self) -> Connection:
        """Create the protocol object of a new connection."""
        return Connection(self)

    def on_rejected(self) -> None:
        """Count and report a peer rejected at the limit."""
        super().on_rejected()
        limit = f"limit of {self.connections_max} peers reached (`inferential.connections`)"
        self.on_broken(f"connection rejected: {limit}")
