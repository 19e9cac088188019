"""Messages of a peer that wait for a session that is full, with the time at which they came.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from iskander.transport.zmtp.context import Part

BACKLOG_MESSAGES: Final = 256
BACKLOG_BYTES: Final = 1 << 20
"""Kept at most, whichever is reached first; of large messages, one more."""


class Backlog:
    """The messages, oldest first.

    Attributes:
        total_bytes: Of all of them.
        small_bytes: Of their parts that are not charged by themselves.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Part], int, int, int]] = deque()
        self.total_bytes = self.small_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        """Whether no more should be read."""
        return self.total_bytes >= BACKLOG_BYTES or len(self._messages) >= BACKLOG_MESSAGES

    def append(self, parts: list[Part], size: int, small: int, arrived_ns: int) -> None:
        """Keep a message of `size` bytes."""
        self._messages.append((parts, size, small, arrived_ns))
        self.total_bytes += size
        self.small_bytes += small

    def pop(self) -> tuple[list[Part], int]:
        """The oldest message, and when it came."""
        parts, size, small, arrived_ns = self._messages.popleft()
        self.total_bytes -= size
        self.small_bytes -= small
        return parts, arrived_ns

    def take_all(self) -> list[list[Part]]:
        """All messages, which are not kept any more."""
        taken = [message[0] for message in self._messages]
        self._messages.clear()
        self.total_bytes = self.small_bytes = 0
        return taken
