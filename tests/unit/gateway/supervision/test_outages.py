"""Outages of remote servers: begin, checks, and end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from support.lanes import lane_of

from iskander.errors import IskanderError, RemoteUnavailable
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.worker_slot import WorkerSlot
from iskander.gateway.supervision import outages as outages_module
from iskander.gateway.supervision.outages import FAILURES_MAX, Outages
from iskander.interprocess.control.messages import Probe, Probed, ToWorker

LOST = RemoteUnavailable("remote model `m` at h:1 cannot be reached")


class Fixture:
    def __init__(self) -> None:
        self.lane = lane_of()
        self.sent: list[ToWorker] = []
        self.rejected: list[IskanderError] = []
        self.changes = 0
        self.outages = Outages({0: self.lane}, self._reject, self._on_change, self._send)
        self.add_worker(1)

    def add_worker(self, incarnation: int) -> None:
        worker: Any = SimpleNamespace(
            incarnation=incarnation, in_flight={}, channel=object(), is_looping=False
        )
        self.lane.workers = {incarnation: worker}

    def fail(self, count: int) -> None:
        for _ in range(count):
            self.outages.on_unreachable(self.lane, LOST)

    def _reject(self, lane: Lane, error: IskanderError) -> None:
        self.rejected.append(error)

    def _send(self, worker: WorkerSlot, messages: Sequence[ToWorker]) -> None:
        self.sent += messages

    def _on_change(self) -> None:
        self.changes += 1


@pytest.fixture
def fixture(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    monkeypatch.setattr(outages_module, "PROBE_S", 0.0)
    found = Fixture()
    yield found
    found.outages.close()


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0.001)


def test_outage_begins_after_failures_in_a_row(fixture: Fixture) -> None:
    async def run() -> None:
        fixture.fail(FAILURES_MAX - 1)
        fixture.lane.unreachable = 0  # A batch reached the server.
        fixture.fail(FAILURES_MAX - 1)
        assert not fixture.lane.outage and fixture.lane.is_ready
        fixture.fail(3)
        assert (fixture.lane.outage, fixture.changes) == (LOST.message, 1)
        assert not fixture.lane.is_ready
        (error,) = fixture.rejected
        assert isinstance(error, RemoteUnavailable) and error.retry_after_ms == 1000
        with pytest.raises(RemoteUnavailable, match="h:1"):
            fixture.lane.require_worker()
        fixture.outages.close()

    asyncio.run(run())


def test_one_check_at_a_time_until_the_server_is_ready(fixture: Fixture) -> None:
    async def run() -> None:
        fixture.fail(FAILURES_MAX)
        await turns()
        assert fixture.sent == [Probe(0)]
        fixture.outages.on_probed(Probed(0, "still down"))
        assert fixture.lane.outage == "still down"
        await turns()
        assert fixture.sent == [Probe(0), Probe(0)]
        fixture.outages.on_probed(Probed(0, ""))
        assert fixture.lane.is_ready and fixture.lane.unreachable == 0
        await turns()
        assert len(fixture.sent) == 2
        fixture.fail(FAILURES_MAX)
        assert fixture.lane.outage
        fixture.outages.close()

    asyncio.run(run())


def test_another_worker_is_asked_after_the_loss_of_the_first(fixture: Fixture) -> None:
    async def run() -> None:
        fixture.fail(FAILURES_MAX)
        await turns()
        fixture.lane.workers = {}
        await turns()
        assert len(fixture.sent) == 1
        fixture.add_worker(2)
        await turns()
        assert len(fixture.sent) == 2
        fixture.outages.close()

    asyncio.run(run())


def test_checks_end_with_the_lane(fixture: Fixture) -> None:
    async def run() -> None:
        fixture.fail(FAILURES_MAX)
        fixture.lane.is_retired = True
        await turns()
        assert fixture.sent == []
        fixture.outages.on_probed(Probed(7, ""))

    asyncio.run(run())


def test_late_answer_for_a_retired_lane_is_no_error(fixture: Fixture) -> None:
    """The timer of its checks is gone."""

    async def run() -> None:
        fixture.fail(FAILURES_MAX)
        fixture.lane.is_retired = True
        await turns()
        fixture.outages.on_probed(Probed(0, ""))
        assert not fixture.lane.outage

    asyncio.run(run())
