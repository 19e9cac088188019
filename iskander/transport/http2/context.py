"""Resources that the connections of one HTTP/2 server share.

Pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from iskander.config.schema import TimeoutsConfig
from iskander.transport.http2.status import RpcError
from iskander.transport.receive_budget import ReceiveBudget
from iskander.transport.turn_scheduler import TurnScheduler

if TYPE_CHECKING:
    from iskander.transport.http2.call import Call
    from iskander.transport.http2.connection import Connection


class Host(Protocol):
    """Shared state and callbacks of one server.

    Attributes:
        serve: Handles a call in a task; returns or raises `RpcError`.
        at_once: Handles a call without a task; returns False if it needs one.
        message_bytes: Largest request message, by the call's path.
        calls_max: Open calls of one connection.
        scratch: Read buffer of all sockets; a read is processed before the next one.
        budget: Memory for received bytes.
        turns: Scheduler of connections with unprocessed input.
        named: Converts a transport error to the error format of the call's path.
    """

    loop: asyncio.AbstractEventLoop
    serve: Callable[[Call], Awaitable[None]]
    at_once: Callable[[Call], bool]
    message_bytes: Callable[[str], int]
    calls_max: int
    scratch: memoryview
    connections: set[Connection]
    budget: ReceiveBudget
    timeouts: TimeoutsConfig
    turns: TurnScheduler
    named: Callable[[str, RpcError], RpcError]

    def count_ended(self, reason: str) -> None:
        """Count a connection that the server ended."""

    def charge_unsent(self, connection: Connection) -> None:
        """Charge the bytes in the transport's write buffer."""

    def forget(self, connection: Connection) -> None:
        """Remove a closed connection."""
