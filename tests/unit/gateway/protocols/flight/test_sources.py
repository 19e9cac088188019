"""Tickets of sources: what the source permits when they are redeemed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from iskander._generated import flight_pb2
from iskander.config.sources import SourceConfig, SourceReadsConfig
from iskander.errors import ModelNotFound, TicketRejected
from iskander.foundation.clock import NS_PER_S, wall_ns
from iskander.gateway.auth.grants import FULL_GRANT
from iskander.gateway.auth.source import UNKNOWN_SOURCE
from iskander.gateway.protocols.flight.sources import FlightSources
from iskander.gateway.sources.messages import Frame, Kind, Planned
from iskander.gateway.sources.query import SourceQuery

EMPTY = memoryview(b"")
CALL: Any = SimpleNamespace(grant=FULL_GRANT, metadata=(), source=UNKNOWN_SOURCE)
LANE = SimpleNamespace(model=SimpleNamespace(name="m", version="1"))


class OnePart:
    """Answers plans with one part."""

    async def answers(self, *_: Any) -> AsyncIterator[Frame]:
        planned = msgspec.msgpack.encode(Planned(b"", [b"part"], 1))
        yield Frame(Kind.PLANNED, 0, memoryview(planned), EMPTY)


def sources(find: Any, **settings: Any) -> FlightSources:
    return FlightSources(
        [SourceConfig(name="s", path="/data", model="m", **settings)],
        SourceReadsConfig(),
        key=b"k" * 32,
        address="",
        readers=OnePart(),  # type: ignore[arg-type]
        find=find,
        describe=lambda *_: [],
    )


def test_new_limits_apply_to_the_next_plan() -> None:
    class Recording(OnePart):
        def answers(self, request: Any, *_: Any) -> AsyncIterator[Frame]:
            self.request = request
            return super().answers()

        def configure(self, *values: Any) -> None:
            self.values = values

    async def run() -> None:
        readers, changed = Recording(), SourceReadsConfig(endpoints=3, ticket_s=5.0)
        target = sources(lambda *_: LANE)
        target._readers = readers  # type: ignore[assignment]
        target.configure(changed, 7)
        assert readers.values == (changed, 7)
        before_s = wall_ns() / NS_PER_S
        raw = await target.info(SourceQuery(source="s"), flight_pb2.FlightDescriptor(), CALL)
        assert readers.request.parts_max == 3
        info: Any = flight_pb2.FlightInfo.FromString(raw)
        assert info.endpoint[0].expiration_time.seconds < before_s + 100

    asyncio.run(run())


async def ticket() -> bytes:
    planning = sources(lambda *_: LANE, keep=("a", "b"), filter="a > 0")
    raw = await planning.info(SourceQuery(source="s"), flight_pb2.FlightDescriptor(), CALL)
    info: Any = flight_pb2.FlightInfo.FromString(raw)
    signed: bytes = info.endpoint[0].ticket.ticket
    return signed


def redeem(**settings: Any) -> None:
    def missing(*_: Any) -> Any:
        raise ModelNotFound("the ticket was accepted")

    async def run() -> None:
        await sources(missing, **settings).get(await ticket(), CALL)

    asyncio.run(run())


@pytest.mark.parametrize(
    "settings", [{"keep": ("a",), "filter": "a > 0"}, {"keep": ("a", "b"), "filter": "a > 1"}]
)
def test_ticket_of_other_columns_or_rows_is_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(TicketRejected, match="`keep` or `filter` of source `s` changed"):
        redeem(**settings)


def test_ticket_of_the_same_columns_and_rows_is_accepted() -> None:
    with pytest.raises(ModelNotFound, match="the ticket was accepted"):
        redeem(keep=("a", "b"), filter="a > 0", unit_rows=5)
