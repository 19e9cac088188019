"""The last points that requests leave: what is measured, once for each, and of whom."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import CONTRACT, MS, model_of
from support.simulation import Simulation

from iskander.config.models import LaneConfig
from iskander.measurement.recent_values import RecentValues
from iskander.scheduling.lane import Lane

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
    """Points of each of `MEASURES` that have these labels."""
    return [recent.query(name, labels).count for name in MEASURES]


def test_a_request_leaves_one_point_of_each_measure_whoever_it_is_of(
    gateway: Simulation, recent: RecentValues
) -> None:
    """Of one batch: two clients that have names, and one that has none."""
    worker = gateway.start()
    for client in ("robot", "arm"):
        gateway.ask(client=client, is_named=True)
    gateway.ask()
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


def test_a_wait_ends_when_a_worker_gets_the_request(
    gateway: Simulation, recent: RecentValues
) -> None:
    gateway.lanes[0].is_awaiting_worker = True
    gateway.ask(client="robot", is_named=True)
    gateway.loop.run(4 * MS)
    worker = gateway.start()
    gateway.loop.run(5 * MS)
    worker.run(worker.sent[0])

    assert recent.query("scheduling_wait_ms", {"client": "robot"}).latest == 4.0


def test_a_request_that_runs_in_pieces_is_one_request(
    gateway: Simulation, recent: RecentValues
) -> None:
    worker = gateway.start()
    worker.play()
    _, caller = gateway.ask(rows=30, client="robot", is_named=True)
    gateway.loop.run(100 * MS)

    assert len(caller.results) == 1 and recent.query("batch_size").count == 4
    assert counts(recent) == counts(recent, client="robot") == [1, 1, 1]


def test_what_has_no_results_leaves_no_points_of_them(
    gateway: Simulation, recent: RecentValues
) -> None:
    worker = gateway.start()
    worker.reference = lambda values: "execution_failed"
    worker.play()
    _, caller = gateway.ask(client="robot", is_named=True)
    gateway.loop.run(100 * MS)

    assert caller.told == 1 and not caller.results
    assert counts(recent) == [0, 0, 0]
    assert recent.query("dispatch_retries").count == 0


def test_every_retry_is_a_point_of_whose_it_is(gateway: Simulation, recent: RecentValues) -> None:
    """A batch that the model refuses runs again caller by caller; one whose worker dies too."""
    worker = gateway.start()
    worker.reference = lambda values: "execution_failed" if len(values) > 1 else None
    gateway.ask(client="robot", is_named=True)
    gateway.ask()
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
