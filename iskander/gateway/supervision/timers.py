"""One timer for each place of the plan: what happens next there if nothing else does before.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple, Unpack

from iskander.gateway.supervision.workers import Worker

Arguments = TypeVarTuple("Arguments")


class Timers:
    """The timers, by place."""

    def __init__(self) -> None:
        self._handles: dict[int, asyncio.TimerHandle] = {}

    def set(
        self,
        worker: Worker,
        delay_s: float,
        callback: Callable[[Unpack[Arguments]], object],
        *arguments: *Arguments,
    ) -> None:
        """Call back later, instead of whatever was to happen."""
        self.clear(worker)
        self._handles[worker.place.index] = asyncio.get_running_loop().call_later(
            delay_s, callback, *arguments
        )

    def clear(self, worker: Worker) -> None:
        """Nothing is to happen by itself."""
        handle = self._handles.pop(worker.place.index, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        """Nothing anywhere."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
