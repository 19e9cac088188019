"""Detection of workers that hang: no heartbeat while they have batches.

The limit is `workers.hang_s`. With enough run times of a model it is a multiple of the slowest run
of a similar batch, at least `LIMIT_MIN_NS`. While a worker also loads a model, its
limit is `hang_s`, since a load may block its interpreter.

The next check runs when the first limit can expire. Without batches that is the shortest limit from
now, so an idle gateway checks every 2 s. A hang is detected within a millisecond of its limit.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.worker import Worker

LATE_NS = NS_PER_S
"""A check this late means a frozen container: the workers did not run either, so their limits
restart."""
PERIOD_MIN_NS = NS_PER_MS
LIMIT_MIN_NS = 2 * NS_PER_S
"""The shortest limit: a busy machine may delay a process for as long."""

_SERVING = (State.READY, State.LEAVING)


@dataclass(eq=False, repr=False)
class Watchdog:
    """Checks the heartbeats of workers that have batches.

    Attributes:
        on_hung: Called once for each process, with the time since its last heartbeat or batch.
        factor: The limit in multiples of the slowest run; 0: always `hang_ns`.
        is_shared: Other gateway processes send batches too, so every serving worker is checked.
    """

    workers: Sequence[Worker]
    hang_ns: int
    on_hung: Callable[[Worker, int], None]
    factor: float = 0.0
    is_shared: bool = False

    def __post_init__(self) -> None:
        self._since_ns = self._due_ns = now_ns()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the checks."""
        self._due_ns = now_ns()
        self._tick()

    def configure(self, hang_ns: int, factor: float) -> None:
        """Apply the limits, to running batches too."""
        self.hang_ns, self.factor = hang_ns, factor
        if self._timer is not None:
            self._timer.cancel()
            self.start()

    def close(self) -> None:
        """Stop the checks."""
        if self._timer is not None:
            self._timer.cancel()

    def check(self, at_ns: int) -> int:
        """Report every worker above its limit; return the time of the next check."""
        next_ns = at_ns + (min(LIMIT_MIN_NS, self.hang_ns) if self.factor else self.hang_ns)
        for worker in self.workers:
            is_checked = worker.in_flight or (self.is_shared and worker.state in _SERVING)
            if worker.is_hung or not is_checked:
                continue
            oldest_ns = next((batch.sent_ns for batch in worker.in_flight.values()), 0)
            beat = worker.last_beat()
            since_ns = max(beat.at_ns, oldest_ns, self._since_ns)
            limit_ns = self._limit_ns(worker, beat.batch_id)
            if at_ns - since_ns >= limit_ns:
                worker.is_hung = True
                self.on_hung(worker, at_ns - since_ns)
            else:
                next_ns = min(next_ns, since_ns + limit_ns)
        return next_ns

    def _limit_ns(self, worker: Worker, running_id: int) -> int:
        """Return a worker's limit, by the batch that it runs or is to run next."""
        if not self.factor or not worker.in_flight or worker.loading_key is not None:
            return self.hang_ns
        batch = worker.in_flight.get(running_id) or next(iter(worker.in_flight.values()))
        slowest_ns = batch.lane.cost_of(worker).slowest_ns(batch.run_rows)
        if not slowest_ns:
            return self.hang_ns
        return min(max(int(self.factor * slowest_ns), LIMIT_MIN_NS), self.hang_ns)

    def _tick(self) -> None:
        at_ns = now_ns()
        if at_ns - self._due_ns > LATE_NS:
            self._since_ns = at_ns
        self._due_ns = max(self.check(at_ns), at_ns + PERIOD_MIN_NS)
        delay_s = (self._due_ns - now_ns()) / NS_PER_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)
