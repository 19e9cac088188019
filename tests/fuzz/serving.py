"""HTTP/2 connections without sockets, on one event loop and a clock that moves by itself."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from iskander.transport import receive_budget
from iskander.transport import turn_scheduler as turns
from iskander.transport.http2 import call as call_module
from iskander.transport.http2 import call_receiver as call_input
from iskander.transport.http2 import connection, streams
from iskander.transport.http2.call import Call
from iskander.transport.http2.status import RpcError, Status

Result = TypeVar("Result")
LOOP: Final = asyncio.new_event_loop()
TICK_NS: Final = 20_000
"""Between two looks at the clock: a turn of the loop ends after some of them, each time alike."""
CLOCKED: Final = (receive_budget, turns, call_module, call_input, connection, streams)


class Clock:
    """The time, which moves when it is looked at."""

    def __init__(self) -> None:
        self.now = 1 << 40

    def __call__(self) -> int:
        self.now += TICK_NS
        return self.now


def in_loop(work: Callable[..., Awaitable[Result]]) -> Callable[..., Awaitable[Result]]:
    """Run with a clock of its own; an exception in a callback of the loop is raised."""

    @functools.wraps(work)
    async def run(*args: Any, **kwargs: Any) -> Result:
        failed: list[dict[str, Any]] = []
        LOOP.set_exception_handler(lambda _, context: failed.append(context))
        clock, before = Clock(), [module.now_ns for module in CLOCKED]
        for module in CLOCKED:
            module.now_ns = clock
        try:
            result = await work(*args, **kwargs)
        finally:
            for module, real in zip(CLOCKED, before, strict=True):
                module.now_ns = real
        for context in failed:
            raise context.get("exception") or AssertionError(context["message"])
        return result

    return run


class Recorder:
    """Answers calls at once, and keeps what came of each.

    A call of `/t/Early` is ended before its input; the others are echoed.

    Args:
        is_patient: Nothing is read or answered before `finish`, so that when the input is read
            changes nothing.

    Attributes:
        calls: All that were served.
        messages: Of each stream.
        statuses: Of each stream that was answered.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self._is_patient = is_patient
        self.calls: list[Call] = []
        self.messages: dict[int, list[bytes]] = {}
        self.statuses: dict[int, int] = {}

    def serve(self, call: Call) -> bool:
        """Take a call."""
        self.calls.append(call)
        self.messages[call.stream_id] = []
        if not self._is_patient:
            self._answer(call)
        return True

    def finish(self) -> None:
        """Answer the calls that wait."""
        for call in self.calls:
            if self._is_patient and not call.is_over:
                self._answer(call)

    def _answer(self, call: Call) -> None:
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
        call.on_input = None  # It is a cycle, which would keep the memory of messages.
