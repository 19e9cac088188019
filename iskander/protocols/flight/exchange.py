"""One DoExchange stream: batches in, results out, in order.

It has no task of its own for a batch. The connection calls `_read` when a message has come, lane
and dispatcher call `deliver` or `fail`, and `_write` sends what is next, as far as the client takes
it. A bounded window of batches is in flight; while it is full nothing is read, and so a client that
stops reading stops only itself.

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from iskander.clock import now_ns
from iskander.config.schema import LimitsConfig
from iskander.errors import Draining, IskanderError, MalformedInput, ModelMoved, detach
from iskander.memory.chunked_copy import WHOLE_BYTES
from iskander.memory.client_segment import ClientSegment
from iskander.protocols.flight.codec import LongMessage, ParsedBatch, StreamCodec
from iskander.protocols.flight.data import FlightData, read_flight_data, schema_frame
from iskander.protocols.flight.plan import Plan
from iskander.protocols.flight.shared_memory import SharedCodec
from iskander.protocols.flight.split import SplitBatch, split_batch
from iskander.protocols.stream_terms import StreamTerms
from iskander.repository.models import Models
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Caller, Request
from iskander.transport.http2.call import Call, Message
from iskander.transport.http2.status import RpcError


class StreamTarget:
    """Of one stream.

    Args:
        find: The lane that a descriptor's bytes mean, for a key of who asks.
        models: Whose revision changes when `find` may say something else.
        key: By which the version is chosen, where versions have shares.

    Attributes:
        lane: None before the descriptor.
    """

    __slots__ = ("_at", "_descriptor", "_find", "_key", "_models", "lane")

    def __init__(self, find: Callable[[bytes, str], Lane], models: Models, key: str) -> None:
        self._find = find
        self._models = models
        self._key = key
        self._descriptor: bytes | None = None
        self._at = -1
        self.lane: Lane | None = None

    @property
    def is_current(self) -> bool:
        """Whether nothing that is served has changed since it was found."""
        return self._at == self._models.revision

    def look(self, descriptor: bytes | None) -> None:
        """Find the lane of a stream that has no schema yet; of the first descriptor that came.

        Raises:
            IskanderError: The descriptor means nothing.
        """
        if self._descriptor is None:
            self._descriptor = descriptor
        if self._descriptor is not None and not self.is_current:
            self._at = self._models.revision
            self.lane = self._find(self._descriptor, self._key)

    def move(self) -> None:
        """Go on with what the descriptor means now, where that takes and returns the same.

        Raises:
            ModelMoved: It does not, and the lane that was asked until now takes no more.
            IskanderError: The descriptor means nothing any more.
        """
        lane, descriptor = self.lane, self._descriptor
        assert lane is not None and descriptor is not None
        self._at = self._models.revision
        try:
            found = self._find(descriptor, self._key)
            if found.contract is not None and found.contract != lane.contract:
                raise ModelMoved(
                    f"model `{found.title}` takes or returns something else than `{lane.title}` "
                    "did when the stream was opened: open another",
                    retry_after_ms=0,
                )
        except IskanderError:
            if not lane.is_served:
                raise
        else:
            if found.contract is not None:
                self.lane = found


class PendingBatch(Request):
    """A batch of a stream, from admission until its response is written.

    Attributes:
        taken: What the response is made of; None until the results are there.
        error: Why there will be none.
        held_bytes: What it keeps of private memory at most: its body, expanded, and its results.
    """

    __slots__ = ("arrived", "error", "held_bytes", "taken")

    def __init__(
        self, lane: Lane, caller: Caller, arrived: ParsedBatch, raw_bytes: int, terms: StreamTerms
    ) -> None:
        super().__init__(
            lane,
            caller,
            arrived.rows,
            arrived.portions[0].tensors
            if arrived.portions
            else [arrived.body[start:stop] for start, stop in arrived.tensors],
            terms=terms.of(arrived.app_metadata),
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
            bucket=arrived.portions[0].bucket if arrived.portions else 0,
        )
        self.arrived = arrived.without_inputs()
        self.taken: Any = None
        self.error: IskanderError | None = None
        self.held_bytes = max(raw_bytes, len(arrived.body)) + self.layout.output_bytes


class RejectedBatch:
    """Stands in the window for a batch that was not taken."""

    __slots__ = ("error", "held_bytes", "taken")

    def __init__(self, error: IskanderError) -> None:
        self.error = error
        self.taken = None
        self.held_bytes = 0


log: Final = logging.getLogger("iskander.flight")

OPEN_S: Final = 30.0
"""A stream that has not said what it is by then gives its place to another."""


class Exchange:
    """One DoExchange stream.

    Args:
        call: Of a client.
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        limits: Of the server.
        find: The lane that a descriptor's bytes mean, for a key of who asks.
        region: The memory that is lent to a client under a name.
        plan: The plan for a lane and a schema's header.
        models: Whose revision changes when `find` may say something else.

    Attributes:
        target: Where its batches go.
    """

    def __init__(
        self,
        call: Call,
        *,
        intake: InputArena,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        find: Callable[[bytes, str], Lane],
        region: Callable[[str], ClientSegment],
        plan: Callable[[Lane, bytes], Plan],
        models: Models,
    ) -> None:
        self._call = call
        self._intake = intake
        self._dispatcher = dispatcher
        self._limits = limits
        self._plan = plan
        self._region = region
        self._terms = StreamTerms(call.metadata, call.deadline_ns, call.source)
        self._codec: StreamCodec | None = None
        self.target = StreamTarget(find, models, self._terms.route_key)
        self._window: deque[PendingBatch | SplitBatch | RejectedBatch] = deque()
        self._window_bytes = self._dictionary_bytes = 0
        self._admission: asyncio.Task[None] | None = None
        self._assemblies: set[asyncio.Task[None]] = set()
        self._is_reading = self._is_write_due = False
        self._is_ended = False
        self._end_error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serve the stream until its end.

        Raises:
            IskanderError: What ended it, after all results before that were written.
        """
        opening = self._loop.call_later(OPEN_S, self._require_open)
        self._call.on_input, self._call.on_room = self._read, self._write
        try:
            self._read()
            await self._over
            # Kept here, the error would keep its traceback, and that this object.
            error, self._end_error = self._end_error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # Its traceback keeps this frame.
        finally:
            opening.cancel()
            self._call.on_input = self._call.on_room = None
            self._is_ended = True
            if self._admission is not None:
                self._admission.cancel()
            for assembly in self._assemblies:
                assembly.cancel()
            for pending in self._window:
                if isinstance(pending, PendingBatch):
                    self._dispatcher.withdraw(pending)
                elif isinstance(pending, SplitBatch):
                    self._withdraw(pending)
            self._window.clear()

    def stop(self, error: IskanderError) -> None:
        """Read no more; what was accepted is still answered, then the stream ends with an error."""
        if not self._is_ended:
            if self._admission is not None:
                self._admission.cancel()
            self._end(error)

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Take the results of one batch, to be sent when its turn comes."""
        assert isinstance(request, PendingBatch) and self._codec is not None
        if self._codec.is_slow(request.arrived):
            self._assemble_later(request, lambda: results)
            return
        request.taken = self._codec.take(request.arrived, results)
        self._write_soon()

    def _assemble_later(
        self, pending: PendingBatch | SplitBatch, results: Callable[[], bytes | memoryview]
    ) -> None:
        task = self._loop.create_task(self._assemble(pending, results))
        self._assemblies.add(task)
        task.add_done_callback(self._assemblies.discard)

    async def _assemble(
        self, pending: PendingBatch | SplitBatch, results: Callable[[], bytes | memoryview]
    ) -> None:
        """Have a response put together by a thread."""
        codec = self._codec
        assert codec is not None
        try:
            pending.taken = await asyncio.to_thread(_assembled, codec, pending.arrived, results)
        except Exception:
            log.exception("a response could not be put together")
            pending.error = IskanderError("the server failed to put the results together")
        self._write_soon()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Take the failure of one batch, to be told when its turn comes."""
        assert isinstance(request, PendingBatch)
        request.error = error
        self._write_soon()

    @property
    def _is_full(self) -> bool:
        return (
            len(self._window) >= self._limits.window_batches
            or self._window_bytes >= self._limits.window_bytes
        )

    def _read(self) -> None:
        """Take what has come, until something has to be waited for."""
        if self._is_reading:
            return
        self._is_reading = True
        call = self._call
        try:
            while call.has_input and not (self._is_ended or self._admission or self._is_full):
                raw = call.receive()
                if raw is None:
                    if self._codec is None:
                        raise MalformedInput("the stream ended before its schema")
                    return self._end(None)
                # Step 1
                if self._codec is None:
                    self._open(read_flight_data(raw))
                else:
                    self._take(raw)
        except (IskanderError, RpcError) as error:
            self._end(error)
        except Exception:
            log.exception("a stream's reader failed")
            self._end(IskanderError("the server failed to read the stream"))
        finally:
            self._is_reading = False

    def _open(self, data: FlightData) -> None:
        """Read up to the schema: which model, and what a batch of this stream means to it."""
        self.target.look(None if data.descriptor is None else bytes(data.descriptor))
        lane = self.target.lane
        if lane is None:
            raise MalformedInput("the stream's first message has no descriptor")
        if data.header:
            lane.require_worker()
            plan = self._plan(lane, bytes(data.header))
            self._codec = self._codec_for(plan)
            self._call.send(schema_frame(plan.response_header))

    def _codec_for(self, plan: Plan) -> StreamCodec:
        name = self._terms.region
        if not name:
            return StreamCodec(plan, self._limits)
        self._region(name)
        return SharedCodec(plan, self._limits, partial(self._region, name))

    def _require_open(self) -> None:
        if self._codec is None:
            self._end(MalformedInput(f"no schema came within {OPEN_S:g} s"))

    def _take(self, raw: Message) -> None:
        """Take one batch; where errors are in-band, a refusal takes its place."""
        assert self._codec is not None
        try:
            if not self._codec.is_quick(raw):
                self._admission = self._loop.create_task(self._take_later(raw))
                return
            arrived = self._codec.read(raw, is_at_once=True)
            if arrived is None:
                self._charge_dictionaries()
            pending = self._begin(arrived, len(raw))
            if pending is not None:
                self._admission = self._loop.create_task(self._take_later(raw, pending))
        except LongMessage:
            self._admission = self._loop.create_task(self._take_later(raw))
        except IskanderError as error:
            self._refuse(error)

    def _charge_dictionaries(self) -> None:
        assert self._codec is not None
        held = self._codec.held_bytes
        if held > self._dictionary_bytes:
            self._call.take_memory(held - self._dictionary_bytes)
        else:
            self._call.give_back_memory(self._dictionary_bytes - held)
        self._dictionary_bytes = held

    async def _take_later(
        self, raw: Message, pending: PendingBatch | SplitBatch | None = None
    ) -> None:
        """Take a batch that has to be read by a thread, or to wait until it is in the arena."""
        assert self._codec is not None
        work_bytes = 0
        try:
            if pending is None:
                wanted = self._codec.work_bytes(raw)
                self._call.take_memory(wanted)
                work_bytes = wanted
                arrived = await asyncio.to_thread(self._codec.read, raw)
                self._charge_dictionaries()
                pending = self._begin(arrived, len(raw))
            if isinstance(pending, SplitBatch):
                await self._admit_portions(pending)
            elif pending is not None:
                await self._intake.admit_later(pending)
                self._enter(pending)
                self._dispatcher.submit(pending)
        except IskanderError as error:
            self._refuse(error)
        except Exception:
            log.exception("a batch could not be admitted")
            self._end(IskanderError("the server failed to take the batch"))
        finally:
            self._call.give_back_memory(work_bytes)
        self._admission = None
        self._read()

    def _begin(
        self, arrived: ParsedBatch | None, raw_bytes: int
    ) -> PendingBatch | SplitBatch | None:
        """Take what was read as far as can be at once; the batch that has to wait, if it has."""
        if arrived is None:
            return None
        assert self._codec is not None and self.target.lane is not None
        if not self.target.is_current:
            self._move()
        if len(arrived.portions) > 1:
            return split_batch(self.target.lane, arrived, raw_bytes, self._terms, self._on_divided)
        pending = PendingBatch(self.target.lane, self, arrived, raw_bytes, self._terms)
        if not pending.rows:
            pending.taken = self._codec.take(arrived, b"")
            self._enter(pending)
            self._write_soon()
        elif self._intake.admit(pending):
            self._enter(pending)
            self._dispatcher.submit(pending)
        else:
            return pending
        return None

    async def _admit_portions(self, divided: SplitBatch) -> None:
        """Send each portion on its way; where one is refused, the batch is."""
        self._enter(divided)
        try:
            for request in divided.requests:
                if divided.error is None and not self._intake.admit(request):
                    await self._intake.admit_later(request)
                if divided.error is not None:
                    if request.lease is not None:  # It failed while this part waited for room.
                        self._intake.give_back(request)
                    return
                self._dispatcher.submit(request)
        except IskanderError as error:
            detach(error)
            divided.fail(divided.requests[0], error)
        except asyncio.CancelledError:
            stopping = Draining("the server is stopping; send it to another", retry_after_ms=0)
            divided.fail(divided.requests[0], stopping)
            raise

    def _on_divided(self, divided: SplitBatch) -> None:
        """All portions of a batch have their results, or one of them has none."""
        assert self._codec is not None
        if divided.error is None:
            is_large = divided.results_bytes > WHOLE_BYTES
            if is_large or self._codec.is_slow(divided.arrived):
                self._assemble_later(divided, divided.results)
                return
            divided.taken = self._codec.take(divided.arrived, divided.results())
        else:
            # Not now: whoever fails one part may be going through a list that has the others.
            self._loop.call_soon(self._withdraw, divided)
        self._write_soon()

    def _withdraw(self, divided: SplitBatch) -> None:
        for request in divided.requests:
            self._dispatcher.withdraw(request)

    def _move(self) -> None:
        """Go on with what is served now; where the stream cannot, it ends."""
        try:
            self.target.move()
        except IskanderError as error:
            self._end(error)
            raise

    def _enter(self, pending: PendingBatch | SplitBatch) -> None:
        self._window.append(pending)
        self._window_bytes += pending.held_bytes

    def _refuse(self, error: IskanderError) -> None:
        """Let an error take its batch's place in the window, or end the stream."""
        detach(error)
        if self._terms.is_in_band:
            self._window.append(RejectedBatch(error))
            self._write_soon()
        else:
            self._end(error)

    def _write_soon(self) -> None:
        """Write when this turn of the loop is over: workers get their next batches before that."""
        if not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Send the results that are there, in order, until the client has to take some first."""
        # Step 10
        self._is_write_due = False
        if self._over.done():
            return None
        window, call = self._window, self._call
        try:
            while window and not call.is_blocked:
                pending = window[0]
                if pending.taken is None and pending.error is None:
                    break
                window.popleft()
                self._window_bytes -= pending.held_bytes
                assert self._codec is not None
                if pending.error is None:
                    frames = self._codec.frames(pending.taken)
                elif self._terms.is_in_band:
                    frames = self._codec.error_frames(pending.error)
                else:
                    return self._finish(pending.error)
                for parts in frames:
                    call.send(*parts)
        except Exception:
            log.exception("a stream's writer failed")
            return self._finish(IskanderError("the server failed to write the stream"))
        if self._is_ended and not window and not call.is_blocked:
            self._finish(self._end_error)
        elif call.has_input:
            self._read()
        return None

    def _end(self, error: Exception | None) -> None:
        """Take nothing more; when everything before is written, the stream ends."""
        self._is_ended = True
        self._end_error = None if error is None else detach(error)
        self._write_soon()

    def _finish(self, error: Exception | None) -> None:
        if not self._over.done():
            self._end_error = error
            self._over.set_result(None)


def _assembled(
    codec: StreamCodec, arrived: ParsedBatch, results: Callable[[], bytes | memoryview]
) -> Any:  # noqa: ANN401
    """What a response is made of, by a thread."""
    if codec.is_slow(arrived):
        return codec.assembled(arrived, results())
    return codec.take(arrived, results())
