"""HTTP/2 connections without sockets, on one event loop with a simulated clock."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from iskander.gateway.transport.http2 import call as call_module
from iskander.gateway.transport.http2 import call_receiver as call_input
from iskander.gateway.transport.http2 import connection, streams
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.status import RpcError, Status
from iskander.gateway.transport.limits import receive_budget
from iskander.gateway.transport.limits import turn_scheduler as turns

Result = TypeVar("Result")
LOOP: Final = asyncio.new_event_loop()
TICK_NS: Final = 20_000
"""Advance of the clock per reading, so turns end after a reproducible number of readings."""
MODULES_WITH_CLOCK: Final = (receive_budget, turns, call_module, call_input, connection, streams)


class Clock:
    """A clock that advances with each reading."""

    def __init__(self) -> None:
        self.now = 1 << 40

    def __call__(self) -> int:
        self.now += TICK_NS
        return self.now


def in_loop(function: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    """Run with a new clock; raises exceptions of the loop's callbacks."""

    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Result:
        failed: list[dict[str, Any]] = []
        LOOP.set_exception_handler(lambda _, context: failed.append(context))
        clock, originals = Clock(), [module.now_ns for module in MODULES_WITH_CLOCK]
        for module in MODULES_WITH_CLOCK:
            module.now_ns = clock
        try:
            result = await function(*args, **kwargs)
        finally:
            for module, original in zip(MODULES_WITH_CLOCK, originals, strict=True):
                module.now_ns = original
        for context in failed:
            raise context.get("exception") or AssertionError(context["message"])
        return result

    return run


class Recorder:
    """A handler that echoes messages and records each call; `/t/Early` ends before its input.

    Args:
        is_deferred: Reads and sends nothing before `finish`, so the arrival times of the input have
            no effect.

    Attributes:
        calls: All served calls.
        messages: Messages of each stream.
        statuses: Status of each stream with a response.
    """

    def __init__(self, *, is_deferred: bool = False) -> None:
        self._is_deferred = is_deferred
        self.calls: list[Call] = []
        self.messages: dict[int, list[bytes]] = {}
        self.statuses: dict[int, int] = {}

    def serve(self, call: Call) -> bool:
        """Serve a call."""
        self.calls.append(call)
        self.messages[call.stream_id] = []
        if not self._is_deferred:
            self._respond(call)
        return True

    def finish(self) -> None:
        """Respond to the deferred calls."""
        for call in self.calls:
            if self._is_deferred and not call.is_over:
                self._respond(call)

    def _respond(self, call: Call) -> None:
        if call.path == "/t/Early":
            self._end(call, Status.OK)
            return
        call.on_input = functools.partial(self._drain, call)
        self._drain(call)

    def _drain(self, call: Call) -> None:
        while not call.is_over and call.has_input:
            try:
                raw = call.receive()
            except RpcError as error:
                self._end(call, error.status, error.message)
                return
            if raw is None:
                self._end(call, Status.OK)
                return
            self.messages[call.stream_id].append(bytes(raw))
            call.send(bytes(raw))

    def _end(self, call: Call, status: Status, message: str = "") -> None:
        self.statuses[call.stream_id] = int(status)
        call.end(status, message)
        call.on_input = None  # A reference cycle would keep the memory of messages.
