"""The listener of a gRPC server: every call goes to one function.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Awaitable, Callable

from iskander.transport.connection_limits import ConnectionLimits
from iskander.transport.connection_listener import ConnectionListener
from iskander.transport.http2.call import Call
from iskander.transport.http2.connection import Connection
from iskander.transport.http2.status import RpcError

log = logging.getLogger("iskander.http2")


class Listener(ConnectionListener[Connection]):
    """A gRPC server without methods.

    Args:
        serve: Answers a call, by its path; may end with `RpcError`.
        at_once: Answers one without a task, where nothing has to be waited for first; whether it
            does.
        message_bytes: The largest message that is taken, by a call's path.
        calls_max: Open calls of one connection.
        connections_max: At once.
        named: What is refused here, as those who called that path know it.
        limits: Over the connections of all listeners.
        tls: What connections over TCP are spoken to with; None: in the clear.
    """

    def __init__(
        self,
        serve: Callable[[Call], Awaitable[None]],
        *,
        at_once: Callable[[Call], bool],
        message_bytes: Callable[[str], int],
        calls_max: int,
        connections_max: int,
        named: Callable[[str, RpcError], RpcError],
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(connections_max, limits, tls)
        self.serve = serve
        self.at_once = at_once
        self.message_bytes = message_bytes
        self.calls_max = calls_max
        self.named = named

    @property
    def unsent(self) -> int:
        """Connections whose clients have not read all that was said to them."""
        return sum(connection.has_unsent for connection in self.connections)

    def connection(self) -> Connection:
        """The server's end of a new connection."""
        return Connection(self)

    def on_cut(self, count: int) -> None:
        """So many connections did not end in time."""
        log.info("%d connections are cut", count)
