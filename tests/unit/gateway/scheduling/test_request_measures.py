"""Measures of requests: one point per request, labelled with model and client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import CONTRACT, MS, model_of
from support.simulation import Simulation

from iskander.config.models import LaneConfig
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.scheduling.lanes.lane import Lane

MEASURES = ("scheduling_wait_ms", "inference_latency_ms", "e2e_latency_ms")
RUN_NS = 2 * MS


@pytest.fixture
def recent() -> RecentValues:
    return RecentValues()


@pytest.fixture
def gateway(recent: RecentValues) -> Iterator[Simulation]:
    lane = Lane(model_of(rows_max=8), LaneConfig(), recent=recent)
    lane.set_contract(CONTRACT)
    with Simulation(lane) as gateway:
        yield gateway


def counts(recent: RecentValues, **labels: str) -> list[int]:
    """Number of points of each of `MEASURES` with these labels."""
    return [recent.query(name, labels).count for name in MEASURES]


def test_request_records_one_point_of_each_measure(
    gateway: Simulation, recent: RecentValues
) -> None:
    """One batch with two named clients and an unnamed one."""
    worker = gateway.start()
    for client in ("robot", "arm"):
        gateway.submit_rows(client=client, is_named=True)
    gateway.submit_rows()
    gateway.loop.turn()
    (execute,) = worker.sent
    gateway.loop.run(3 * MS)
    worker.run(execute, RUN_NS)

    assert counts(recent) == [3, 3, 3]
    assert counts(recent, model="m0", version="1", client="robot") == [1, 1, 1]
    assert counts(recent, client="arm") == [1, 1, 1]
    assert recent.query("batch_size").count == 1
    assert recent.query("inference_latency_ms", {"client": "robot"}).latest == RUN_NS / MS
    assert recent.query("e2e_latency_ms", {"client": "robot"}).latest == 3.0


def test_scheduling_wait_ends_when_the_request_is_sent(
    gateway: Simulation, recent: RecentValues
) -> None:
    gateway.lanes[0].is_awaiting_worker = True
    gateway.submit_rows(client="robot", is_named=True)
    gateway.loop.run(4 * MS)
    worker = gateway.start()
    gateway.loop.run(5 * MS)
    worker.run(worker.sent[0])

    assert recent.query("scheduling_wait_ms", {"client": "robot"}).latest == 4.0


def test_split_request_records_one_point(gateway: Simulation, recent: RecentValues) -> None:
    worker = gateway.start()
    worker.play()
    _, caller = gateway.submit_rows(rows=30, client="robot", is_named=True)
    gateway.loop.run(100 * MS)

    assert len(caller.results) == 1 and recent.query("batch_size").count == 4
    assert counts(recent) == counts(recent, client="robot") == [1, 1, 1]


def test_failed_request_records_no_points(gateway: Simulation, recent: RecentValues) -> None:
    worker = gateway.start()
    worker.reference = lambda values: "execution_failed"
    worker.play()
    _, caller = gateway.submit_rows(client="robot", is_named=True)
    gateway.loop.run(100 * MS)

    assert caller.outcome_count == 1 and not caller.results
    assert counts(recent) == [0, 0, 0]
    assert recent.query("dispatch_retries").count == 0


def test_each_retry_records_a_point_with_its_client(
    gateway: Simulation, recent: RecentValues
) -> None:
    """After a batch that the model rejects, and after a lost worker."""
    worker = gateway.start()
    worker.reference = lambda values: "execution_failed" if len(values) > 1 else None
    gateway.submit_rows(client="robot", is_named=True)
    gateway.submit_rows()
    gateway.loop.turn()
    worker.run(worker.sent[0])
    assert recent.query("dispatch_retries").count == 2

    gateway.dispatcher.pump()
    gateway.lose(worker)
    gateway.start().play()
    gateway.loop.run(100 * MS)
    assert recent.query("dispatch_retries", {"client": "robot"}).count == 2
    assert recent.query("dispatch_retries", {"model": "m0", "version": "1"}).count == 4
    assert counts(recent) == [2, 2, 2]
    assert counts(recent, client="robot") == [1, 1, 1]
