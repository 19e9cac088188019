"""Bounded queue of a peer's messages while its session is full, with arrival times.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from iskander.transport.zmtp.context import Part

BACKLOG_MESSAGES: Final = 256
BACKLOG_BYTES: Final = 1 << 20
"""The first limit reached applies; a large message may exceed it once."""


class Backlog:
    """Queued messages; `small_bytes` counts the parts that are not charged as they arrive."""

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Part], int, int, int]] = deque()
        self.total_bytes = self.small_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        """Whether to stop reading."""
        return self.total_bytes >= BACKLOG_BYTES or len(self._messages) >= BACKLOG_MESSAGES

    def append(self, parts: list[Part], size: int, small: int, arrived_ns: int) -> None:
        """Queue a message of `size` bytes."""
        self._messages.append((parts, size, small, arrived_ns))
        self.total_bytes += size
        self.small_bytes += small

    def pop(self) -> tuple[list[Part], int]:
        """Remove the oldest message; return its parts and arrival time."""
        parts, size, small, arrived_ns = self._messages.popleft()
        self.total_bytes -= size
        self.small_bytes -= small
        return parts, arrived_ns

    def take_all(self) -> list[list[Part]]:
        """Remove and return all messages."""
        messages = [message[0] for message in self._messages]
        self._messages.clear()
        self.total_bytes = self.small_bytes = 0
        return messages
