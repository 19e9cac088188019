"""What a connection needs to know of its server.

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
    """What the connections of one server share.

    Attributes:
        loop: Theirs.
        serve: Answers a call; ends by itself, or with `RpcError`.
        at_once: Answers one in this turn, or sees to it that it is answered; whether it does.
        message_bytes: The largest message that is taken, by a call's path.
        calls_max: Open calls of one connection.
        scratch: Where sockets are read into; a read is taken apart before the next.
        connections: The open ones.
        budget: The memory of received bytes.
        timeouts: The settings.
        turns: Where connections wait whose input was not all processed.
        named: What is refused here, as those who called that path know it.
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
        """Charge what the transport of a connection holds."""

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""
