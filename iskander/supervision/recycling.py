"""Which worker is replaced in order, and when: after so many batches, or above so much memory.

One at a time, until the next process is open in its place. One that does not come holds the others
where they are: workers that serve are not given up for ones that do not start. One that loads a
model comes to the end of that first.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import WorkersConfig
from iskander.measurement.process_usage import resident_bytes
from iskander.supervision.lifecycle import State
from iskander.supervision.worker import NEVER, Worker

log = logging.getLogger("iskander.supervisor")

TURN_S = 1.0
"""Memory is looked at so rarely; it takes 10 us for each worker."""
SERVICE_LEAST_NS = 10 * NS_PER_S
"""A worker that is above the limit when it has just come serves so long before it is replaced."""


class Recycling:
    """Decides who is due.

    Args:
        workers: Every place of the plan.
        config: With the limits; none are looked at where both are 0.
        on_due: Called with a worker to replace; it is marked already.
    """

    def __init__(
        self, workers: Sequence[Worker], config: WorkersConfig, on_due: Callable[[Worker], None]
    ) -> None:
        self._workers = workers
        self._batches = config.recycle_batches
        self._rss_bytes = config.recycle_rss_bytes
        self._on_due = on_due
        self._is_held = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look, where there is a limit."""
        if self._batches or self._rss_bytes:
            self._turn()

    def close(self) -> None:
        """Replace nobody in order any more."""
        self._is_held = True
        if self._timer is not None:
            self._timer.cancel()

    def opened(self, worker: Worker) -> None:
        """A process is open for work: its batches count from here."""
        worker.is_due = False
        worker.opened_ns = now_ns()
        worker.recycle_at = worker.batches + self._batches if self._batches else NEVER

    def look(self, worker: Worker) -> None:
        """Replace a worker that is due, unless another one is being replaced."""
        if self._is_held or worker.state is not State.READY or worker.asked is not None:
            return
        if any(other.is_due for other in self._workers):
            return
        if worker.batches >= worker.recycle_at:
            why = f"it has computed {worker.batches + self._batches - worker.recycle_at} batches"
        elif self._has_grown(worker):
            why = f"it has more than {self._rss_bytes} resident bytes"
        else:
            return
        worker.is_due = True
        log.info("worker %d is replaced in order: %s", worker.index, why)
        self._on_due(worker)

    def _has_grown(self, worker: Worker) -> bool:
        if not self._rss_bytes or now_ns() - worker.opened_ns < SERVICE_LEAST_NS:
            return False
        return resident_bytes(worker.pid) > self._rss_bytes

    def _turn(self) -> None:
        # The one that has served longest first, so that each has its turn.
        for worker in sorted(self._workers, key=lambda worker: worker.opened_ns):
            self.look(worker)
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self._turn)
