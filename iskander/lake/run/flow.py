"""Queue between the threads of a unit, bounded in batches and bytes.

Runs in: the operator's tool; each side may be a thread of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from iskander.errors import Cancelled


class Flow:
    """Queue whose items count against its limits until `release`, even after `take`.

    `put` waits while the items that are not released are at a limit; it always accepts an item if
    there is no other one.
    """

    def __init__(self, bytes_max: int, batches_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches_max = batches_max
        self._changed = threading.Condition()
        self._items: deque[Any] = deque()
        self._bytes = self._count = 0
        self._is_ended = False
        self._error: BaseException | None = None

    def put(self, item: Any, size: int) -> None:  # noqa: ANN401
        """Add an item of `size` bytes; wait for space.

        Raises:
            Cancelled: `cancel` was called.
        """
        with self._changed:
            while self._error is None and (
                self._count >= self._batches_max
                or (self._count > 0 and self._bytes + size > self._bytes_max)
            ):
                self._changed.wait()
            if self._error is not None:
                raise Cancelled("the unit was dropped")
            self._items.append(item)
            self._bytes += size
            self._count += 1
            self._changed.notify_all()

    def take(self) -> Any | None:  # noqa: ANN401
        """Wait for the next item and return it; None after the last one.

        Raises:
            BaseException: The error that was passed to `end`, or `Cancelled` after `cancel`.
        """
        with self._changed:
            while not self._items and not self._is_ended and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return self._items.popleft() if self._items else None

    def release(self, size: int) -> None:
        """Release the space of an item that was taken."""
        with self._changed:
            self._bytes -= size
            self._count -= 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """End the queue: after the items in it, or at once with an error."""
        with self._changed:
            self._is_ended = True
            self._error = self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all waits of `put` and `take` with `Cancelled`."""
        self.end(Cancelled("the unit was dropped"))
