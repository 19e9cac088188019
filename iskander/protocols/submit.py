"""Submission of single requests, for protocols with one response for each call.

Flight streams use `flight/exchange.py`, with a window of batches and no task for each.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from iskander.clock import now_ns
from iskander.config.schema import LimitsConfig
from iskander.errors import INTERNAL, Draining, IskanderError, Overloaded, detach
from iskander.logs import requests as log
from iskander.protocols.tensors import RequestTensors
from iskander.protocols.traced_call import TracedCall
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import NEVER_NS, NO_TERMS, Caller, Request, Terms
from iskander.scheduling.tracing import Tracer

SHARE: Final = 8
"""The last eighth of the calls is reserved for callers with less than an eighth of them."""


class OpenCall:
    """An open call that counts against `limits.streams`; also a context manager."""

    __slots__ = ("_calls", "caller")

    def __init__(
        self, calls: dict[OpenCall, Callable[[], None]], drain: Callable[[], None], caller: object
    ) -> None:
        self._calls = calls
        self.caller = caller
        calls[self] = drain

    def close(self) -> None:
        """Close the call; idempotent."""
        self._calls.pop(self, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()


class RequestSubmitter:
    """Admits requests and returns results, for all protocols without streams of batches."""

    def __init__(
        self, input_arena: InputArena, dispatcher: Dispatcher, limits: LimitsConfig
    ) -> None:
        self._input_arena = input_arena
        self._dispatcher = dispatcher
        self.limits = limits
        self.is_draining = False  # New requests are rejected.
        self.calls: dict[OpenCall, Callable[[], None]] = {}  # With their drain callbacks.
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
        for drain in list(self.calls.values()):
            drain()

    def open_call(
        self, drain: Callable[[], None] = lambda: None, caller: object = None
    ) -> OpenCall:
        """Open a call; `drain` is called when the server stops, `caller` identifies the client.

        Raises `Draining`, or `Overloaded` at the limit of the caller or of the server.
        """
        self.require_open()
        limit = self.limits.streams
        share = limit // SHARE
        if (
            share
            and caller is not None
            and len(self.calls) >= limit - share
            and sum(each.caller == caller for each in self.calls) >= share
        ):
            message = "too many open requests of this caller on a nearly full server: "
            message += f"limit {share} of {limit} (`limits.streams`)"
            raise Overloaded(message, retry_after_ms=1000)
        return OpenCall(self.calls, drain, caller)

    def require_open(self) -> None:
        """Check, before a request's body is read, that a call can be opened.

        Raises `Draining`, or `Overloaded` at the server's limit of open calls.
        """
        self._require_running()
        count, limit = len(self.calls), self.limits.streams
        if count >= limit:
            message = f"too many open requests: {count}, limit {limit} (`limits.streams`)"
            raise Overloaded(message, retry_after_ms=1000)

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
            self._require_running()
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
        self._require_running()
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
        if self._input_arena.admit(request):
            self._dispatcher.submit(request)
        else:
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
            await self._input_arena.admit_later(request)
            self._dispatcher.submit(request)
        except IskanderError as error:
            request.caller.fail(request, error)
        except Exception as failure:
            log.admission_failed(model=request.lane.title, rows=request.rows, error=failure)
            request.caller.fail(request, IskanderError(INTERNAL))

    def _require_running(self) -> None:
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
