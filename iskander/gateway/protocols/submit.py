"""Submission of single requests, for protocols with one response for each call.

Flight streams use `flight/exchange.py`, with a window of batches and no task for each.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Final

from iskander.config.schema import LimitsConfig
from iskander.errors import INTERNAL, Draining, IskanderError, Overloaded, detach
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.auth.shares import Shares, may_take
from iskander.gateway.protocols.tensors import RequestTensors
from iskander.gateway.protocols.traced_call import TracedCall
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import NEVER_NS, NO_TERMS, Caller, Request, Terms
from iskander.gateway.scheduling.tracing import Tracer

RETRY_MS: Final = 1000


class OpenCall:
    """An open call that counts against `limits.streams`; also a context manager.

    Attributes:
        idle_since: Start of the time without progress of a call that may be taken back.
        end: Ends such a call.
    """

    __slots__ = ("_calls", "caller", "end", "idle_since")

    def __init__(self, calls: OpenCalls, drain: Callable[[], None], caller: Hashable) -> None:
        self._calls = calls
        self.caller = caller
        self.idle_since: Callable[[], int] | None = None
        self.end: Callable[[IskanderError], None] | None = None
        calls.add(self, drain)

    def lend(self, idle_since: Callable[[], int], end: Callable[[IskanderError], None]) -> None:
        """Let the call be ended while it makes no progress and others need its place."""
        self.idle_since, self.end = idle_since, end
        self._calls.lent.add(self.caller, self)

    def close(self) -> None:
        """Close the call; idempotent."""
        self._calls.remove(self)

    def __enter__(self) -> OpenCall:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OpenCalls:
    """The open calls of all callers.

    Attributes:
        drains: Calls with their drain callbacks.
        lent: Calls that are taken back, while they make no progress, for callers with fewer.
    """

    def __init__(self) -> None:
        self.drains: dict[OpenCall, Callable[[], None]] = {}
        self.lent: Shares[OpenCall] = Shares(_idle_since, self._take_back)
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self.drains)

    def add(self, call: OpenCall, drain: Callable[[], None]) -> None:
        """Add a new call."""
        self.drains[call] = drain
        self._counts[call.caller] = self._counts.get(call.caller, 0) + 1

    def remove(self, call: OpenCall) -> None:
        """Remove a call. Idempotent."""
        if self.drains.pop(call, None) is None:
            return
        left = self._counts[call.caller] - 1
        if left:
            self._counts[call.caller] = left
        else:
            del self._counts[call.caller]
        if call.end is not None:
            self.lent.remove(call)

    def require_room(self, caller: Hashable, limit: int) -> None:
        """Raise `Overloaded` if a caller may not open a call."""
        used = len(self.drains)
        own = 0 if caller is None else self._counts.get(caller, 0)
        if may_take(limit, used, own):
            return
        if used <= limit and self.lent.take_back(now_ns(), above=own):
            return
        if used >= limit:
            message = f"too many open requests: {used}, limit {limit} (`limits.streams`)"
        else:
            message = "too many open requests of this caller on a nearly full server: "
            message += f"{own} of {used}, limit {limit} (`limits.streams`)"
        raise Overloaded(message, retry_after_ms=RETRY_MS)

    def _take_back(self, call: OpenCall) -> None:
        self.remove(call)
        if call.end is not None:
            call.end(given_way_error("call"))


def given_way_error(what: str) -> Overloaded:
    """The error of a call that was taken back."""
    return Overloaded(
        f"the {what} made no progress, and its place was given to another caller: the limit "
        "(`limits.streams`) was reached",
        retry_after_ms=RETRY_MS,
    )


def _idle_since(call: OpenCall) -> int:
    return 0 if call.idle_since is None else call.idle_since()


class RequestSubmitter:
    """Admits requests and returns results, for all protocols without streams of batches."""

    def __init__(self, entry: Entry, dispatcher: Dispatcher, limits: LimitsConfig) -> None:
        self._entry = entry
        self._dispatcher = dispatcher
        self.limits = limits
        self.is_draining = False  # New requests are rejected.
        self.calls = OpenCalls()
        # Requests waiting for arena space; bounded by the open calls, each with its own limit.
        self._entering: dict[Request, asyncio.Task[None]] = {}

    @property
    def tracer(self) -> Tracer | None:
        """Recorder of traces; None if tracing is off."""
        return self._dispatcher.tracer

    @property
    def uses_contexts(self) -> bool:
        """Whether the trace contexts of callers are read."""
        return self._dispatcher.uses_contexts

    def drain(self) -> None:
        """Reject new requests; admitted ones are still answered."""
        self.is_draining = True
        for drain in list(self.calls.drains.values()):
            drain()

    def open_call(
        self, drain: Callable[[], None] = lambda: None, caller: Hashable = None
    ) -> OpenCall:
        """Open a call; `drain` is called when the server stops, `caller` identifies the client.

        Raises `Draining`, or `Overloaded` at the limit of the caller or of the server.
        """
        self.require_open(caller)
        return OpenCall(self.calls, drain, caller)

    def require_open(self, caller: Hashable) -> None:
        """Check, before a request's body is read, that a call can be opened.

        Raises as `open_call`.
        """
        self.require_running()
        self.calls.require_room(caller, self.limits.streams)

    async def infer(
        self,
        lane: Lane,
        offered: RequestTensors,
        *,
        terms: Terms = NO_TERMS,
        call_deadline_ns: int = NEVER_NS,
        traced: TracedCall | None = None,
    ) -> bytes | memoryview:
        """Submit a request and return its results, in the layout of the contract's outputs.

        Cancelling the task withdraws the request. Raises `IskanderError` if it fails. Without rows
        the results are empty.
        """
        if not offered.rows:
            self.require_running()
            lane.require_rows_optional()
            return b""
        caller = _Caller()
        try:
            request = self.submit(
                lane,
                offered,
                caller,
                terms=terms,
                call_deadline_ns=call_deadline_ns,
                traced=traced,
            )
            try:
                return await caller.results
            finally:
                self.withdraw(request)
        except IskanderError as error:
            detach(error)
            raise

    def submit(
        self,
        lane: Lane,
        offered: RequestTensors,
        caller: Caller,
        *,
        terms: Terms = NO_TERMS,
        call_deadline_ns: int = NEVER_NS,
        traced: TracedCall | None = None,
    ) -> Request:
        """Submit a request; `caller` receives the results or the error.

        An immediate rejection raises `IskanderError`, without a call of `caller`. A rejection
        during the wait for arena space calls `caller.fail`. The request is that of the call
        `traced`, if there is one.
        """
        self.require_running()
        request = Request(
            lane,
            caller,
            offered.rows,
            offered.tensors,
            terms=terms,
            arrived_ns=now_ns(),
            call_deadline_ns=call_deadline_ns,
            bucket=offered.bucket,
        )
        if traced is not None:
            traced.request = request
        if not self._entry.enter(request):
            entering = asyncio.get_running_loop().create_task(self._enter(request))
            self._entering[request] = entering
            # Not in the task: a task that is cancelled before its first step runs no code.
            entering.add_done_callback(lambda _: self._entering.pop(request))
        return request

    def withdraw(self, request: Request) -> None:
        """Withdraw a request whose results are no longer needed."""
        entering = self._entering.get(request)
        if entering is not None:
            entering.cancel()
        self._dispatcher.withdraw(request)

    async def _enter(self, request: Request) -> None:
        """Queue a request when the arena has space for it."""
        try:
            await self._entry.enter_later(request)
        except IskanderError as error:
            request.caller.fail(request, error)
        except Exception as failure:
            log.admission_failed(model=request.lane.title, rows=request.rows, error=failure)
            request.caller.fail(request, IskanderError(INTERNAL))

    def require_running(self) -> None:
        """Raise `Draining` if the server is stopping."""
        if self.is_draining:
            raise Draining("the server is stopping; retry on another server", retry_after_ms=0)


class _Caller:
    """Caller of one request; its future receives the results or the error."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.results: asyncio.Future[bytes | memoryview] = loop.create_future()

    def deliver(self, _: Request, results: bytes | memoryview) -> None:
        if not self.results.done():
            self.results.set_result(results)

    def fail(self, _: Request, error: IskanderError) -> None:
        if not self.results.done():
            self.results.set_exception(error)
