"""Completion of requests: results, an error, cancellation, or a retry.

Each caller is notified once. The memory of a request is released when no worker reads it any more,
which can be later.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.errors import IskanderError
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.admission import MISSED
from iskander.gateway.scheduling.request import Request


class RequestCompletion:
    """Completes requests and releases their leases in the input arena."""

    def __init__(self, arena: InputArena) -> None:
        self._arena = arena

    def complete(self, request: Request, results: bytes | memoryview, run_ns: int) -> None:
        """Deliver the results of a request whose rows are all computed."""
        lane = request.lane
        request.run_ns = run_ns
        lane.on_completed(request, run_ns, now_ns())
        try:
            request.caller.deliver(request, results)
        except Exception as error:
            # The other requests of the batch still get their results.
            log.result_delivery_failed(model=lane.title, error=error)
            _fail(request, IskanderError("internal error: delivering the results failed"))
        self.finish(request)

    def fail_or_retry(self, request: Request, error: IskanderError | None) -> None:
        """Fail a request whose rows came back without results; without an error, retry it.

        Nothing is retried during a quarantine, which a lost worker begins before this call.
        """
        lane = request.lane
        if request.is_over:
            self.release(request)
            return
        if error is None and lane.quarantine is not None:
            error = lane.quarantine_error()
        if error is None:
            lane.counts["retried"] += 1
            lane.put_back(request, now_ns())
        else:
            if request.is_waiting:
                lane.queue.remove(request)
            self.reject(request, error, "failed")

    def reject(self, request: Request, error: IskanderError, how: str = "refused") -> None:
        """Answer a request that is not queued any more with an error."""
        request.lane.count_rejected(request, error, how)
        if error.code in MISSED:
            request.lane.add_retry_hint(error, now_ns())
        self.finish(request)
        _fail(request, error)

    def finish(self, request: Request) -> None:
        """Remove a request that was answered or whose caller is gone, and release its lease."""
        request.is_over = True
        request.results = None
        request.todo = []
        request.lane.retire(request)
        self.release(request)

    def release(self, request: Request) -> None:
        """Release the lease of a request, unless a worker still reads it."""
        if not request.running and request.lease is not None:
            self._arena.give_back(request)


def _fail(request: Request, error: IskanderError) -> None:
    """Notify the caller; an exception that it raises is logged."""
    try:
        request.caller.fail(request, error)
    except Exception as failure:
        log.error_delivery_failed(model=request.lane.title, error=failure)
