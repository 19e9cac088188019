"""Cancellation of the calls and waits of a thread, or of a client, from other threads.

Runs on: the caller's threads, and the loop of `AsyncClient`.
"""

from __future__ import annotations

import threading
from typing import Protocol

from iskander.errors import Cancelled

_thread = threading.local()


class Cancellable(Protocol):
    """An open call, represented by the reader of its results, or a wait."""

    def cancel(self) -> None:
        """End the call or the wait; any thread may call this at any time, even after the end."""


class Cancellation:
    """Context in which a thread makes calls that other threads may cancel.

    Attributes:
        has_expired: Whether the deadline of the caller was the reason of the cancellation.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Cancellable | None = None
        self.is_requested = False
        self.has_expired = False

    def __enter__(self) -> Cancellation:
        _thread.current = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.current = None
        with self._lock:
            self._open = None

    def cancel(self, *, has_expired: bool = False) -> None:
        """End the open call or wait, and reject all later ones of this context."""
        with self._lock:
            self.has_expired = self.has_expired or (has_expired and not self.is_requested)
            self.is_requested = True
            entered = self._open
        if entered is not None:
            entered.cancel()

    def require_none(self) -> None:
        """Raise Cancelled if a cancellation was requested."""
        if self.is_requested:
            raise Cancelled("the caller cancelled the call")

    def enter(self, entered: Cancellable) -> None:
        """Set the open call or wait, which `cancel` ends."""
        with self._lock:
            self._open = entered
            is_requested = self.is_requested
        if is_requested:
            entered.cancel()


def current() -> Cancellation | None:
    """Return the context in which this thread makes calls; None outside of a context."""
    found: Cancellation | None = getattr(_thread, "current", None)
    return found


class OpenCalls:
    """Open calls and waits of a client, which `close` ends.

    No lock is needed: `close` sets `is_closed` before it reads the set, and a call joins the set
    before it reads `is_closed`, so either `close` ends the call, or the call sees `is_closed`.

    Attributes:
        is_closed: Whether the client is closed.
    """

    def __init__(self) -> None:
        self._entered: set[Cancellable] = set()
        self.is_closed = False

    def close(self) -> None:
        """End all calls and waits, and reject later ones."""
        self.is_closed = True
        for entered in self._entered.copy():
            entered.cancel()

    def require_open(self) -> None:
        """Raise Cancelled if the client is closed, or the calls of this thread are cancelled."""
        if self.is_closed:
            raise Cancelled("the client is closed")
        cancellation = current()
        if cancellation is not None:
            cancellation.require_none()

    def enter(self, entered: Cancellable) -> None:
        """Add a call or a wait of this thread."""
        self._entered.add(entered)
        if self.is_closed:
            entered.cancel()
        cancellation = current()
        if cancellation is not None:
            cancellation.enter(entered)

    def leave(self, entered: Cancellable) -> None:
        """Remove a call or a wait that has ended."""
        self._entered.discard(entered)

    def pause(self, wait_s: float) -> None:
        """Wait for a number of seconds.

        Raises:
            Cancelled: The client was closed, or the calls of this thread were cancelled.
        """
        wait = _Wait()
        self.enter(wait)
        try:
            wait.run(wait_s)
        finally:
            self.leave(wait)
        self.require_open()


class _Wait:
    """A wait that another thread may end; see `Cancellable`."""

    def __init__(self) -> None:
        self._has_ended = threading.Event()

    def cancel(self) -> None:
        self._has_ended.set()

    def run(self, wait_s: float) -> None:
        self._has_ended.wait(wait_s)
