"""Arrow Flight's calls: discovery, actions, and the streams that compute (`flight_exchange`).

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from iskander._generated import flight_pb2
from iskander.arrow.request_schema import request_schema
from iskander.arrow.types import output_schema
from iskander.auth.grants import HEADER, Grant, bearer_token
from iskander.config.schema import LimitsConfig
from iskander.decoders import thread_safe
from iskander.errors import Draining, IskanderError, MalformedInput, Overloaded, Unsupported
from iskander.measurement.recent_values import RecentValues
from iskander.protocols.flight.exchange import OPEN_S, Exchange
from iskander.protocols.flight.plan import Plan
from iskander.protocols.flight.regions import RegionServer
from iskander.repository.models import Models, describe
from iskander.repository.peers import Peers
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.transport.http2.call import Call

SERVICE = "arrow.flight.protocol.FlightService"
PLAN_HEADER_BYTES_MAX = 65_536
PLANS_MAX = 256
"""Plans kept by schema: making one takes a fraction of a millisecond."""

ACTIONS = {
    "health": "Whether every model is ready; one JSON object.",
    "models": "What is served, is being loaded, or does not load; one JSON array.",
    "load": 'Body {"model": NAME}. Load what is there of it where it is not served; answers when '
    "it is, with the versions that are.",
    "unload": 'Body {"model": NAME, "version": VERSION?}. Serve it no longer; the versions that '
    "are let go.",
    "contract": 'Body {"model": NAME, "version": VERSION?}. The contract as JSON, then the schemas '
    "of its inputs and results as Arrow IPC messages.",
    "shared-memory": "Where clients of this machine ask for memory for their batches, and how much "
    "one may have; one JSON object.",
    "stats": "What lanes, workers and memory have come to; one JSON object.",
    "metrics": 'Body {"name"?, "labels"?, "window_s"?}. The last points of each measure: count, '
    "mean, least, greatest, percentiles and the latest; one JSON object.",
}


class FlightService:
    """The calls of FlightService.

    Args:
        models: What is served.
        siblings: Bring models and let them go, in all processes.
        intake: The way into shared memory.
        dispatcher: The way to the workers.
        limits: Of the server.
        stats: Answers the `stats` action.
        recent: Answers the `metrics` action.
        regions: Memory that clients share.
    """

    def __init__(
        self,
        models: Models,
        siblings: Peers,
        *,
        intake: InputArena,
        dispatcher: Dispatcher,
        limits: LimitsConfig,
        stats: Callable[[], dict[str, Any]],
        recent: RecentValues,
        regions: RegionServer,
    ) -> None:
        self.models = models
        self._siblings = siblings
        self._intake = intake
        self._dispatcher = dispatcher
        self.limits = limits
        self._stats = stats
        self._recent = recent
        self._regions = regions
        self._plans: dict[tuple[int, bytes], Plan] = {}
        self.exchanges: dict[Exchange, Grant] = {}
        self.is_draining = False

    def drain(self) -> None:
        """Take no more batches."""
        self.is_draining = True
        for exchange in list(self.exchanges):
            exchange.stop(
                Draining("the server is stopping; send the rest to another", retry_after_ms=0)
            )

    def look_at_grants(self) -> None:
        """Who may ask what has changed."""
        for exchange, grant in list(self.exchanges.items()):
            lane = exchange.target.lane
            try:
                if lane is None:
                    grant.require_valid()
                else:
                    grant.require_model(lane.model.name)
            except IskanderError as error:
                exchange.stop(error)

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
            if len(header) <= PLAN_HEADER_BYTES_MAX:
                self._plans[key] = plan
        return plan

    async def do_exchange(self, call: Call) -> None:
        """Batches in, batches out; see `Exchange`."""
        if self.is_draining:
            raise Draining("the server is stopping", retry_after_ms=0)
        if len(self.exchanges) >= self.limits.streams:
            raise Overloaded(
                f"{self.limits.streams} streams are open, the limit", retry_after_ms=1000
            )
        exchange = Exchange(
            call,
            intake=self._intake,
            dispatcher=self._dispatcher,
            limits=self.limits,
            find=partial(self._find, call.grant),
            region=self._regions.find,
            plan=self.plan,
            models=self.models,
        )
        self.exchanges[exchange] = call.grant
        try:
            await exchange.run()
        finally:
            del self.exchanges[exchange]

    async def handshake(self, call: Call) -> None:
        """Answer an opening handshake.

        A token that was shown as a name's password comes back as the header of the other calls.
        """
        raw = await _first(call)
        request = _parse(flight_pb2.HandshakeRequest, raw)
        answer = flight_pb2.HandshakeResponse(protocol_version=request.protocol_version)
        await call.write(answer.SerializeToString())
        shown = [
            f"Bearer {bearer_token(str(said))}" for name, said in call.metadata if name == HEADER
        ]
        call.end(metadata=tuple((HEADER, token) for token in shown))

    async def list_flights(self, _: bytes, call: Call) -> None:
        """An entry for each model version that is loaded and that the caller may ask."""
        for lane in self.models:
            if lane.contract is not None and call.grant.may_ask(lane.model.name):
                await call.write(_info(lane).SerializeToString())

    async def get_flight_info(self, raw: bytes, grant: Grant) -> bytes:
        """One model: schema of its results, and its contract as JSON in `app_metadata`."""
        name, version = _model_of(_parse(flight_pb2.FlightDescriptor, raw))
        grant.require_model(name)
        info: bytes = _info(self.models.find_loaded(name, version)).SerializeToString()
        return info

    async def get_schema(self, raw: bytes, grant: Grant) -> bytes:
        """Schema of a model's results; passed-through columns come before them."""
        name, version = _model_of(_parse(flight_pb2.FlightDescriptor, raw))
        grant.require_model(name)
        lane = self.models.find_loaded(name, version)
        assert lane.contract is not None
        schema = output_schema(lane.contract).serialize().to_pybytes()
        result: bytes = flight_pb2.SchemaResult(schema=schema).SerializeToString()
        return result

    async def list_actions(self, _: bytes, call: Call) -> None:
        """The actions of `do_action`."""
        for name, sentence in ACTIONS.items():
            action = flight_pb2.ActionType(type=name, description=sentence)
            await call.write(action.SerializeToString())

    async def do_action(self, raw: bytes, call: Call) -> None:
        """What the operator asks; bodies and results are JSON, schemas are IPC messages."""
        action = _parse(flight_pb2.Action, raw)
        if action.type == "metrics":
            call.grant.require_token()
            bodies = [msgspec.json.encode(await self._recent.answer(action.body))]
        elif action.type == "load":
            name = _read_query("load", action.body).model
            call.grant.require_manage(name)
            versions = await self._siblings.load(name)
            bodies = [msgspec.json.encode({"model": name, "versions": versions})]
        elif action.type == "unload":
            wanted = _read_query("unload", action.body)
            call.grant.require_manage(wanted.model)
            versions = await self._siblings.unload(wanted.model, wanted.version_text)
            bodies = [msgspec.json.encode({"model": wanted.model, "versions": versions})]
        else:
            bodies = self._act(action.type, action.body, call.grant)
        for body in bodies:
            await call.write(flight_pb2.Result(body=body).SerializeToString())

    async def do_get(self, raw: bytes, _: Call) -> None:
        """Not offered."""
        raise Unsupported("this server keeps no data to get; send batches with DoExchange")

    async def do_put(self, _: Call) -> None:
        """Not offered."""
        raise Unsupported("this server stores no data; send batches with DoExchange")

    async def poll_flight_info(self, raw: bytes, grant: Grant) -> bytes:
        """Not offered."""
        raise Unsupported("nothing here takes long enough to poll for; use GetFlightInfo")

    def _find(self, grant: Grant, raw: bytes, key: str) -> Lane:
        name, version = _model_of(_parse(flight_pb2.FlightDescriptor, raw))
        grant.require_model(name)
        return self.models.find(name, version, key)

    def _act(self, name: str, body: bytes, grant: Grant) -> list[bytes]:
        encode = msgspec.json.encode
        if name == "health":
            told = self.models.readiness()
            told["ready"] = told["ready"] and not self.is_draining
            told["models"] = {m: told["models"][m] for m in told["models"] if grant.may_ask(m)}
            return [encode(told)]
        if name == "models":
            return [encode([m for m in self.models.describe_all() if grant.may_ask(m["name"])])]
        if name == "shared-memory":
            grant.require_token()
            return [encode(self._regions.describe())]
        if name == "stats":
            grant.require_token()
            return [encode(self._stats())]
        if name == "contract":
            wanted = _read_query(name, body)
            grant.require_model(wanted.model)
            lane = self.models.find_loaded(wanted.model, wanted.version_text)
            assert lane.contract is not None
            schemas = (request_schema(lane.contract), output_schema(lane.contract))
            return [
                encode(describe(lane)),
                *(schema.serialize().to_pybytes() for schema in schemas),
            ]
        raise Unsupported(f"there is no action `{name[:100]}`; there are {', '.join(ACTIONS)}")


@thread_safe
class _Query(msgspec.Struct):
    model: str
    version: str | int | None = None

    @property
    def version_text(self) -> str | None:
        return None if self.version is None else str(self.version)


def _read_query(action: str, body: bytes) -> _Query:
    """Which model an action is about."""
    try:
        return msgspec.json.decode(body, type=_Query)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedInput(f"the body of `{action}`: {error}") from None


async def _first(call: Call) -> bytes:
    try:
        async with asyncio.timeout(OPEN_S):
            return bytes(await call.read() or b"")
    except TimeoutError:
        raise MalformedInput(f"no message came within {OPEN_S:g} s") from None


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
