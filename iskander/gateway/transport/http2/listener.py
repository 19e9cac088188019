"""gRPC listener: passes the calls of all connections to one handler.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from iskander.foundation.logs import network as log
from iskander.gateway.transport.connection_listener import ConnectionListener
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.connection import Connection
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits.connection_limits import ConnectionLimits
from iskander.gateway.transport.tls import ContextSource

OTHER = "other"
"""Protocol label of calls of unknown methods, which clients may invent."""
_STATUS_NAMES = tuple(status.name for status in Status)
"""An index is faster than the property of an enum member."""


class Listener(ConnectionListener[Connection]):
    """Listening sockets of a gRPC server, and the shared resources of its connections.

    Args:
        serve: Handles a call in a task; returns or raises `RpcError`.
        serve_inline: Handles a call without a task; returns False if it needs one.
        message_bytes: Returns the limit on request messages of a path.
        calls_max: Limit on open calls of a new connection.
        add_details: Converts an error to the error format of the call's path.

    Attributes:
        load_trailer: Header fields, encoded, that the trailers of every served call end with.
        protocols: Protocol of each known path, by which its calls are counted.
    """

    def __init__(
        self,
        serve: Callable[[Call], Awaitable[None]],
        *,
        serve_inline: Callable[[Call], bool],
        message_bytes: Callable[[str], int],
        calls_max: int,
        connections_max: int,
        add_details: Callable[[str, Exception], RpcError],
        limits: ConnectionLimits,
        tls: ContextSource | None = None,
    ) -> None:
        super().__init__(connections_max, limits, tls)
        self.serve = serve
        self.serve_inline = serve_inline
        self.message_bytes = message_bytes
        self.calls_max = calls_max
        self.add_details = add_details
        self.load_trailer = b""
        self.protocols: Mapping[str, str] = {}
        self._calls_ended = limits.calls_ended

    @property
    def unsent(self) -> int:
        """Number of connections with unsent data."""
        return sum(connection.has_unsent for connection in self.connections)

    def connection(self) -> Connection:
        """Create the protocol object of a new connection."""
        return Connection(self)

    def count_call(self, path: str, status: Status) -> None:
        """Count an ended call."""
        self._calls_ended[self.protocols.get(path, OTHER), _STATUS_NAMES[status]] += 1

    def on_aborted(self, count: int) -> None:
        """Log the connections that are aborted at the end of the drain."""
        log.connections_aborted(count=count)
