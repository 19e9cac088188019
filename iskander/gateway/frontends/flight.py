"""Arrow Flight: its calls as requests, and results as its messages.

`Exchange` is one DoExchange stream, the one that computes. Its reader and its writer are two
tasks, so that batches are read while results are written: a bounded window of batches is in
flight, results go out in the order in which the batches came, and a client that stops reading
stops only its own reader.

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import msgspec
from google.protobuf.message import DecodeError, Message

from iskander._generated import flight_pb2
from iskander.config import LimitsConfig
from iskander.errors import (
    Draining,
    IskanderError,
    MalformedInput,
    Overloaded,
    Unsupported,
)
from iskander.gateway.arrow_types import input_schema, output_schema
from iskander.gateway.dispatch import Dispatcher
from iskander.gateway.frontends.flight_codec import Arrived, Plan, StreamCodec
from iskander.gateway.frontends.flight_data import read_flight_data, schema_frame
from iskander.gateway.intake import Intake
from iskander.gateway.lanes import Lane, Request
from iskander.gateway.models import Models, describe

log = logging.getLogger("iskander.flight")

SERVICE = "arrow.flight.protocol.FlightService"
PLANS_MAX = 256
"""Plans kept by schema: making one takes a fraction of a millisecond."""

ACTIONS = {
    "health": "Whether every model is ready; one JSON object.",
    "models": "What is served; one JSON array.",
    "contract": 'Body {"model": NAME, "version": VERSION?}. The contract as JSON, then the schemas '
    "of its inputs and results as Arrow IPC messages.",
    "stats": "Counters of lanes, workers and memory; one JSON object.",
}


class _Pending(Request):
    """A batch of a stream, from admission until its response is written.

    Attributes:
        taken: The results, copied out of shared memory; None until they are there.
        error: Why there will be none.
        raw_bytes: Of the message that it came in, counted in the window.
    """

    __slots__ = ("arrived", "error", "raw_bytes", "taken")

    def __init__(self, lane: Lane, caller: Exchange, arrived: Arrived, raw_bytes: int) -> None:
        tensors = [arrived.body[start:stop] for start, stop in arrived.tensors]
        super().__init__(lane, caller, arrived.rows, tensors)
        self.arrived = arrived
        self.taken: Any = None
        self.error: IskanderError | None = None
        self.raw_bytes = raw_bytes


class Exchange:
    """One DoExchange stream.

    Args:
        service: What all streams share.
        context: The call.
    """

    def __init__(self, service: FlightService, context: grpc.aio.ServicerContext) -> None:
        self._service = service
        self._limits = service.limits
        self._context = context
        self._codec: StreamCodec | None = None
        self._greeting: bytes | None = None
        self._window: deque[_Pending] = deque()
        self._window_bytes = 0
        self._is_ended = False
        self._end_error: IskanderError | None = None
        self._to_write = asyncio.Event()
        self._has_room = asyncio.Event()
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
                if pending.taken is None and pending.error is None:
                    self._service.dispatcher.withdraw(pending)

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
        try:
            request.taken = self._codec.take(request.arrived, output)
        except IskanderError as error:
            request.error = error
        self._to_write.set()

    def fail(self, request: Request, error: IskanderError) -> None:
        """Take the failure of one batch; it ends the stream when its turn comes."""
        assert isinstance(request, _Pending)
        request.error = error
        self._to_write.set()

    async def _read(self) -> None:
        try:
            lane = await self._open()
            assert self._codec is not None
            while True:
                raw = await self._context.read()
                if raw is grpc.aio.EOF:
                    return self._end(None)
                # Step 1
                data = read_flight_data(raw)
                if not data.header:
                    raise MalformedInput("a message of the stream has no record batch")
                arrived = self._codec.decode(data.header, data.body, data.app_metadata)
                if arrived is not None:
                    await self._accept(_Pending(lane, self, arrived, len(raw)))
        except IskanderError as error:
            self._end(error)
        except asyncio.CancelledError:
            raise
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
                name, version = _model_of(
                    _parse(flight_pb2.FlightDescriptor, bytes(data.descriptor))
                )
                lane = self._service.models.find(name, version)
            if lane is None:
                raise MalformedInput("the stream's first message has no descriptor")
            if data.header:
                break
        lane.require_open()
        plan = self._service.plan(lane, bytes(data.header))
        self._codec = StreamCodec(plan, self._limits, lane.model.rows_max)
        self._greeting = schema_frame(plan.response_header)
        self._to_write.set()
        return lane

    async def _accept(self, pending: _Pending) -> None:
        while self._window and (
            len(self._window) >= self._limits.window_batches
            or self._window_bytes + pending.raw_bytes > self._limits.window_bytes
        ):
            self._has_room.clear()
            await self._has_room.wait()
        if pending.rows == 0:
            assert self._codec is not None
            pending.taken = self._codec.take(pending.arrived, memoryview(b""))
            self._to_write.set()
        else:
            await self._service.intake.admit(pending.lane, pending)
        self._window.append(pending)
        self._window_bytes += pending.raw_bytes
        if pending.rows:
            self._service.dispatcher.submit(pending)

    async def _write(self) -> None:
        window, write = self._window, self._context.write
        while True:
            if self._greeting is not None:
                greeting, self._greeting = self._greeting, None
                await write(greeting)
            while window and (window[0].taken is not None or window[0].error is not None):
                pending = window.popleft()
                self._window_bytes -= pending.raw_bytes
                self._has_room.set()
                if pending.error is not None:
                    raise pending.error
                assert self._codec is not None
                for frame in self._codec.frames(pending.taken):
                    await write(frame)
            if self._is_ended and not window:
                if self._end_error is not None:
                    raise self._end_error
                return
            self._to_write.clear()
            await self._to_write.wait()

    def _end(self, error: IskanderError | None) -> None:
        self._is_ended = True
        self._end_error = error
        self._to_write.set()


class FlightService:
    """The calls of FlightService.

    Args:
        models: What is served.
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        limits: Of the server.
        stats: Answers the `stats` action.
    """

    def __init__(
        self,
        models: Models,
        *,
        intake: Intake,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        stats: Callable[[], dict[str, Any]],
    ) -> None:
        self.models = models
        self.intake = intake
        self.dispatcher = dispatcher
        self.limits = limits
        self._stats = stats
        self._plans: dict[tuple[int, bytes], Plan] = {}
        self.exchanges: set[Exchange] = set()
        self.is_draining = False

    def drain(self) -> None:
        """Take no more batches."""
        self.is_draining = True
        for exchange in list(self.exchanges):
            exchange.drain()

    def plan(self, lane: Lane, header: bytes) -> Plan:
        """The plan for a schema, made or remembered.

        Raises:
            IskanderError: As `Plan`.
        """
        key = (lane.model.key, header)
        plan = self._plans.get(key)
        if plan is None:
            assert lane.contract is not None
            plan = Plan(header, lane.contract, self.limits)
            if len(self._plans) >= PLANS_MAX:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    async def do_exchange(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Batches in, batches out; see `Exchange`."""
        if self.is_draining:
            raise Draining("the server is stopping", retry_after_ms=0)
        if len(self.exchanges) >= self.limits.streams:
            raise Overloaded(
                f"{self.limits.streams} streams are open, the limit", retry_after_ms=1000
            )
        exchange = Exchange(self, context)
        self.exchanges.add(exchange)
        try:
            await exchange.run()
        finally:
            self.exchanges.discard(exchange)

    async def handshake(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Answer an opening handshake; no credentials are asked for."""
        request = _parse(flight_pb2.HandshakeRequest, await _first(context))
        answer = flight_pb2.HandshakeResponse(protocol_version=request.protocol_version)
        await context.write(answer.SerializeToString())

    async def list_flights(self, _: bytes, context: grpc.aio.ServicerContext) -> None:
        """An entry for each model version that is loaded."""
        for lane in self.models:
            if lane.contract is not None:
                await context.write(_info(lane).SerializeToString())

    async def get_flight_info(self, raw: bytes, _: grpc.aio.ServicerContext) -> bytes:
        """One model: schema of its results, and its contract as JSON in `app_metadata`."""
        name, version = _model_of(_parse(flight_pb2.FlightDescriptor, raw))
        info: bytes = _info(self.models.find_loaded(name, version)).SerializeToString()
        return info

    async def get_schema(self, raw: bytes, _: grpc.aio.ServicerContext) -> bytes:
        """Schema of a model's results; passed-through columns come before them."""
        name, version = _model_of(_parse(flight_pb2.FlightDescriptor, raw))
        lane = self.models.find_loaded(name, version)
        assert lane.contract is not None
        schema = output_schema(lane.contract).serialize().to_pybytes()
        result: bytes = flight_pb2.SchemaResult(schema=schema).SerializeToString()
        return result

    async def list_actions(self, _: bytes, context: grpc.aio.ServicerContext) -> None:
        """The actions of `do_action`."""
        for name, sentence in ACTIONS.items():
            action = flight_pb2.ActionType(type=name, description=sentence)
            await context.write(action.SerializeToString())

    async def do_action(self, raw: bytes, context: grpc.aio.ServicerContext) -> None:
        """What the operator asks; bodies and results are JSON, schemas are IPC messages."""
        action = _parse(flight_pb2.Action, raw)
        for body in self._act(action.type, action.body):
            await context.write(flight_pb2.Result(body=body).SerializeToString())

    async def do_get(self, raw: bytes, context: grpc.aio.ServicerContext) -> None:
        """Not offered."""
        raise Unsupported("this server keeps no data to get; send batches with DoExchange")

    async def do_put(self, _: object, context: grpc.aio.ServicerContext) -> None:
        """Not offered."""
        raise Unsupported("this server stores no data; send batches with DoExchange")

    async def poll_flight_info(self, raw: bytes, _: grpc.aio.ServicerContext) -> bytes:
        """Not offered."""
        raise Unsupported("nothing here takes long enough to poll for; use GetFlightInfo")

    def _act(self, name: str, body: bytes) -> list[bytes]:
        encode = msgspec.json.encode
        if name == "health":
            return [encode(self.models.readiness())]
        if name == "models":
            return [encode([describe(lane) for lane in self.models])]
        if name == "stats":
            return [encode(self._stats())]
        if name == "contract":
            try:
                wanted = msgspec.json.decode(body, type=_ContractQuery)
            except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise MalformedInput(f"the body of `contract`: {error}") from None
            version = None if wanted.version is None else str(wanted.version)
            lane = self.models.find_loaded(wanted.model, version)
            assert lane.contract is not None
            schemas = (input_schema(lane.contract), output_schema(lane.contract))
            return [
                encode(describe(lane)),
                *(schema.serialize().to_pybytes() for schema in schemas),
            ]
        raise Unsupported(f"there is no action `{name[:100]}`; there are {', '.join(ACTIONS)}")


class _ContractQuery(msgspec.Struct):
    model: str
    version: str | int | None = None


async def _first(context: grpc.aio.ServicerContext) -> bytes:
    raw = await context.read()
    return b"" if raw is grpc.aio.EOF else raw


def _parse(kind: type[Message], raw: bytes) -> Any:  # noqa: ANN401
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise MalformedInput(f"the message is not a {kind.__name__}") from None


def _model_of(descriptor: Any) -> tuple[str, str | None]:  # noqa: ANN401
    path = list(descriptor.path)
    if descriptor.type != flight_pb2.FlightDescriptor.PATH or len(path) not in (1, 2):
        raise MalformedInput("wanted a path descriptor: [model] or [model, version]")
    return path[0], path[1] if len(path) == 2 else None


def _info(lane: Lane) -> Any:  # noqa: ANN401
    assert lane.contract is not None
    return flight_pb2.FlightInfo(
        schema=output_schema(lane.contract).serialize().to_pybytes(),
        flight_descriptor=flight_pb2.FlightDescriptor(
            type=flight_pb2.FlightDescriptor.PATH, path=[lane.model.name, lane.model.version]
        ),
        total_records=-1,
        total_bytes=-1,
        app_metadata=msgspec.json.encode(describe(lane)),
    )
