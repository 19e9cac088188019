"""One DoExchange stream: batches in, results out, in order.

Its reader and its writer are two tasks, so that batches are read while results are written: a
bounded window of batches is in flight, results go out in the order in which the batches came, and
a client that stops reading stops only its own reader.

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from iskander.clock import now_ns
from iskander.config import LimitsConfig
from iskander.errors import Draining, IskanderError, MalformedInput
from iskander.gateway.dispatch import Dispatcher
from iskander.gateway.frontends.flight_codec import Arrived, StreamCodec
from iskander.gateway.frontends.flight_data import FlightData, read_flight_data, schema_frame
from iskander.gateway.frontends.flight_plan import Plan
from iskander.gateway.frontends.flight_terms import StreamTerms
from iskander.gateway.intake import Intake
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.lanes.request import Request

log = logging.getLogger("iskander.flight")

OPEN_S = 30.0
"""A stream that has not said what it is by then gives its place to another."""


class _Pending(Request):
    """A batch of a stream, from admission until its response is written.

    Attributes:
        taken: The results, copied out of shared memory; None until they are there.
        error: Why there will be none.
        held_bytes: What it keeps of private memory at most: its body, expanded, and its results.
    """

    __slots__ = ("arrived", "error", "held_bytes", "taken")

    def __init__(
        self, lane: Lane, caller: Exchange, arrived: Arrived, raw_bytes: int, terms: StreamTerms
    ) -> None:
        super().__init__(
            lane,
            caller,
            arrived.rows,
            [arrived.body[start:stop] for start, stop in arrived.tensors],
            terms=terms.of(arrived.app_metadata),
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
        )
        self.arrived = arrived
        self.taken: Any = None
        self.error: IskanderError | None = None
        output_bytes = lane.layout(arrived.rows).output_bytes if arrived.rows else 0
        self.held_bytes = max(raw_bytes, len(arrived.body)) + output_bytes


class _Refused:
    """Stands in the window for a batch that was not taken."""

    __slots__ = ("error", "held_bytes", "taken")

    def __init__(self, error: IskanderError) -> None:
        self.error = error
        self.taken = None
        self.held_bytes = 0


class _Wakeup:
    """Lets one task wait until another says `set`, which is remembered; a light asyncio.Event."""

    __slots__ = ("_is_set", "_loop", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self) -> None:
        if not self._is_set:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._is_set = False


class Exchange:
    """One DoExchange stream.

    Args:
        context: The call.
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        limits: Of the server.
        find: The lane that a descriptor's bytes mean.
        plan: The plan for a lane and a schema's header.
    """

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        *,
        intake: Intake,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        find: Callable[[bytes], Lane],
        plan: Callable[[Lane, bytes], Plan],
    ) -> None:
        self._context = context
        self._intake = intake
        self._dispatcher = dispatcher
        self._limits = limits
        self._find = find
        self._plan = plan
        self._terms = StreamTerms(context.invocation_metadata() or (), context.time_remaining())
        self._codec: StreamCodec | None = None
        self._greeting: bytes | None = None
        self._window: deque[_Pending | _Refused] = deque()
        self._window_bytes = 0
        self._is_ended = False
        self._end_error: IskanderError | None = None
        self._to_write = _Wakeup()
        self._has_room = _Wakeup()
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve the stream until its end.

        Raises:
            IskanderError: What ended it, after all results before that were written.
        """
        self._reader = asyncio.create_task(self._read())
        try:
            await self._write()
        finally:
            self._reader.cancel()
            for pending in self._window:
                if isinstance(pending, _Pending):
                    self._dispatcher.withdraw(pending)

    def drain(self) -> None:
        """Read no more; what was accepted is still answered, then the stream ends."""
        if self._reader is not None and not self._is_ended:
            self._reader.cancel()
            self._end(
                Draining("the server is stopping; send the rest to another", retry_after_ms=0)
            )

    def deliver(self, request: Request, output: memoryview) -> None:
        """Take the results of one batch out of their lease."""
        # Step 9
        assert isinstance(request, _Pending) and self._codec is not None
        request.taken = self._codec.take(request.arrived, output)
        self._to_write.set()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Take the failure of one batch, to be told when its turn comes."""
        assert isinstance(request, _Pending)
        request.error = error
        self._to_write.set()

    async def _read(self) -> None:
        try:
            try:
                async with asyncio.timeout(OPEN_S):
                    lane = await self._open()
            except TimeoutError:
                raise MalformedInput(f"no schema came within {OPEN_S:g} s") from None
            while True:
                raw = await self._context.read()
                if raw is grpc.aio.EOF:
                    return self._end(None)
                # Step 1
                data = read_flight_data(raw)
                if not data.header:
                    raise MalformedInput("a message of the stream has no record batch")
                await self._take(lane, data, len(raw))
        except IskanderError as error:
            self._end(error)
        except Exception:
            log.exception("a stream's reader failed")
            self._end(IskanderError("the server failed to read the stream"))

    async def _open(self) -> Lane:
        """Read up to the schema: which model, and what a batch of this stream means to it."""
        lane: Lane | None = None
        while True:
            raw = await self._context.read()
            if raw is grpc.aio.EOF:
                raise MalformedInput("the stream ended before its schema")
            data = read_flight_data(raw)
            if data.descriptor is not None and lane is None:
                lane = self._find(bytes(data.descriptor))
            if lane is None:
                raise MalformedInput("the stream's first message has no descriptor")
            if data.header:
                break
        lane.require_worker()
        plan = self._plan(lane, bytes(data.header))
        self._codec = StreamCodec(plan, self._limits)
        self._greeting = schema_frame(plan.response_header)
        self._to_write.set()
        return lane

    async def _take(self, lane: Lane, data: FlightData, raw_bytes: int) -> None:
        """Take one message of the stream; where errors are in-band, a refusal takes its place."""
        assert self._codec is not None
        try:
            arrived = self._codec.decode(data.header, data.body, data.app_metadata)
            if arrived is not None:
                await self._accept(_Pending(lane, self, arrived, raw_bytes, self._terms))
        except IskanderError as error:
            if not self._terms.is_in_band:
                raise
            await self._room(0)
            self._window.append(_Refused(error))
            self._to_write.set()

    async def _room(self, held_bytes: int) -> None:
        while self._window and (
            len(self._window) >= self._limits.window_batches
            or self._window_bytes + held_bytes > self._limits.window_bytes
        ):
            await self._has_room.wait()

    async def _accept(self, pending: _Pending) -> None:
        await self._room(pending.held_bytes)
        if pending.rows == 0:
            assert self._codec is not None
            pending.taken = self._codec.take(pending.arrived, memoryview(b""))
        else:
            await self._intake.admit(pending)
        self._window.append(pending)
        self._window_bytes += pending.held_bytes
        if pending.rows:
            self._dispatcher.submit(pending)
        else:
            self._to_write.set()

    async def _write(self) -> None:
        window, write = self._window, self._context.write
        while True:
            if self._greeting is not None:
                greeting, self._greeting = self._greeting, None
                await write(greeting)
            while window and (window[0].taken is not None or window[0].error is not None):
                pending = window.popleft()
                self._window_bytes -= pending.held_bytes
                self._has_room.set()
                assert self._codec is not None
                if pending.error is None:
                    frames = self._codec.frames(pending.taken)
                elif self._terms.is_in_band:
                    frames = self._codec.error_frames(pending.error)
                else:
                    raise pending.error
                for frame in frames:
                    await write(frame)
            if self._is_ended and not window:
                if self._end_error is not None:
                    raise self._end_error
                return
            await self._to_write.wait()

    def _end(self, error: IskanderError | None) -> None:
        self._is_ended = True
        self._end_error = error
        self._to_write.set()
