"""One DoExchange stream: batches in, results out, in order.

Most batches need no task. The connection calls `_read` for each received message, lane and
dispatcher call `deliver` or `fail`, and `_write` sends the next results while the client accepts
them. Nothing is read while the window is full, so a slow client blocks only itself.

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from iskander.config.schema import LimitsConfig
from iskander.contract.runtime import unexpected_runtimes
from iskander.errors import (
    Draining,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    ModelMoved,
    RuntimeDiffers,
    detach,
)
from iskander.foundation.clock import now_ns
from iskander.foundation.logs import requests as log
from iskander.gateway.protocols.flight.batch_message import BatchMessage
from iskander.gateway.protocols.flight.codec import LongMessage, ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.columns.split import SplitBatch, split_batch
from iskander.gateway.protocols.flight.data import FlightData, read_flight_data, schema_frame
from iskander.gateway.protocols.flight.plan import Plan, require_header
from iskander.gateway.protocols.flight.plans import Plans
from iskander.gateway.protocols.flight.shared_memory import SharedCodec
from iskander.gateway.protocols.stream_terms import StreamTerms
from iskander.gateway.protocols.traced_call import EXCHANGE, GONE
from iskander.gateway.protocols.window import Window
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Caller, Request
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.status import RpcError
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES
from iskander.interprocess.memory.client_segment import ClientSegment

OPEN_S: Final = 30.0
"""Timeout for the schema of a new stream."""
DESCRIPTOR_BYTES_MAX: Final = 4096
"""Limit of a descriptor, which a stream keeps."""


class StreamTarget:
    """Lane of one stream; looked up again when the served models change."""

    __slots__ = ("_descriptor", "_find", "_key", "_models", "_revision", "_runtimes", "lane")

    def __init__(
        self, find: Callable[[bytes, str], Lane], models: Models, key: str, runtimes: str = ""
    ) -> None:
        self._find = find
        self._models = models
        self._key = key
        self._runtimes = runtimes
        self._descriptor: bytes | None = None
        self._revision = -1
        self.lane: Lane | None = None

    @property
    def is_current(self) -> bool:
        """Whether the served models are unchanged since the last lookup."""
        return self._revision == self._models.revision

    def resolve(self, descriptor: bytes | None) -> None:
        """Find the lane of the first descriptor, before the schema arrives."""
        if self._descriptor is None:
            self._descriptor = descriptor
        if self._descriptor is not None and not self.is_current:
            self._revision = self._models.revision
            self.lane = self._found(self._descriptor)

    def switch(self) -> None:
        """Switch to the descriptor's current lane if its contract is the same.

        Raises:
            IskanderError: It differs or no lane is found, and the old lane is not served.
        """
        lane, descriptor = self.lane, self._descriptor
        assert lane is not None and descriptor is not None
        self._revision = self._models.revision
        try:
            found = self._found(descriptor)
            if found.contract is not None and found.contract != lane.contract:
                raise ModelMoved(
                    f"the contract of model `{found.title}` differs from that of `{lane.title}` "
                    "when the stream was opened: open another stream",
                    retry_after_ms=0,
                )
        except IskanderError:
            if not lane.is_served:
                raise
        else:
            if found.contract is not None:
                self.lane = found

    def _found(self, descriptor: bytes) -> Lane:
        """Find a lane, with one of the runtimes that the caller expects."""
        lane = self._find(descriptor, self._key)
        if self._runtimes and (others := unexpected_runtimes(lane.runtimes, self._runtimes)):
            raise RuntimeDiffers(
                f"model `{lane.title}` runs with {others}; the caller expects {self._runtimes}: "
                "give the servers of one job the same library, providers and threads",
                runtime=others,
                expected=self._runtimes,
            )
        return lane


class PendingBatch(Request):
    """A batch of a stream, from admission until its response is written.

    `held_bytes` is an upper bound of its private memory: body and results.
    """

    __slots__ = ("error", "held_bytes", "parsed", "response")

    def __init__(
        self, lane: Lane, caller: Caller, parsed: ParsedBatch, raw_bytes: int, terms: StreamTerms
    ) -> None:
        super().__init__(
            lane,
            caller,
            parsed.rows,
            parsed.portions[0].tensors
            if parsed.portions
            else [parsed.body[start:stop] for start, stop in parsed.tensors],
            terms=terms.of(parsed.app_metadata),
            arrived_ns=now_ns(),
            call_deadline_ns=terms.deadline_ns,
            bucket=parsed.portions[0].bucket if parsed.portions else 0,
        )
        self.parsed = parsed.without_inputs()
        self.response: Any = None
        self.error: IskanderError | None = None
        self.held_bytes = max(raw_bytes, len(parsed.body)) + self.layout.output_bytes


class RejectedBatch:
    """Window entry of a rejected batch."""

    __slots__ = ("error", "held_bytes", "response")

    def __init__(self, error: IskanderError) -> None:
        self.error = error
        self.response: Any = None
        self.held_bytes = 0


class Exchange:
    """One DoExchange stream; `find` maps a descriptor and a route key to a lane."""

    def __init__(
        self,
        call: Call,
        *,
        entry: Entry,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        find: Callable[[bytes, str], Lane],
        region: Callable[[str], ClientSegment],
        plans: Plans,
        models: Models,
    ) -> None:
        self._call = call
        self._entry = entry
        self._dispatcher = dispatcher
        self._limits = limits
        self._plans = plans
        self._plan: Plan | None = None
        self._region = region
        self._tracer = dispatcher.tracer
        self._opened_ns = self._progress_ns = now_ns()
        self._terms = StreamTerms(
            call.metadata, call.deadline_ns, call.source, is_traced=dispatcher.uses_contexts
        )
        self._codec: StreamCodec | None = None
        self.target = StreamTarget(find, models, self._terms.route_key, self._terms.runtimes)
        self._window = Window(limits)
        self._unwritten: deque[PendingBatch | SplitBatch | RejectedBatch] = deque()
        self._dictionary_bytes = 0
        self._admission: asyncio.Task[None] | None = None
        self._preparations: set[asyncio.Task[None]] = set()
        self._is_reading = self._is_write_due = self._is_rendering = False
        self._is_ended = False
        self._end_error: Exception | None = None
        self._loop = asyncio.get_running_loop()
        self._finished: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Serve the stream to its end; raise its error after the earlier results."""
        opening = self._loop.call_later(OPEN_S, self._on_open_timeout)
        # Not `_write`: `send` may call it between two messages of a response.
        self._call.on_input, self._call.on_writable = self._read, self._write_soon
        try:
            self._read()
            await self._finished
            # A stored error references its traceback, which references this object.
            error, self._end_error = self._end_error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # Its traceback references this frame.
        finally:
            opening.cancel()
            self._call.on_input = self._call.on_writable = None
            self._is_ended = True
            if self._admission is not None:
                self._admission.cancel()
                # Its error will reference its traceback, which references this object.
                self._admission = None
            for preparation in self._preparations:
                preparation.cancel()
            for pending in self._unwritten:
                self._withdraw(pending)
                if self._tracer is not None:
                    self._trace(pending, GONE)
            self._unwritten.clear()
            if self._plan is not None:
                self._plans.leave(self._plan)

    def stop(self, error: IskanderError) -> None:
        """Stop reading; end the stream with an error after the results of accepted batches."""
        if not self._is_ended:
            if self._admission is not None:
                self._admission.cancel()
            self._end(error)

    @property
    def idle_since_ns(self) -> int:
        """Start of the time without progress; 0 while a batch is in progress."""
        stalled_ns = self._call.progress_ns
        if stalled_ns:
            return stalled_ns
        return 0 if self._unwritten or self._admission is not None else self._progress_ns

    def give_way(self, error: IskanderError) -> None:
        """End the stream, which makes no progress, with an error."""
        self._finish_run(detach(error))

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        """Accept the results of one batch, to be sent in order."""
        assert isinstance(request, PendingBatch) and self._codec is not None
        if self._codec.is_slow(request.parsed):
            self._prepare_later(request, lambda: results)
            return
        request.response = self._codec.prepare(request.parsed, results)
        self._write_soon()

    def _prepare_later(
        self, pending: PendingBatch | SplitBatch, results: Callable[[], bytes | memoryview]
    ) -> None:
        task = self._loop.create_task(self._prepare_on_thread(pending, results))
        self._preparations.add(task)
        task.add_done_callback(self._preparations.discard)

    async def _prepare_on_thread(
        self, pending: PendingBatch | SplitBatch, results: Callable[[], bytes | memoryview]
    ) -> None:
        assert self._codec is not None
        try:
            async with self._plans.threads.turn(self._call.caller):
                pending.response = await self._plans.threads.run(
                    _prepare, self._codec, pending.parsed, results
                )
        except Exception as failure:
            log.stream_failed(stage="response assembly", error=failure)
            pending.error = IskanderError("the server failed to assemble the results")
        self._write_soon()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Accept the failure of one batch, to be sent in order."""
        assert isinstance(request, PendingBatch)
        request.error = error
        self._write_soon()

    def _read(self) -> None:
        """Process received messages until the window is full or an admission is pending."""
        if self._is_reading:
            return
        self._is_reading = True
        call = self._call
        try:
            while call.has_input and not (
                self._is_ended or self._admission or self._window.is_full
            ):
                raw = call.receive()
                if raw is None:
                    if self._codec is None:
                        raise MalformedInput("the stream ended before its schema")
                    return self._end(None)
                # Step 1
                if self._codec is None:
                    self._open(read_flight_data(raw))
                else:
                    self._read_batch(raw)
        except (IskanderError, RpcError) as error:
            self._end(error)
        except Exception as failure:
            log.stream_failed(stage="read", error=failure)
            self._end(IskanderError("the server failed to read the stream"))
        finally:
            self._is_reading = False

    def _open(self, data: FlightData) -> None:
        """Select the lane by descriptor, then plan and codec by schema."""
        descriptor = data.descriptor
        if descriptor is not None and len(descriptor) > DESCRIPTOR_BYTES_MAX:
            size = f"{len(descriptor)} bytes, limit {DESCRIPTOR_BYTES_MAX}"
            raise LimitExceeded(f"the stream's descriptor has {size}")
        self.target.resolve(None if descriptor is None else bytes(descriptor))
        lane = self.target.lane
        if lane is None:
            raise MalformedInput("the stream's first message has no descriptor")
        if not data.header:
            return
        lane.require_worker()
        header = bytes(data.header)
        plan = self._plans.find(lane, header)
        if plan is None:
            self._admission = self._loop.create_task(self._build_plan(lane, header))
        else:
            self._begin(plan)

    async def _build_plan(self, lane: Lane, header: bytes) -> None:
        """Open the stream with a new plan, which is built on a thread."""
        error: IskanderError | None = None
        try:
            require_header(header)
            self._begin(await self._plans.build(lane, header, self._call.caller))
        except IskanderError as rejection:
            error = rejection
        except Exception as failure:
            log.stream_failed(stage="open", error=failure)
            error = IskanderError("the server failed to read the schema")
        # Before the next message is read: its admission may be a task too.
        self._admission = None
        if error is None:
            self._read()
        else:
            self._end(error)

    def _begin(self, plan: Plan) -> None:
        """Send the response schema; batches can be read."""
        self._plan = plan
        name = self._terms.region
        if name:
            self._region(name)
            self._codec = SharedCodec(plan, self._limits, partial(self._region, name))
        else:
            self._codec = StreamCodec(plan, self._limits)
        self._call.send(schema_frame(plan.response_header))

    def _on_open_timeout(self) -> None:
        if self._codec is None:
            self._end(MalformedInput(f"no schema received within {OPEN_S:g} s"))

    def _read_batch(self, raw: Message) -> None:
        """Read and admit one batch, in a task if it is slow or must wait."""
        codec = self._codec
        assert codec is not None and self.target.lane is not None
        codec.set_whole(is_whole=self.target.lane.rules.is_whole)
        message: BatchMessage | None = None
        try:
            parsed = codec.repeated(raw)
            if parsed is None:
                message = codec.locate(raw)
                if not codec.is_quick(message):
                    raise LongMessage
                parsed = codec.decode(message, is_on_loop=True)
            if parsed is None:
                return self._update_dictionary_charge()
            pending = self._admit(parsed, len(raw))
            if pending is not None:
                self._admission = self._loop.create_task(self._read_and_admit(message, pending))
        except LongMessage:
            assert message is not None
            self._admission = self._loop.create_task(self._read_and_admit(message))
        except IskanderError as error:
            self._reject(error, message)

    def _update_dictionary_charge(self) -> None:
        assert self._codec is not None
        size = self._codec.dictionary_bytes
        if size > self._dictionary_bytes:
            self._call.charge_memory(size - self._dictionary_bytes)
        else:
            self._call.release_memory(self._dictionary_bytes - size)
        self._dictionary_bytes = size

    async def _read_and_admit(
        self, message: BatchMessage | None, pending: PendingBatch | SplitBatch | None = None
    ) -> None:
        """Read a message on a thread, unless its batch is `pending`; wait for the input lease."""
        assert self._codec is not None
        work_bytes = 0
        try:
            if pending is None:
                assert message is not None
                required = self._codec.work_bytes(message)
                async with self._plans.threads.turn(self._call.caller):
                    self._call.charge_memory(required)
                    work_bytes = required
                    parsed = await self._plans.threads.run(self._codec.decode, message)
                self._update_dictionary_charge()
                if parsed is not None:
                    pending = self._admit(parsed, len(message.raw))
            elif pending.parsed.source_bytes:
                # Its inputs are built from columns, and are no part of the message.
                required = _input_bytes(pending)
                self._call.charge_memory(required)
                work_bytes = required
            if isinstance(pending, SplitBatch):
                await self._admit_portions(pending)
            elif pending is not None:
                await self._entry.enter_later(pending, self._append)
        except IskanderError as error:
            if self._tracer is not None and pending is not None:
                self._trace(pending, error)
            self._reject(error, message)
        except Exception as failure:
            log.stream_failed(stage="batch admission", error=failure)
            internal = IskanderError("the server failed to admit the batch")
            if isinstance(pending, SplitBatch):
                pending.fail(pending.requests[0], internal)
            self._end(internal)
        finally:
            self._call.release_memory(work_bytes)
        self._admission = None
        self._read()

    def _admit(self, parsed: ParsedBatch, raw_bytes: int) -> PendingBatch | SplitBatch | None:
        """Admit a batch, or return it if it must wait."""
        assert self._codec is not None and self.target.lane is not None
        if not self.target.is_current:
            try:
                self.target.switch()
            except IskanderError as error:
                self._end(error)
                raise
        lane = self.target.lane
        if lane.rules.is_whole and self._terms.is_cut:
            raise lane.cut_table_error()
        if len(parsed.portions) > 1:
            if lane.rules.is_whole:
                raise lane.cut_error()
            return split_batch(lane, parsed, raw_bytes, self._terms, self._on_split_end)
        pending = PendingBatch(lane, self, parsed, raw_bytes, self._terms)
        if not pending.rows:
            lane.require_rows_optional()
            pending.response = self._codec.prepare(parsed, b"")
            self._append(pending)
            self._write_soon()
            return None
        try:
            return None if self._entry.enter(pending, self._append) else pending
        except IskanderError as error:
            if self._tracer is not None:
                self._trace(pending, error)
            raise

    async def _admit_portions(self, split: SplitBatch) -> None:
        """Admit and submit each portion; the rejection of one rejects the batch."""

        def require_success(_: Request) -> None:
            if split.error is not None:  # Another portion failed, maybe during a wait.
                raise split.error

        self._append(split)
        try:
            for request in split.requests:
                require_success(request)
                if not self._entry.enter(request):
                    await self._entry.enter_later(request, require_success)
        except IskanderError as error:
            detach(error)
            split.fail(split.requests[0], error)
        except asyncio.CancelledError:
            reason = self._end_error  # That of `stop`.
            if not isinstance(reason, IskanderError):
                reason = Draining("the server is stopping; retry on another", retry_after_ms=0)
            split.fail(split.requests[0], reason)
            raise

    def _on_split_end(self, split: SplitBatch) -> None:
        """Build the response from all results, or withdraw the portions of a failed batch."""
        assert self._codec is not None
        if split.error is None:
            is_large = split.results_bytes > WHOLE_BYTES
            if is_large or self._codec.is_slow(split.parsed):
                self._prepare_later(split, split.results)
                return
            split.response = self._codec.prepare(split.parsed, split.results())
        else:
            # Later: the caller of `fail` may be iterating over a list with the other portions.
            self._loop.call_soon(self._withdraw, split)
        self._write_soon()

    def _withdraw(self, pending: PendingBatch | SplitBatch | RejectedBatch) -> None:
        if isinstance(pending, SplitBatch):
            for request in pending.requests:
                self._dispatcher.withdraw(request)
        elif isinstance(pending, PendingBatch):
            self._dispatcher.withdraw(pending)

    def _append(self, pending: PendingBatch | SplitBatch | RejectedBatch) -> None:
        self._unwritten.append(pending)
        self._window.enter(pending.held_bytes)

    def _reject(self, error: IskanderError, message: BatchMessage | None) -> None:
        """Put an in-band error in the window in place of its batch, or end the stream.

        A dictionary has no result of its own, and the batches after it depend on it.
        """
        assert self._codec is not None and self.target.lane is not None
        detach(error)
        self.target.lane.count_refused(error)
        is_dictionary = message is not None and message.is_dictionary
        if self._terms.is_in_band and not is_dictionary:
            self._append(RejectedBatch(error))
            self._write_soon()
        else:
            self._end(error)

    def _write_soon(self) -> None:
        """Schedule a write; the next batches are sent to workers first."""
        if not self._is_write_due:
            self._is_write_due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        """Send available results until the client blocks; resume reading."""
        # Step 11
        self._is_write_due = False
        if self._finished.done():
            return None
        unwritten, call = self._unwritten, self._call
        try:
            while unwritten and not call.is_blocked:
                pending = unwritten[0]
                is_over = pending.error is not None
                if not is_over and (pending.response is None or self._renders_later(pending)):
                    break
                unwritten.popleft()
                self._window.leave(pending.held_bytes)
                assert self._codec is not None
                if pending.error is None:
                    frames = self._codec.frames(pending.response)
                elif self._terms.is_in_band:
                    frames = self._codec.error_frames(pending.error)
                else:
                    if self._tracer is not None:
                        self._trace(pending, pending.error)
                    return self._finish_run(pending.error)
                for parts in frames:
                    call.send(*parts)
                self._progress_ns = now_ns()
                if self._tracer is not None:
                    self._trace(pending, pending.error)
        except Exception as failure:
            log.stream_failed(stage="write", error=failure)
            return self._finish_run(IskanderError("the server failed to write the stream"))
        if self._is_ended and not unwritten and not call.is_blocked:
            self._finish_run(self._end_error)
        elif call.has_input:
            self._read()
        return None

    def _renders_later(self, pending: PendingBatch | SplitBatch | RejectedBatch) -> bool:
        """Whether a response is rendered on a thread, because it has new and large dictionaries.

        Only the first response is, so that they keep their order.
        """
        assert self._codec is not None
        if not self._is_rendering and self._codec.is_slow_to_render(pending.response):
            self._is_rendering = True
            task = self._loop.create_task(self._render_on_thread(pending))
            self._preparations.add(task)
            task.add_done_callback(self._preparations.discard)
        return self._is_rendering

    async def _render_on_thread(self, pending: PendingBatch | SplitBatch | RejectedBatch) -> None:
        codec: StreamCodec | None = self._codec
        assert codec is not None
        try:
            async with self._plans.threads.turn(self._call.caller):
                pending.response = await self._plans.threads.run(codec.rendered, pending.response)
        except Exception as failure:
            log.stream_failed(stage="response rendering", error=failure)
            pending.error = IskanderError("the server failed to render the results")
        self._is_rendering = False
        self._write_soon()

    def _trace(
        self, pending: PendingBatch | SplitBatch | RejectedBatch, error: IskanderError | None
    ) -> None:
        """Record the end of a batch, or of each portion of a split one."""
        assert self._tracer is not None
        if isinstance(pending, SplitBatch):
            for request in pending.requests:
                self._tracer.on_end(request, EXCHANGE, error)
        elif isinstance(pending, PendingBatch):
            self._tracer.on_end(pending, EXCHANGE, error)

    def _end(self, error: Exception | None) -> None:
        """Stop reading; finish the stream once all earlier results are written."""
        if self._finished.done():
            return  # With the error of a batch, which `run` has not raised yet.
        self._is_ended = True
        if self._codec is None and isinstance(error, IskanderError):
            if self.target.lane is not None:
                self.target.lane.count_refused(error)
            if self._tracer is not None:
                self._tracer.on_refused(EXCHANGE, self._terms.trace, self._opened_ns, error)
        self._end_error = None if error is None else detach(error)
        self._write_soon()

    def _finish_run(self, error: Exception | None) -> None:
        if not self._finished.done():
            self._is_ended = True
            self._end_error = error
            self._finished.set_result(None)


def _input_bytes(pending: PendingBatch | SplitBatch) -> int:
    """Bytes of the inputs of a batch, or of all portions of a split one."""
    requests = pending.requests if isinstance(pending, SplitBatch) else [pending]
    return sum(len(tensor) for request in requests for tensor in request.tensors)


def _prepare(
    codec: StreamCodec, parsed: ParsedBatch, results: Callable[[], bytes | memoryview]
) -> Any:  # noqa: ANN401
    return codec.prepare(parsed, results())
