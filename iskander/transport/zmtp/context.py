"""What a connection of a peer needs to know of its server, and of whoever takes its messages.

Runs on: gateway loop. Source: poll(2).
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from iskander.config.schema import TimeoutsConfig
from iskander.transport.receive_budget import ReceiveBudget
from iskander.transport.turn_scheduler import TurnScheduler

if TYPE_CHECKING:
    from iskander.transport.zmtp.connection import Connection

Part = bytes | memoryview


class Session(Protocol):
    """Whoever takes a peer's messages.

    Attributes:
        unread_bytes: Answers that wait for the peer to read those before them; they are charged.
    """

    unread_bytes: int

    @property
    def is_full(self) -> bool:
        """Whether it takes no more for now; it calls `Connection.resume` when it does."""

    def take(self, parts: list[Part], arrived_ns: int) -> None:
        """Take a message, which came at that time of the monotonic clock."""

    def refuse(self, parts: list[Part]) -> None:
        """Take a message that there is no memory for: it is not processed."""

    @property
    def has_work(self) -> bool:
        """Whether something that was taken is not answered, or an answer is not sent."""

    def on_room(self) -> None:
        """The peer takes messages again."""

    def on_lost(self) -> None:
        """The peer is gone."""


class Host(Protocol):
    """What the connections of one server share.

    Attributes:
        loop: Theirs.
        message_bytes: The largest message taken.
        scratch: Where sockets are read into; a read is taken apart before the next.
        connections: The open ones.
        open: The session of a peer that has said its identity.
        on_broken: Told why a connection was ended.
        budget: The memory of received bytes.
        timeouts: The settings.
        turns: Where connections wait whose input was not all processed.
    """

    loop: asyncio.AbstractEventLoop
    message_bytes: int
    scratch: memoryview
    connections: set[Connection]
    open: Callable[[Connection, bytes], Session]
    on_broken: Callable[[str], None]
    budget: ReceiveBudget
    timeouts: TimeoutsConfig
    turns: TurnScheduler

    def count_ended(self, reason: str) -> None:
        """Count a connection that the server ended."""

    def charge_unsent(self, connection: Connection) -> None:
        """Charge what the transport of a connection holds."""

    def forget(self, connection: Connection) -> None:
        """A connection is closed."""


def is_hung_up(transport: asyncio.Transport) -> bool:
    """Whether a peer has gone whose socket is not read."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
