"""How requests end: with results, with an error, or forsaken; or not yet, and they wait again.

A caller is told once. A request's memory goes when no worker reads it any more, maybe later.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from typing import Final

from iskander.clock import now_ns
from iskander.errors import IskanderError
from iskander.scheduling.admission import MISSED
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.request import Request

log: Final = logging.getLogger("iskander.dispatch")


class RequestCompletion:
    """Ends requests.

    Args:
        intake: Owner of their leases.
    """

    def __init__(self, intake: InputArena) -> None:
        self._intake = intake

    def complete(self, request: Request, results: bytes | memoryview, run_ns: int) -> None:
        """All rows of a request are computed: hand out its results."""
        lane = request.lane
        request.run_ns = run_ns
        lane.on_completed(request, run_ns, now_ns())
        try:
            request.caller.deliver(request, results)
        except Exception:
            # One caller's results must not keep those of the others in the same wake-up.
            log.exception("results of batch for %s could not be delivered", lane.title)
            _tell(request, IskanderError("the server failed to take the results"))
        self.forsake(request)

    def settle(self, request: Request, error: IskanderError | None) -> None:
        """A request's rows came back without results: fail it, or let it wait again."""
        if request.is_over:
            self.release(request)
        elif error is None:
            request.lane.counts["retried"] += 1
            request.lane.put_back(request, now_ns())
        else:
            if request.is_waiting:
                request.lane.queue.remove(request)
            self.refuse(request, error, "failed")

    def refuse(self, request: Request, error: IskanderError, how: str = "refused") -> None:
        """Answer a request that is not in the queue any more with an error."""
        request.lane.counts[f"{how}.{error.code}"] += 1
        if error.code in MISSED:
            request.lane.count_missed(request)
            if error.retryable and error.retry_after_ms is None:
                error.retry_after_ms = request.lane.retry_after_ms(now_ns())
        self.forsake(request)
        _tell(request, error)

    def forsake(self, request: Request) -> None:
        """Nobody waits for a request any more: it was answered, or its caller has gone."""
        request.is_over = True
        request.results = None
        request.todo = []
        request.lane.retire(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Give a request's memory back, unless a worker still reads it."""
        if not request.running and request.lease is not None:
            self._intake.give_back(request)


def _tell(request: Request, error: IskanderError) -> None:
    """Tell a caller; what it fails at itself is kept from the others."""
    try:
        request.caller.fail(request, error)
    except Exception:
        log.exception("an error for %s could not be delivered", request.lane.title)
