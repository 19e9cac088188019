"""Interface of a ZMTP connection to its session.

Runs on: gateway loop. Source: poll(2).
"""

from __future__ import annotations

import asyncio
import select
from typing import Protocol

Part = bytes | memoryview


class Session(Protocol):
    """Consumer of a peer's messages."""

    unread_bytes: int  # Charged responses, queued behind unread ones.

    @property
    def is_full(self) -> bool:
        """Whether it accepts no messages; it calls `Connection.resume` when it does again."""

    def take(self, parts: list[Part], arrived_ns: int) -> None:
        """Process a message; `arrived_ns` is its monotonic arrival time."""

    def refuse(self, parts: list[Part]) -> None:
        """Reject a message for lack of memory."""

    @property
    def has_work(self) -> bool:
        """Whether a message is unanswered or a response unsent."""

    def on_writable(self) -> None:
        """The socket is writable again."""

    def on_lost(self) -> None:
        """The connection is closed."""


def is_hung_up(transport: asyncio.Transport) -> bool:
    """Return whether the peer of a paused socket has disconnected."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
