"""Arrow Flight service: discovery, actions, and DoExchange streams (`exchange`).

Runs on: gateway loop. Source: Arrow Flight RPC protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from google.protobuf.message import DecodeError, Message

from iskander._generated import flight_pb2
from iskander.arrow.request_schema import request_schema
from iskander.arrow.types import output_schema
from iskander.config.schema import LimitsConfig
from iskander.errors import Draining, IskanderError, MalformedInput, Overloaded, Unsupported
from iskander.foundation.clock import now_ns
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.auth.audit import AuditLog
from iskander.gateway.auth.grants import HEADER, Grant, handshake_header
from iskander.gateway.auth.quota import NO_LIMITS
from iskander.gateway.auth.shares import Shares
from iskander.gateway.protocols.flight.columns.batch_limits import batch_limits
from iskander.gateway.protocols.flight.exchange import OPEN_S, Exchange
from iskander.gateway.protocols.flight.plans import Plans
from iskander.gateway.protocols.flight.regions import RegionServer
from iskander.gateway.protocols.flight.sources import FlightSources
from iskander.gateway.protocols.shared_answers import SharedAnswers
from iskander.gateway.protocols.submit import given_way_error
from iskander.gateway.repository.models import Models, describe
from iskander.gateway.repository.peers import Peers
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.sources.query import SourceQuery, read_query
from iskander.gateway.transport.http2.call import Call

SERVICE = "arrow.flight.protocol.FlightService"

ACTIONS = {
    "health": "Readiness of the server and of each model; one JSON object.",
    "models": "Models that are served, loading, or failed to load; one JSON array.",
    "load": 'Body {"model": NAME}. Load the versions of a model; returns the served versions once '
    "they are loaded.",
    "unload": 'Body {"model": NAME, "version": VERSION?}. Unload a model; returns the unloaded '
    "versions.",
    "contract": 'Body {"model": NAME, "version": VERSION?}. The contract as JSON, with limits, '
    "versions and aliases; then the schemas of its inputs and results as Arrow IPC messages.",
    "shared-memory": "Socket path and size limit of shared memory regions; one JSON object.",
    "drain": "Stop the server as SIGTERM does, for a token that may manage all models; one object.",
    "reload": "Apply the changed settings of the configuration file, for such a token; one object "
    "with `changed`.",
    "stats": "State of lanes, workers and memory; one JSON object.",
    "metrics": 'Body {"name"?, "labels"?, "window_s"?}. Recent values of each metric: count, mean, '
    "minimum, maximum, percentiles and the latest; one JSON object.",
}
SERVER_ACTIONS = ("drain", "metrics", "reload", "shared-memory", "stats")


class FlightService:
    """Handlers of the FlightService calls; `stats` returns the result of the `stats` action.

    Attributes:
        audit: Records loads, unloads, drains and reloads.
        plans: Plans of open streams, and a cache of others.
        sources: Sources of the configuration; None without any.
        operate: Runs the actions `drain` and `reload` of an operator; None if they are unavailable.
    """

    def __init__(
        self,
        models: Models,
        peers: Peers,
        *,
        entry: Entry,
        dispatcher: Dispatcher,
        plans: Plans,
        stats: Callable[[], Awaitable[dict[str, Any]]],
        recent: RecentValues,
        regions: RegionServer,
    ) -> None:
        self.models = models
        self._peers = peers
        self._entry = entry
        self._dispatcher = dispatcher
        self.limits = plans.limits
        self._stats = stats
        self._recent = recent
        self._regions = regions
        self.plans = plans
        self.exchanges: dict[Exchange, Grant] = {}
        self._answers = SharedAnswers()
        self._shares: Shares[Exchange] = Shares(_idle_since, _give_way)
        self.sources: FlightSources | None = None
        self.operate: Callable[[str], Awaitable[dict[str, Any]]] | None = None
        self.is_draining = False
        self.audit = AuditLog()

    @property
    def has_work(self) -> bool:
        """Whether any stream or read of a source is open."""
        return bool(self.exchanges or (self.sources is not None and self.sources.reads))

    def reader_grant(self, call: Call) -> Grant | None:
        """The grant of an open read of a source, for a call of its reader process; else None."""
        return None if self.sources is None else self.sources.reader_grant(call)

    def drain(self) -> None:
        """Stop reading batches; the streams of open reads of sources resume."""
        self.is_draining = True
        for exchange in list(self.exchanges):
            exchange.stop(Draining("the server is stopping; retry on another", retry_after_ms=0))

    def configure(self, limits: LimitsConfig) -> None:
        """Apply the limits to new streams; open ones keep theirs."""
        self.limits = limits
        self.plans.configure(limits)

    def check_grants(self) -> None:
        """Stop streams whose grant was revoked."""
        for exchange, grant in list(self.exchanges.items()):
            lane = exchange.target.lane
            try:
                if lane is None:
                    grant.require_valid()
                else:
                    grant.require_model(lane.model.name)
            except IskanderError as error:
                exchange.stop(error)
        if self.sources is not None:
            self.sources.check_grants()

    async def do_exchange(self, call: Call) -> None:
        """Serve a stream; see `Exchange`."""
        if self.sources is None or not self.sources.is_reader(call):
            self._require_open()
        caller = call.caller
        if not self._shares.make_room(caller, self.limits.streams, now_ns()):
            count, limit = len(self._shares), f"limit {self.limits.streams} (`limits.streams`)"
            text = f"{count} streams are open, {self._shares.count(caller)} of them of this caller"
            raise Overloaded(f"{text}, {limit}", retry_after_ms=1000)
        exchange = Exchange(
            call,
            entry=self._entry,
            dispatcher=self._dispatcher,
            limits=self.limits,
            find=partial(self._find, call.grant),
            region=self._regions.find,
            plans=self.plans,
            models=self.models,
        )
        self.exchanges[exchange] = call.grant
        self._shares.add(caller, exchange)
        try:
            await exchange.run()
        finally:
            del self.exchanges[exchange]
            self._shares.remove(exchange)

    async def handshake(self, call: Call) -> None:
        """Complete a handshake: a token sent as a password is returned as a bearer header."""
        request = _parse(flight_pb2.HandshakeRequest, await _first_message(call))
        response = flight_pb2.HandshakeResponse(protocol_version=request.protocol_version)
        await call.write(response.SerializeToString())
        shown = [handshake_header(str(value)) for name, value in call.metadata if name == HEADER]
        call.end(metadata=tuple((HEADER, each) for each in shown))

    async def list_flights(self, _: bytes, call: Call) -> None:
        """List the loaded model versions, and the sources, that the caller may use."""
        grant = call.grant
        for info in await self._answers.get(
            ("flights", grant.scope), partial(self._list_flights, grant)
        ):
            await call.write(info)

    async def _list_flights(self, grant: Grant) -> list[bytes]:
        listed = []
        for lane in list(self.models):
            if lane.contract is not None and grant.may_call(lane.model.name):
                listed.append(_info(lane))
                await asyncio.sleep(0)
        return listed if self.sources is None else listed + self.sources.list(grant)

    async def get_flight_info(self, raw: bytes, call: Call) -> None:
        """Send a model's result schema, and its contract as JSON; or endpoints of a source."""
        descriptor = _parse(flight_pb2.FlightDescriptor, raw)
        if self.sources is None or (query := self._query(descriptor)) is None:
            info = _info(self._loaded(descriptor, call.grant))
        else:
            self._require_open()
            info = await self.sources.info(query, descriptor, call)
        await call.answer(info)

    async def get_schema(self, raw: bytes, call: Call) -> None:
        """Send a model's result schema, without passed-through columns, or a source's."""
        descriptor = _parse(flight_pb2.FlightDescriptor, raw)
        if self.sources is None or (query := self._query(descriptor)) is None:
            schema = _result_schema(self._loaded(descriptor, call.grant))
        else:
            self._require_open()
            schema = await self.sources.schema(query, call)
        await call.answer(flight_pb2.SchemaResult(schema=schema).SerializeToString())

    async def list_actions(self, _: bytes, call: Call) -> None:
        """List the actions of `do_action`."""
        for name, sentence in ACTIONS.items():
            action = flight_pb2.ActionType(type=name, description=sentence)
            await call.write(action.SerializeToString())

    async def do_action(self, raw: bytes, call: Call) -> None:
        """Run an action; results are JSON, schemas are IPC messages."""
        action = _parse(flight_pb2.Action, raw)
        for result in await self._act(action.type, action.body, call):
            body = result if isinstance(result, bytes) else msgspec.json.encode(result)
            await call.write(flight_pb2.Result(body=body).SerializeToString())

    async def do_get(self, raw: bytes, call: Call) -> None:
        """Send the scored rows of a source's ticket."""
        if self.sources is None:
            raise Unsupported("this server keeps no data to get; send batches with DoExchange")
        self._require_open()
        await self.sources.get(_parse(flight_pb2.Ticket, raw).ticket, call)

    async def do_put(self, _: Call) -> None:
        """Not supported."""
        raise Unsupported("this server stores no data; send batches with DoExchange")

    async def poll_flight_info(self, raw: bytes, grant: Grant) -> bytes:
        """Not supported."""
        raise Unsupported("PollFlightInfo is not supported; use GetFlightInfo")

    def describe(self, lane: Lane, grant: Grant) -> list[bytes]:
        """Return a model's contract: JSON, and the schemas of inputs and results."""
        assert lane.contract is not None
        quota = self._entry.quotas.get(grant.name)
        own = NO_LIMITS if quota is None else quota.limits
        rows_max = lane.rules.rows_max if lane.rules.is_whole else None
        limits = batch_limits(lane.contract, self.limits, own, rows_max)
        described = describe(lane) | {"limits": limits}
        described |= self.models.describe_versions(lane.model.name)
        described["all_runtimes"] = self.models.has_all_runtimes(lane)
        inputs = request_schema(lane.contract).serialize().to_pybytes()
        return [msgspec.json.encode(described), inputs, _result_schema(lane)]

    def _find(self, grant: Grant, raw: bytes, key: str) -> Lane:
        descriptor = _parse(flight_pb2.FlightDescriptor, raw)
        return self.models.find(*_permitted_model(grant, descriptor), key)

    def _loaded(self, descriptor: flight_pb2.FlightDescriptor, grant: Grant) -> Lane:
        return self.models.find_loaded(*_permitted_model(grant, descriptor))

    def _require_open(self) -> None:
        if self.is_draining:
            raise Draining("the server is stopping", retry_after_ms=0)

    def _query(self, descriptor: flight_pb2.FlightDescriptor) -> SourceQuery | None:
        """The query of a descriptor; None if it names a model."""
        if descriptor.type == flight_pb2.FlightDescriptor.CMD:
            return read_query(descriptor.cmd)
        path = list(descriptor.path)
        is_source = self.sources is not None and len(path) == 1 and path[0] in self.sources
        return SourceQuery(source=path[0]) if is_source else None

    async def _act(self, name: str, body: bytes, call: Call) -> list[Any]:
        """Results of an action: IPC messages, or objects to encode as JSON."""
        grant = call.grant
        if name == "health":
            state = self.models.readiness()
            state["ready"] = state["ready"] and not self.is_draining
            state["models"] = {m: state["models"][m] for m in state["models"] if grant.may_call(m)}
            return [state]
        if name == "models":
            key = (name, grant.scope)
            return [*await self._answers.get(key, partial(self._describe_models, grant))]
        if name in SERVER_ACTIONS:
            return [await self._act_on_server(name, body, call)]
        if name not in ("contract", "load", "unload"):
            raise Unsupported(f"unknown action `{name[:100]}`; available: {', '.join(ACTIONS)}")
        query = _read_query(name, body)
        if name == "contract":
            grant.require_model(query.model)
            lane = self.models.find_loaded(query.model, query.version_text)
            return [*self.describe(lane, grant)]
        target = "/".join(filter(None, (query.model, query.version_text)))
        with self.audit.action(name, target, grant.name, call.origin):
            grant.require_manage(query.model)
            if name == "load":
                versions = await self._peers.load(query.model)
            else:
                versions = await self._peers.unload(query.model, query.version_text)
        return [{"model": query.model, "versions": versions}]

    async def _describe_models(self, grant: Grant) -> list[bytes]:
        entries = []
        for status in list(self.models.index()):
            if grant.may_call(status.name):
                entries.append(msgspec.json.encode(self.models.describe(status)))
                await asyncio.sleep(0)
        return [b"[" + b",".join(entries) + b"]"]

    async def _act_on_server(self, name: str, body: bytes, call: Call) -> Any:  # noqa: ANN401
        """Result of an action that concerns no single model."""
        grant = call.grant
        if name in ("drain", "reload"):
            with self.audit.action(name, "", grant.name, call.origin):
                grant.require_operator(name)
                if self.operate is None:
                    raise Unsupported(f"`{name}` is not available in this gateway")
                return await self.operate(name)
        grant.require_token()
        if name == "shared-memory":
            return self._regions.describe()

        async def render() -> list[bytes]:
            stats = self._recent.answer(body) if name == "metrics" else self._stats()
            return [msgspec.json.encode(await stats)]

        key = (name, body if name == "metrics" else b"")
        return (await self._answers.get(key, render))[0]


def _idle_since(exchange: Exchange) -> int:
    return exchange.idle_since_ns


def _give_way(exchange: Exchange) -> None:
    exchange.give_way(given_way_error("stream"))


@thread_safe
class _Query(msgspec.Struct):
    model: str
    version: str | int | None = None

    @property
    def version_text(self) -> str | None:
        return None if self.version is None else str(self.version)


def _read_query(action: str, body: bytes) -> _Query:
    """Decode the body of an action."""
    try:
        return msgspec.json.decode(body, type=_Query)
    except DECODE_ERRORS as error:
        raise MalformedInput(f"the body of `{action}`: {error}") from None


async def _first_message(call: Call) -> bytes:
    try:
        async with asyncio.timeout(OPEN_S):
            return bytes(await call.read() or b"")
    except TimeoutError:
        raise MalformedInput(f"no message received within {OPEN_S:g} s") from None


def _parse(kind: type[Message], raw: bytes) -> Any:  # noqa: ANN401
    try:
        return kind.FromString(raw)
    except DecodeError:
        raise MalformedInput(f"the message is not a {kind.__name__}") from None


def _permitted_model(
    grant: Grant, descriptor: flight_pb2.FlightDescriptor
) -> tuple[str, str | None]:
    """Model and version of a descriptor; the grant must permit the model."""
    path = list(descriptor.path)
    if descriptor.type != flight_pb2.FlightDescriptor.PATH or len(path) not in (1, 2):
        raise MalformedInput("wanted a path descriptor: [model] or [model, version]")
    grant.require_model(path[0])
    return path[0], path[1] if len(path) == 2 else None


def _result_schema(lane: Lane) -> bytes:
    assert lane.contract is not None
    schema: bytes = output_schema(lane.contract).serialize().to_pybytes()
    return schema


def _info(lane: Lane) -> bytes:
    kind, path = flight_pb2.FlightDescriptor, [lane.model.name, lane.model.version]
    info: bytes = flight_pb2.FlightInfo(
        schema=_result_schema(lane),
        flight_descriptor=kind(type=kind.PATH, path=path),
        total_records=-1,
        total_bytes=-1,
        app_metadata=msgspec.json.encode(describe(lane)),
    ).SerializeToString()
    return info
