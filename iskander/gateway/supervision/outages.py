"""Outages of remote servers: a model is not ready while its server cannot be reached.

After `FAILURES_MAX` batches in a row without a connection, the lane rejects its requests at once.
One of its workers checks the server each second; the first success ends the outage. Failed
batches of a remote model are no deaths of workers, so quarantine does not apply.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS
from iskander.foundation.logs import models as log
from iskander.gateway.scheduling.lanes.lane import RETRY_OUTAGE_MS, Lane
from iskander.gateway.scheduling.worker_slot import WorkerSlot
from iskander.interprocess.control.messages import Probe, Probed, ToWorker

FAILURES_MAX: Final = 5
PROBE_S: Final = RETRY_OUTAGE_MS * NS_PER_MS / 1e9


@dataclass(eq=False, repr=False)
class Outages:
    """Begins and ends outages of the lanes of this gateway process.

    Attributes:
        on_change: Called when readiness may have changed.
        send: Sends messages to a worker, or ends it.
    """

    lanes: Mapping[int, Lane]
    reject_queued: Callable[[Lane, IskanderError], None]
    on_change: Callable[[], None]
    send: Callable[[WorkerSlot, Sequence[ToWorker]], None]
    # For each lane: its timer, and the incarnation of the worker whose answer is awaited.
    _timers: dict[int, asyncio.TimerHandle] = field(default_factory=dict, init=False)
    _asked: dict[int, int] = field(default_factory=dict, init=False)

    def on_unreachable(self, lane: Lane, error: IskanderError) -> None:
        """Count a batch whose remote server could not be reached."""
        lane.unreachable += 1
        if lane.unreachable < FAILURES_MAX or lane.outage or lane.is_retired:
            return
        lane.outage = error.message
        log.model_unreachable(model=lane.title, reason=error.message)
        self.reject_queued(lane, lane.outage_error())
        self._schedule(lane.model.key)
        self.on_change()

    def on_probed(self, answer: Probed) -> None:
        """End the outage of a lane whose server is ready again, or update its reason."""
        self._asked.pop(answer.model, None)
        lane = self.lanes.get(answer.model)
        if lane is None or not lane.outage:
            return
        lane.outage = answer.reason
        if not answer.reason:
            lane.unreachable = 0
            timer = self._timers.pop(answer.model, None)
            if timer is not None:  # A retired lane has none.
                timer.cancel()
            log.model_reachable(model=lane.title)
            self.on_change()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _schedule(self, key: int) -> None:
        self._timers[key] = asyncio.get_running_loop().call_later(PROBE_S, self._probe, key)

    def _probe(self, key: int) -> None:
        """Ask one worker to check the server, unless an answer is awaited."""
        del self._timers[key]
        lane = self.lanes.get(key)
        if lane is None or lane.is_retired:
            self._asked.pop(key, None)
            return
        self._schedule(key)
        # A lost worker does not answer.
        if self._asked.get(key) in lane.workers:
            return
        worker = min(lane.workers.values(), key=lambda each: len(each.in_flight), default=None)
        if worker is not None and worker.channel is not None:
            self._asked[key] = worker.incarnation
            self.send(worker, [Probe(key)])
