"""Files that are read again when they change, without a notice from anybody.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

LOOK_S = 1.0


class FileWatcher:
    """Looks at files once a second; a look takes a few microseconds.

    A change counts when two looks have found the same: what is being written is not half read.

    Args:
        paths: Of the files.
        look: Called each time, with whether they have changed.
    """

    def __init__(self, paths: Iterable[Path], look: Callable[[bool], None]) -> None:
        self._paths = list(paths)
        self._call = look
        self._followed = self._seen = self._stamps()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; what changed since this was made counts."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self.start()
        before, self._seen = self._seen, self._stamps()
        has_changed = before == self._seen != self._followed
        if has_changed:
            self._followed = self._seen
        self._call(has_changed)

    def _stamps(self) -> list[object]:
        return [_stamp_of(path) for path in self._paths]


def _stamp_of(path: Path) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
