"""Lanes without a worker: whether requests may come and wait in them, and for how long.

New ones may wait while a worker is replaced in order. Those that wait already do so after any loss,
since the next worker may soon be there. Neither longer than a worker may take to come.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from iskander.errors import IskanderError, NotReady
from iskander.scheduling.lane import Lane
from iskander.supervision.lifecycle import State
from iskander.supervision.worker import Worker


class NoWorkerTimeout:
    """Keeps the time of every lane that no worker serves.

    Args:
        lanes: By the key of their model.
        workers: Every place of the plan.
        wait_s: How long requests wait for a worker, not counting the time in which the last one
            finishes what it has.
        refuse: Called with a lane whose requests have waited for too long, and what to say to them.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        workers: Sequence[Worker],
        *,
        wait_s: float,
        refuse: Callable[[Lane, IskanderError], None],
    ) -> None:
        self._lanes = lanes
        self._workers = workers
        self._wait_s = wait_s
        self._refuse = refuse
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def look(self) -> None:
        """Begin or end the time of each lane, as the workers are now."""
        awaited = {w.place.pool for w in self._workers if w.is_awaited}
        leaving = {w.place.pool for w in self._workers if w.state is State.LEAVING}
        for key in self._timers.keys() - self._lanes.keys():
            self._timers.pop(key).cancel()
        for key, lane in self._lanes.items():
            lane.is_awaiting = lane.model.pool in awaited
            if lane.workers or lane.model.pool in leaving:
                if key in self._timers:
                    self._timers.pop(key).cancel()
            elif key not in self._timers:
                self._timers[key] = asyncio.get_running_loop().call_later(
                    self._wait_s, self._give_up, key
                )

    def close(self) -> None:
        """Keep no time any more."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _give_up(self, key: int) -> None:
        del self._timers[key]
        lane = self._lanes.get(key)
        if lane is None:
            return
        for worker in lane.pool_of(self._workers):
            worker.is_awaited = False
        lane.is_awaiting = False
        error = NotReady(f"model `{lane.title}` lost its workers", retry_after_ms=1000)
        self._refuse(lane, error)
