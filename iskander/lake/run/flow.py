"""Queue between the threads of a unit, bounded in batches and bytes.

Runs in: the operator's tool; each side may be a thread of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from iskander.errors import Cancelled


class Flow:
    """Batches between the reader and their results: bounded in number and bytes.

    `put` waits while the batches without a result are at a limit; one batch alone is always taken.
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
        """Add an item; wait for space.

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
        """Return the next item; None after the last.

        Raises:
            BaseException: The error of `end` or `cancel`.
        """
        with self._changed:
            while not self._items and not self._is_ended and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return self._items.popleft() if self._items else None

    def release(self, size: int) -> None:
        """Give back the space of an item."""
        with self._changed:
            self._bytes -= size
            self._count -= 1
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """End after the items in it, or with an error at once."""
        with self._changed:
            self._is_ended = True
            self._error = self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """End all waits with `Cancelled`."""
        self.end(Cancelled("the unit was dropped"))
