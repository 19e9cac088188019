"""Worker recycling after `workers.recycle_batches` or above `workers.recycle_rss_bytes`.

One worker is replaced at a time: a replacement that does not start blocks further recycling, so
serving workers stay. A worker that loads a model is recycled after the load.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iskander.config.schema import WorkersConfig
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import workers as log
from iskander.foundation.measurement.process_usage import resident_bytes
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import NEVER, Worker

PERIOD_S = 1.0
"""Interval of memory checks; a check costs 10 us for each worker."""
SERVICE_MIN_NS = 10 * NS_PER_S
"""Service time of a worker before its memory is checked."""


@dataclass(eq=False, repr=False)
class Recycling:
    """Selects workers to recycle and calls `on_due` with each; a limit of 0 means no limit."""

    workers: Sequence[Worker]
    config: WorkersConfig
    on_due: Callable[[Worker], None]

    def __post_init__(self) -> None:
        self._batches_max = self.config.recycle_batches
        self._rss_bytes_max = self.config.recycle_rss_bytes
        self._is_closed = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the periodic check if a limit is set."""
        if self._batches_max or self._rss_bytes_max:
            self._tick()

    def configure(self, config: WorkersConfig) -> None:
        """Apply the limits, to running processes too."""
        self._batches_max = config.recycle_batches
        self._rss_bytes_max = config.recycle_rss_bytes
        for worker in self.workers:
            worker.recycle_at = self._due_at(worker)
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self.start()

    def close(self) -> None:
        """Stop recycling."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def on_open(self, worker: Worker) -> None:
        """Start to count the batches of a new process."""
        worker.is_recycling = False
        worker.opened_ns = now_ns()
        worker.opened_batches = worker.batches
        worker.recycle_at = self._due_at(worker)

    def check(self, worker: Worker) -> None:
        """Recycle a worker above a limit, unless another one is being recycled."""
        if self._is_closed or worker.state is not State.READY or worker.loading_key is not None:
            return
        if any(other.is_recycling for other in self.workers):
            return
        if worker.batches >= worker.recycle_at:
            count = worker.batches - worker.opened_batches
            reason = f"{count} batches, limit {self._batches_max} (`workers.recycle_batches`)"
        elif self._rss_bytes_max and now_ns() - worker.opened_ns >= SERVICE_MIN_NS:
            used = resident_bytes(worker.pid)
            if used <= self._rss_bytes_max:
                return
            reason = f"{used} bytes, limit {self._rss_bytes_max} (`workers.recycle_rss_bytes`)"
        else:
            return
        worker.is_recycling = True
        log.worker_recycled(worker=worker.index, reason=reason)
        self.on_due(worker)

    def _due_at(self, worker: Worker) -> int:
        return worker.opened_batches + self._batches_max if self._batches_max else NEVER

    def _tick(self) -> None:
        # Oldest process first, so that each is recycled in turn.
        for worker in sorted(self.workers, key=lambda worker: worker.opened_ns):
            self.check(worker)
        self._timer = asyncio.get_running_loop().call_later(PERIOD_S, self._tick)
