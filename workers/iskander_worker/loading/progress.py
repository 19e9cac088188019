"""Progress of a long step of a load, for the operator.

The loading thread names the step; the worker's loop reports its time, at intervals that double.

Runs on: worker main, and its loading thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from iskander.foundation.clock import NS_PER_S, now_ns

FIRST_S = 10.0


class Progress:
    """The running step of one loading thread, if there is one."""

    def __init__(self) -> None:
        self._step: tuple[str, int] | None = None
        self._due_s = FIRST_S

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Name the step that runs inside the block, such as `building TensorRT engines`."""
        self._due_s = FIRST_S
        self._step = text, now_ns()
        try:
            yield
        finally:
            self._step = None

    def due(self, at_ns: int) -> tuple[str, float] | None:
        """Return the step and its run time in seconds, if a report is due."""
        step = self._step
        if step is None:
            return None
        text, begun_ns = step
        seconds = (at_ns - begun_ns) / NS_PER_S
        if seconds < self._due_s:
            return None
        while self._due_s <= seconds:
            self._due_s *= 2
        return text, seconds


progress = Progress()
"""Progress of the loading thread of this process."""
