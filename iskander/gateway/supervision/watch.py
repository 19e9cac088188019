"""When a worker that has batches has been silent for too long.

Looks exactly when a silence may have become too long, and not before: a worker that has nothing now
cannot be silent for `hang_s` earlier than in `hang_s` from now. So an idle gateway looks once in
that time, and a hang is seen within a millisecond of its limit.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.workers import Worker

LATE_NS = NS_PER_S
"""A look so late says that this process did not run itself, such as in a frozen container; then
its workers did not either, and are given their time anew."""
TURN_MIN_NS = NS_PER_MS


_SERVING = (State.READY, State.LEAVING)


class Watch:
    """Looks at the beats of workers that have batches.

    Args:
        workers: Every place of the plan.
        hang_ns: How long a silence may be.
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
        is_shared: bool = False,
    ) -> None:
        self._is_shared = is_shared
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
        next_ns = at_ns + self._hang_ns
        for worker in self._workers:
            is_looked_at = worker.in_flight or (self._is_shared and worker.state in _SERVING)
            if worker.is_hung or not is_looked_at:
                continue
            flights = iter(worker.in_flight.values())
            oldest_ns = next((flight.sent_ns for flight in flights), 0)
            since_ns = max(worker.last_beat().at_ns, oldest_ns, self._since_ns)
            if at_ns - since_ns >= self._hang_ns:
                worker.is_hung = True
                self._on_hung(worker, at_ns - since_ns)
            else:
                next_ns = min(next_ns, since_ns + self._hang_ns)
        return next_ns

    def _turn(self) -> None:
        at_ns = now_ns()
        if at_ns - self._due_ns > LATE_NS:
            self._since_ns = at_ns
        self._due_ns = max(self.look(at_ns), at_ns + TURN_MIN_NS)
        self._timer = asyncio.get_running_loop().call_later(
            (self._due_ns - now_ns()) / NS_PER_S, self._turn
        )
