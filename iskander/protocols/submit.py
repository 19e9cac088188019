"""One request, one answer: for protocols whose calls stand alone.

A Flight stream has its own way (`flight_exchange`), with a window of batches and no task for each.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from iskander.clock import now_ns
from iskander.config.schema import LimitsConfig
from iskander.errors import Draining, IskanderError, Overloaded, detach
from iskander.protocols.tensors import RequestTensors
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import NEVER_NS, NO_TERMS, Caller, Request, Terms

log: Final = logging.getLogger("iskander.asking")

SHARE: Final = 8
"""The last eighth of the places is for callers that hold less than an eighth of them: one that
opens calls and leaves them keeps nobody else out."""


class OpenCall:
    """A call that is held open: until it is closed, or while the block under it runs.

    Args:
        calls: All of them.
        drain: What tells it that the server stops.
        caller: Whose it is; None: not known.
    """

    __slots__ = ("_calls", "caller")

    def __init__(
        self, calls: dict[OpenCall, Callable[[], None]], drain: Callable[[], None], caller: object
    ) -> None:
        self._calls = calls
        self.caller = caller
        calls[self] = drain

    def close(self) -> None:
        """It is answered, or its client has gone; more than once is as good as once."""
        self._calls.pop(self, None)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.close()


class RequestSubmitter:
    """Takes requests and gives results, for every frontend that has no streams of its own.

    Args:
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        limits: Of the server; as many calls may be open as streams.

    Attributes:
        is_draining: Nothing is taken any more.
        calls: Those that are held open, and what tells each that the server stops.
    """

    def __init__(self, intake: InputArena, dispatcher: Dispatcher, limits: LimitsConfig) -> None:
        self._intake = intake
        self._dispatcher = dispatcher
        self.limits = limits
        self.is_draining = False
        self.calls: dict[OpenCall, Callable[[], None]] = {}
        # Those that wait for room; no more than calls may be open, each of which bounds its own.
        self._entering: dict[Request, asyncio.Task[None]] = {}

    def drain(self) -> None:
        """Take no more; what was accepted is still answered."""
        self.is_draining = True
        for drain in list(self.calls.values()):
            drain()

    def held(self, drain: Callable[[], None] = lambda: None, caller: object = None) -> OpenCall:
        """Hold a call open from its beginning until its answer is written.

        Args:
            drain: Called when the server stops; a call of many requests takes no more of them.
            caller: Whose it is, where one can hold many.

        Raises:
            Draining: The server is stopping.
            Overloaded: As many as may be are open, of this caller or of all.
        """
        count = len(self.calls)
        self._require_open(count)
        share = self.limits.streams // SHARE
        if count >= self.limits.streams - share and caller is not None:
            self._require_share(caller, share)
        return OpenCall(self.calls, drain, caller)

    def require_open(self) -> None:
        """Refuse a request before its bytes are looked at.

        Raises:
            Draining: The server is stopping.
            Overloaded: As many calls as may be are open.
        """
        self._require_open(len(self.calls))

    async def ask(
        self,
        lane: Lane,
        offered: RequestTensors,
        *,
        terms: Terms = NO_TERMS,
        call_deadline_ns: int = NEVER_NS,
    ) -> bytes | memoryview:
        """Have rows computed, for a call that is held: what it may ask at once is its own to bound.

        Cancelling the task that waits gives the request up.

        Returns:
            The results' body, in the layout of the contract's outputs.

        Raises:
            IskanderError: Why there will be none.
        """
        if not offered.rows:
            self._require_running()
            return b""
        caller = _Caller()
        try:
            request = self.begin(
                lane, offered, caller, terms=terms, call_deadline_ns=call_deadline_ns
            )
            try:
                return await caller.results
            finally:
                self.withdraw(request)
        except IskanderError as error:
            detach(error)
            raise

    def begin(
        self,
        lane: Lane,
        offered: RequestTensors,
        caller: Caller,
        *,
        terms: Terms = NO_TERMS,
        call_deadline_ns: int = NEVER_NS,
    ) -> Request:
        """The same for who does not wait: `caller` is told what came of it, or withdraws it.

        Raises:
            IskanderError: Why there will be no results; the caller is not told then.
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
        if self._intake.admit(request):
            self._dispatcher.submit(request)
        else:
            self._entering[request] = entering = asyncio.get_running_loop().create_task(
                self._enter(request)
            )
            # Not in the task itself: one that is cancelled before its first step never begins.
            entering.add_done_callback(lambda _: self._entering.pop(request))
        return request

    def withdraw(self, request: Request) -> None:
        """Nobody waits for a request any more."""
        entering = self._entering.get(request)
        if entering is not None:
            entering.cancel()
        self._dispatcher.withdraw(request)

    async def _enter(self, request: Request) -> None:
        """Queue a request once it is in the arena."""
        try:
            await self._intake.admit_later(request)
            self._dispatcher.submit(request)
        except IskanderError as error:
            request.caller.fail(request, error)
        except Exception:
            log.exception("%r could not be admitted", request)
            request.caller.fail(request, IskanderError("the server failed; its log says why"))

    def _require_share(self, caller: object, share: int) -> None:
        if share and sum(each.caller == caller for each in self.calls) >= share:
            raise Overloaded(
                f"nearly {self.limits.streams} requests are open, the limit, and {share} or more "
                "of them are this caller's",
                retry_after_ms=1000,
            )

    def _require_running(self) -> None:
        if self.is_draining:
            raise Draining("the server is stopping; send it to another", retry_after_ms=0)

    def _require_open(self, count: int) -> None:
        self._require_running()
        if count >= self.limits.streams:
            raise Overloaded(
                f"{self.limits.streams} requests are open, the limit", retry_after_ms=1000
            )


class _Caller:
    """Wakes the task that waits for one request."""

    def __init__(self) -> None:
        self.results: asyncio.Future[bytes | memoryview] = (
            asyncio.get_running_loop().create_future()
        )

    def deliver(self, _: Request, results: bytes | memoryview) -> None:
        """Give the results to who waits for them."""
        if not self.results.done():
            self.results.set_result(results)

    def fail(self, _: Request, error: IskanderError) -> None:
        """Raise the error where the results are waited for."""
        if not self.results.done():
            self.results.set_exception(error)
