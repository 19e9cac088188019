"""Window of a stream: limits of the batches in progress and of their private memory.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.config.schema import LimitsConfig


class Window:
    """Counts the batches of one stream between their admission and the write of their results.

    Attributes:
        count: Batches in the window.
        held_bytes: Private memory of these batches.
    """

    __slots__ = ("_limits", "count", "held_bytes")

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.count = self.held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether results must be written before the next batch is read."""
        limits = self._limits
        return self.count >= limits.window_batches or self.held_bytes >= limits.window_bytes

    def enter(self, held_bytes: int) -> None:
        """Add a batch."""
        self.count += 1
        self.held_bytes += held_bytes

    def add_memory(self, held_bytes: int) -> None:
        """Add memory to a batch of the window."""
        self.held_bytes += held_bytes

    def leave(self, held_bytes: int) -> None:
        """Remove a batch with its memory."""
        self.count -= 1
        self.held_bytes -= held_bytes
