"""Cancellation of the calls of one thread from another thread.

Runs on: the caller's threads, and the loop of `AsyncClient`.
"""

from __future__ import annotations

import threading
from typing import Any

from iskander.errors import Cancelled

_thread = threading.local()


class Cancellation:
    """Context in which a thread makes calls that another thread may cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reader: Any = None
        self.is_requested = False

    def __enter__(self) -> Cancellation:
        _thread.current = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.current = None
        with self._lock:
            self._reader = None

    def cancel(self) -> None:
        """End the open call, and reject all later ones of this context."""
        with self._lock:
            self.is_requested = True
            reader = self._reader
        if reader is not None:
            reader.cancel()

    def require_none(self) -> None:
        """Raise Cancelled if a cancellation was requested."""
        if self.is_requested:
            raise Cancelled("the caller cancelled the call")

    def enter_call(self, reader: Any) -> None:  # noqa: ANN401
        """Set the open call, by the reader of its results."""
        with self._lock:
            self._reader = reader
            is_requested = self.is_requested
        if is_requested:
            reader.cancel()


def current() -> Cancellation | None:
    """Return the context of this thread."""
    found: Cancellation | None = getattr(_thread, "current", None)
    return found
