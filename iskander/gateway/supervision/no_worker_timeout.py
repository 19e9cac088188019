"""Timeout of requests in a lane without workers.

A lane accepts new requests while a replacement is pending, and keeps its queued requests after the
loss of its workers. Both end after `workers.start_s`.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from iskander.errors import IskanderError, NotReady
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import Worker


@dataclass(eq=False, repr=False)
class NoWorkerTimeout:
    """One timer of `wait_s` for each lane without workers.

    It starts when the last worker is gone; at its end, `reject_queued` rejects queued requests.
    """

    lanes: Mapping[int, Lane]
    workers: Sequence[Worker]
    wait_s: float
    reject_queued: Callable[[Lane, IskanderError], None]
    _timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict, init=False)

    def update(self) -> None:
        """Update each lane's timer and `is_awaiting_worker` from worker states."""
        replacing = [w for w in self.workers if w.is_replacement_pending]
        leaving = [w for w in self.workers if w.state is State.LEAVING]
        for key in self._timers.keys() - self.lanes.keys():
            self._timers.pop(key).cancel()
        for key, lane in self.lanes.items():
            lane.is_awaiting_worker = any(map(lane.is_for, replacing))
            if lane.workers or any(map(lane.is_for, leaving)):
                if key in self._timers:
                    self._timers.pop(key).cancel()
            elif key not in self._timers:
                loop = asyncio.get_running_loop()
                self._timers[key] = loop.call_later(self.wait_s, self._on_timeout, key)

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _on_timeout(self, key: int) -> None:
        del self._timers[key]
        lane = self.lanes.get(key)
        if lane is not None:
            for worker in lane.pool_workers(self.workers):
                worker.is_replacement_pending = False
            lane.is_awaiting_worker = False
            text = f"model `{lane.title}` had no worker for {self.wait_s:g} s (`workers.start_s`)"
            error = NotReady(text, retry_after_ms=1000)
            self.reject_queued(lane, error)
