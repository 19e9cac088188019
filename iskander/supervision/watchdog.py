"""Detection of workers that hang: no heartbeat while they have batches.

The limit is `workers.hang_s`. Where enough run times of a model are known, it is a multiple of the
slowest run of a batch like the running one, at least `LEAST_NS`. A worker that loads a model beside
its batches has `hang_s`, since a load may hold its interpreter.

The workers are checked when a limit may have passed, and not before: a worker that has nothing now
cannot reach the least limit earlier than that limit from now. So an idle gateway checks every 2 s,
and a hang is seen within a millisecond of its limit.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.supervision.lifecycle import State
from iskander.supervision.worker import Worker

LATE_NS = NS_PER_S
"""A look so late says that this process did not run itself, such as in a frozen container; then
its workers did not either, and are given their time anew."""
TURN_MIN_NS = NS_PER_MS
LEAST_NS = 2 * NS_PER_S
"""The shortest limit: a busy machine may keep a process waiting for as long."""

_SERVING = (State.READY, State.LEAVING)


class Watchdog:
    """Looks at the beats of workers that have batches.

    Args:
        workers: Every place of the plan.
        hang_ns: How long a silence may be.
        factor: The limit in multiples of the slowest run; 0: always `hang_ns`.
        on_hung: Called once for each process, with the length of its silence.
        is_shared: The workers have batches of others too, and beat for all: those that serve are
            looked at whatever this gateway has sent them.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        hang_ns: int,
        on_hung: Callable[[Worker, int], None],
        *,
        factor: float = 0.0,
        is_shared: bool = False,
    ) -> None:
        self._is_shared = is_shared
        self._factor = factor
        self._workers = workers
        self._hang_ns = hang_ns
        self._on_hung = on_hung
        self._since_ns = now_ns()
        self._due_ns = self._since_ns
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look."""
        self._due_ns = now_ns()
        self._turn()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self, at_ns: int) -> int:
        """Tell of every worker that is silent for too long; when to look again."""
        least_ns = min(LEAST_NS, self._hang_ns) if self._factor else self._hang_ns
        next_ns = at_ns + least_ns
        for worker in self._workers:
            is_looked_at = worker.in_flight or (self._is_shared and worker.state in _SERVING)
            if worker.is_hung or not is_looked_at:
                continue
            flights = iter(worker.in_flight.values())
            oldest_ns = next((flight.sent_ns for flight in flights), 0)
            beat = worker.last_beat()
            since_ns = max(beat.at_ns, oldest_ns, self._since_ns)
            limit_ns = self._limit_ns(worker, beat.batch_id)
            if at_ns - since_ns >= limit_ns:
                worker.is_hung = True
                self._on_hung(worker, at_ns - since_ns)
            else:
                next_ns = min(next_ns, since_ns + limit_ns)
        return next_ns

    def _limit_ns(self, worker: Worker, running_id: int) -> int:
        """How long a worker may be silent, by the batch that it runs or is to run next."""
        if not self._factor or not worker.in_flight or worker.asked is not None:
            return self._hang_ns
        running = worker.in_flight.get(running_id)
        if running is None:
            running = next(iter(worker.in_flight.values()))
        slowest_ns = running.lane.cost_of(worker).slowest_ns(running.run_rows)
        if not slowest_ns:
            return self._hang_ns
        return min(max(int(self._factor * slowest_ns), LEAST_NS), self._hang_ns)

    def _turn(self) -> None:
        at_ns = now_ns()
        if at_ns - self._due_ns > LATE_NS:
            self._since_ns = at_ns
        self._due_ns = max(self.look(at_ns), at_ns + TURN_MIN_NS)
        self._timer = asyncio.get_running_loop().call_later(
            (self._due_ns - now_ns()) / NS_PER_S, self._turn
        )
