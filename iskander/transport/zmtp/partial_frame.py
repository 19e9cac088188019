"""The frame of a peer that has not come whole: its memory, charged as it comes or reserved before.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from iskander.transport.receive_budget import ReceiveBudget, TrackedArray
from iskander.transport.zmtp.frames import Head

RESERVED_BYTES_MIN: Final = 4 << 20
"""Larger frames reserve their memory first."""


class PartialFrame:
    """The frame that is being received, if there is one.

    Args:
        holder: The connection, as the budget knows it.
        budget: The memory of received bytes.
        on_reserved: Called when the memory is there that `is_reserving` waits for.

    Attributes:
        body: Memory for its body; None where no frame is half received.
        flags: Of the frame.
        filled: Bytes that have come.
        is_reserving: It waits for memory; nothing more of it is to be read.
    """

    def __init__(
        self, holder: object, budget: ReceiveBudget, on_reserved: Callable[[], None]
    ) -> None:
        self._holder = holder
        self._budget = budget
        self._on_reserved = on_reserved
        self._array: TrackedArray | None = None
        self._reserved_bytes = 0
        self.body: memoryview | None = None
        self.flags = self.filled = 0
        self.is_reserving = False

    def begin(self, head: Head, begun: memoryview) -> None:
        """Take the head of a frame, and what has come of its body."""
        length = head.length
        # Not cleared: pages of which nothing came cost nothing.
        array = self._array = self._budget.array(length)
        self.body = array.data
        self.flags = head.flags
        self.filled = 0
        if length > RESERVED_BYTES_MIN:
            self._reserved_bytes = array.charged_bytes = length
            self.is_reserving = not self._budget.reserve(self._holder, self, length)
        self.body[: len(begun)] = begun
        self.fill(len(begun))

    def fill(self, count: int) -> None:
        """So many bytes more have come; where there is no memory for them the frame may end."""
        self.filled += count
        if self._array is not None and not self._reserved_bytes:
            self._array.charged_bytes += count
            self._budget.charge(count)

    def on_reserved(self) -> None:
        """The memory is reserved."""
        self.is_reserving = False
        self._on_reserved()

    def end(self) -> None:
        """The frame has come whole, or will not; its memory is charged until it is freed."""
        if self._reserved_bytes:
            reserved = self._reserved_bytes
            if self.is_reserving and self._array is not None:
                reserved = self._array.charged_bytes = 0
            self._reserved_bytes, self.is_reserving = 0, False
            self._budget.end_reservation(self._holder, self, reserved)
        self._array = self.body = None
        self.filled = 0
