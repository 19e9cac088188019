"""Received input of a ZMTP connection: its partial frame, and its backlog of messages.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from iskander.gateway.transport.limits.receive_budget import ReceiveBudget, TrackedArray
from iskander.gateway.transport.zmtp.frames import Head, Part

RESERVED_BYTES_MIN: Final = 4 << 20
"""Larger frames reserve their memory in advance."""
BACKLOG_MESSAGES: Final = 256
BACKLOG_BYTES: Final = 1 << 20
"""The first limit reached applies; a large message may exceed it once."""


class PartialFrame:
    """The frame in progress, if any; `filled` bytes of `body` are received.

    Its buffer is charged as bytes arrive, or reserved in advance.
    """

    def __init__(
        self, holder: object, budget: ReceiveBudget, on_reserved: Callable[[], None]
    ) -> None:
        self._holder: object = holder
        self._budget = budget
        self._on_reserved = on_reserved
        self._array: TrackedArray | None = None
        self._reserved_bytes = 0
        self.body: memoryview | None = None
        self.flags = self.filled = 0
        self.is_reserving = False  # Waits for its reservation; the socket is not read.

    def begin(self, head: Head, received: memoryview) -> None:
        """Start a frame with the received bytes of its body."""
        length = head.length
        # Not cleared: unwritten pages use no memory.
        array = self._array = self._budget.array(length)
        self.body = array.data
        self.flags = head.flags
        self.filled = 0
        if length > RESERVED_BYTES_MIN:
            self._reserved_bytes = array.charged_bytes = length
            self.is_reserving = not self._budget.reserve(self._holder, self, length)
        self.body[: len(received)] = received
        self.fill(len(received))

    def fill(self, count: int) -> None:
        """Count and charge received bytes; above the limit, the charge may end the frame."""
        self.filled += count
        if self._array is not None and not self._reserved_bytes:
            self._array.charged_bytes += count
            self._budget.charge(count)

    def on_reserved(self) -> None:
        """Resume reading: the memory is reserved."""
        self.is_reserving = False
        self._on_reserved()

    def end(self) -> None:
        """End a complete or abandoned frame; its buffer stays charged until it is freed."""
        if self._reserved_bytes:
            reserved = self._reserved_bytes
            if self.is_reserving and self._array is not None:
                reserved = self._array.charged_bytes = 0
            self._reserved_bytes, self.is_reserving = 0, False
            self._budget.end_reservation(self._holder, self, reserved)
        self._array = self.body = None
        self.filled = 0

    def detach(self) -> None:
        """Release the lost connection."""
        self._holder = None
        self._on_reserved = _ignore


def _ignore() -> None:
    """Do nothing when the memory for a frame of a lost connection is reserved."""


class Backlog:
    """Bounded queue of messages while the session is full, with arrival times.

    `small_bytes` counts the bytes of parts that are not charged as they arrive.
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[list[Part], int, int, int]] = deque()
        self.total_bytes = self.small_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def is_full(self) -> bool:
        """Whether to stop reading."""
        return self.total_bytes >= BACKLOG_BYTES or len(self._messages) >= BACKLOG_MESSAGES

    def append(self, parts: list[Part], size: int, small_bytes: int, arrived_ns: int) -> None:
        """Queue a message of `size` bytes."""
        self._messages.append((parts, size, small_bytes, arrived_ns))
        self.total_bytes += size
        self.small_bytes += small_bytes

    def pop(self) -> tuple[list[Part], int]:
        """Remove the oldest message; return its parts and arrival time."""
        parts, size, small_bytes, arrived_ns = self._messages.popleft()
        self.total_bytes -= size
        self.small_bytes -= small_bytes
        return parts, arrived_ns

    def take_all(self) -> list[list[Part]]:
        """Remove and return all messages."""
        messages = [message[0] for message in self._messages]
        self._messages.clear()
        self.total_bytes = self.small_bytes = 0
        return messages
