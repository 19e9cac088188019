"""Several lanes on the same workers: shares by weight, and nobody is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.control.channel import FRAME_BYTES_MAX
from iskander.control.messages import Execute, encode
from iskander.errors import DeadlineUnreachable
from iskander.scheduling.lane import Lane

MANY = {"queue_requests": 1_000_000, "client_requests": 1_000_000, "ttl_ms": 0}


def busy_lane(key: int, weight: float = 1.0, **settings: float) -> Lane:
    return lane_of(key, rows_max=8, weight=weight, **MANY, **settings)  # type: ignore[arg-type]


def fill(gateway: Simulation, key: int, rows: int = 8, until: int = 20) -> None:
    """Keep so many requests waiting."""
    while len(gateway.lanes[key].queue) < until:
        gateway.ask(key, rows)


def shares(
    gateway: Simulation, rows: dict[int, int], cost: Callable[[Execute], int], for_ms: int
) -> dict[int, float]:
    """Share of the workers' time that each lane has, while all of them always have requests."""
    for worker in gateway.workers:
        worker.cost = cost
        worker.play()
    end_ns = gateway.loop.now_ns + for_ms * MS
    while gateway.loop.now_ns < end_ns:
        for key, each in rows.items():
            fill(gateway, key, each)
        gateway.loop.run(MS)
    spent = dict.fromkeys(rows, 0)
    for worker in gateway.workers:
        for execute in worker.ran:
            spent[execute.model] += cost(execute)
    return {key: time / sum(spent.values()) for key, time in spent.items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("costs_ms", [(1, 1), (1, 7), (5, 1)])
def test_time_is_shared_by_weight(workers: int, costs_ms: tuple[int, int]) -> None:
    """Whatever a batch of either takes: a quarter and three quarters."""
    with Simulation(busy_lane(0, 1.0), busy_lane(1, 3.0)) as gateway:
        for _ in range(workers):
            gateway.start()
        got = shares(gateway, {0: 8, 1: 8}, lambda e: costs_ms[e.model] * MS, for_ms=1000)

    assert got[0] == pytest.approx(0.25, rel=0.1)
    assert got[1] == pytest.approx(0.75, rel=0.1)


def test_batches_that_take_longer_than_expected_are_paid_for() -> None:
    """Of one lane one in ten takes a hundred times as long, which no cost is learned from."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        gateway.start()
        got = shares(
            gateway,
            {0: 8, 1: 8},
            lambda e: MS * (100 if e.model and e.batch_id % 10 == 0 else 1),
            for_ms=10_000,
        )

    assert got[0] == pytest.approx(0.5, rel=0.1)


def test_idle_time_is_not_saved_up() -> None:
    """One lane had the worker to itself for a second; the other gets no second in return."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        gateway.start()
        shares(gateway, {0: 8}, lambda e: MS, for_ms=1000)
        before = len(gateway.workers[0].ran)
        shares(gateway, {0: 8, 1: 8}, lambda e: MS, for_ms=200)
        models = [execute.model for execute in gateway.workers[0].ran[before:]]

    assert models.count(0) == pytest.approx(models.count(1), rel=0.1)


def told_within(gateway: Simulation, caller: RecordingCaller, limit_ns: int) -> bool:
    until_ns = gateway.loop.now_ns + limit_ns
    while not caller.told and gateway.loop.step(until_ns):
        pass
    return bool(caller.results)


def learned(gateway: Simulation, *keys: int) -> SimulatedWorker:
    """A worker, and lanes that know what their batches cost on it: 2 ms, and little for a row."""
    worker = gateway.start()
    worker.cost = lambda execute: 2 * MS + 10_000 * execute.rows
    worker.play()
    for key in keys:
        for rows in (1, 8, 1, 8, 1):
            gateway.ask(key, rows)
            gateway.loop.run(10 * MS)
    return worker


@pytest.mark.parametrize("terms", [{}, {"budget_ms": 50.0}])
def test_one_request_is_not_kept_for_ever_behind_full_batches(terms: dict[str, float]) -> None:
    """Another lane always has full batches; this one's would gain by growing, and none comes."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        learned(gateway, 0, 1)
        fill(gateway, 0, until=2000)
        gateway.loop.run(MS)
        _, caller = gateway.ask(1, 1, **terms)

        assert told_within(gateway, caller, 20 * MS)
        assert len(gateway.lanes[0].queue) > 1000


@pytest.mark.parametrize("policy", ["deadline_aware", "fifo", "round_robin"])
def test_full_batches_take_turns_with_full_batches(policy: str) -> None:
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        learned(gateway, 0, 1)
        fill(gateway, 0, until=2000)
        gateway.loop.run(MS)
        _, caller = gateway.ask(1, 8)

        assert told_within(gateway, caller, 20 * MS)


def test_a_lane_pays_nothing_for_what_others_do_on_other_workers() -> None:
    """A model of little weight is served elsewhere; two others share a worker. One of these was
    idle for a moment, and must not wait for all of the other's work before it is served again."""
    with Simulation(busy_lane(0, 0.01), busy_lane(1), busy_lane(2)) as gateway:
        gateway.start(0).play()
        gateway.start(1, 2).play()
        fill(gateway, 0, until=200)
        fill(gateway, 1, until=2000)
        gateway.loop.run(20 * MS)
        _, caller = gateway.ask(2, 8)

        assert told_within(gateway, caller, 10 * MS)


def test_a_slow_first_run_does_not_refuse_everything_for_ever() -> None:
    """50 ms, where every later one takes 1 ms; clients give 20 ms, and the worker is idle."""
    with Simulation(lane_of(0)) as gateway:
        worker = gateway.start()
        worker.play()
        worker.cost = lambda execute: 50 * MS
        gateway.ask()
        gateway.loop.run(100 * MS)
        worker.cost = lambda execute: MS
        served = 0
        for _ in range(2000):
            try:
                _, caller = gateway.ask(0, 1, budget_ms=20.0)
            except DeadlineUnreachable:
                continue
            finally:
                gateway.loop.run(10 * MS)
            served += bool(caller.results)

    assert served > 1000


def test_no_frame_is_longer_than_the_socket_takes() -> None:
    lane = lane_of(0, rows_max=65_536, **MANY)  # type: ignore[arg-type]
    with Simulation(lane, input_bytes=1 << 28) as gateway:
        worker = gateway.start(output_bytes=1 << 26)
        for _ in range(20_000):
            gateway.ask()
        gateway.loop.turn()

        assert len(encode(worker.sent)) <= FRAME_BYTES_MAX


def test_a_lane_that_lingers_serves_requests_that_are_due_sooner() -> None:
    """Lingering for 10 ms, requests are due in 5 and take 2: each runs, in time."""
    with Simulation(lane_of(0, linger_us=10_000)) as gateway:
        learned(gateway, 0)
        asked = []
        for _ in range(50):
            asked.append(gateway.ask(0, 1, budget_ms=5.0)[1])
            gateway.loop.run(20 * MS)

        assert [caller.codes for caller in asked] == [[]] * 50


def test_a_batch_that_lingers_goes_when_its_time_is_over() -> None:
    with Simulation(lane_of(0, linger_us=10_000)) as gateway:
        worker = gateway.start()
        gateway.ask()
        gateway.loop.run(6 * MS)
        gateway.ask()
        gateway.loop.run(3 * MS)
        assert worker.sent == []
        gateway.loop.run(2 * MS)

        assert [len(execute.slices) for execute in worker.sent] == [2]
        assert gateway.lanes[0].counts["closed.linger"] == 1


def test_a_batch_for_a_busy_worker_grows_until_it_is_nearly_free() -> None:
    """Requests that come one by one while another batch runs go together, and just before."""
    with Simulation(busy_lane(0)) as gateway:
        worker = learned(gateway, 0)
        before = len(worker.sent)
        for _ in range(4):
            gateway.ask()
            gateway.loop.run(MS // 3)
        assert len(worker.sent) == before + 1
        gateway.loop.run(50 * MS)

        assert [len(e.slices) for e in worker.sent[before:]] == [1, 3]


@pytest.mark.parametrize("before", [3, 10, 200])
def test_one_slow_run_refuses_few(before: int) -> None:
    """Runs of 10 ms are due in 12; one takes half a second. Of the next 60 s most are served."""
    with Simulation(lane_of(0)) as gateway:
        worker = gateway.start()
        worker.play()
        served = 0
        for turn in range(before + 3000):
            worker.cost = lambda execute, is_slow=turn == before: (500 if is_slow else 10) * MS
            try:
                _, caller = gateway.ask(0, 1, budget_ms=12.0)
            except DeadlineUnreachable:
                caller = None
            gateway.loop.run(20 * MS)
            served += bool(caller and caller.results)

    assert served > 0.9 * (before + 3000)
