"""File watcher: polls modification time, size and inode.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from iskander.foundation.clock import wall_ns

POLL_S = 1.0


class ReloadStatus:
    """Outcome of the last read of a file, and the time of the last valid one.

    The first read is valid: otherwise the server does not start.
    """

    def __init__(self) -> None:
        self.is_valid = True
        self.valid_ns = wall_ns()

    def record(self, *, is_valid: bool) -> None:
        """Record a read."""
        self.is_valid = is_valid
        if is_valid:
            self.valid_ns = wall_ns()


class FileWatcher:
    """Polls files once a second; a poll costs a few microseconds.

    Two equal polls confirm a change, so that a file is not read while it is written.

    Args:
        paths: Paths of the files.
        callback: Called after each poll with whether the files have changed.
    """

    def __init__(self, paths: Iterable[Path], callback: Callable[[bool], None]) -> None:
        self._paths = list(paths)
        self._callback = callback
        self._confirmed = self._last = self._stamps()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start polling; changes since the construction are reported."""
        self._timer = asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def stop(self) -> None:
        """Stop polling."""
        if self._timer is not None:
            self._timer.cancel()

    def _poll(self) -> None:
        self.start()
        before, self._last = self._last, self._stamps()
        has_changed = before == self._last != self._confirmed
        if has_changed:
            self._confirmed = self._last
        self._callback(has_changed)

    def _stamps(self) -> list[object]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: Path) -> object:
    try:
        status = os.stat(path)
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_size, status.st_ino
