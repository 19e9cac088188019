"""Lanes that share workers: shares by weight, starvation, linger, and slow runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.errors import DeadlineUnreachable
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.interprocess.control.channel import FRAME_BYTES_MAX
from iskander.interprocess.control.messages import Execute, Failed, encode
from iskander.interprocess.memory.arena import GRAIN_BYTES

MANY = {"queue_requests": 1_000_000, "client_requests": 1_000_000, "ttl_ms": 0}


def busy_lane(key: int, weight: float = 1.0, **settings: float) -> Lane:
    return lane_of(key, rows_max=8, weight=weight, **MANY, **settings)  # type: ignore[arg-type]


def fill(gateway: Simulation, key: int, rows: int = 8, until: int = 20) -> None:
    """Submit requests until the queue has `until` of them."""
    while len(gateway.lanes[key].queue) < until:
        gateway.submit_rows(key, rows)


def shares(
    gateway: Simulation, rows: dict[int, int], cost: Callable[[Execute], int], for_ms: int
) -> dict[int, float]:
    """Return each lane's share of the workers' time while all lanes have queued requests."""
    for worker in gateway.workers:
        worker.cost = cost
        worker.play()
    end_ns = gateway.loop.now_ns + for_ms * MS
    while gateway.loop.now_ns < end_ns:
        for key, each in rows.items():
            fill(gateway, key, each)
        gateway.loop.run(MS)
    run_time = dict.fromkeys(rows, 0)
    for worker in gateway.workers:
        for execute in worker.ran:
            run_time[execute.model] += cost(execute)
    return {key: time / sum(run_time.values()) for key, time in run_time.items()}


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("costs_ms", [(1, 1), (1, 7), (5, 1)])
def test_time_is_shared_by_weight(workers: int, costs_ms: tuple[int, int]) -> None:
    """The shares do not depend on the run times of the lanes' batches."""
    with Simulation(busy_lane(0, 1.0), busy_lane(1, 3.0)) as gateway:
        for _ in range(workers):
            gateway.start()
        actual = shares(gateway, {0: 8, 1: 8}, lambda e: costs_ms[e.model] * MS, for_ms=1000)

    assert actual[0] == pytest.approx(0.25, rel=0.1)
    assert actual[1] == pytest.approx(0.75, rel=0.1)


def test_unexpectedly_long_batches_count_against_the_share() -> None:
    """One in ten batches of one lane takes 100 times as long; the cost model ignores them."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        gateway.start()
        actual = shares(
            gateway,
            {0: 8, 1: 8},
            lambda e: MS * (100 if e.model and e.batch_id % 10 == 0 else 1),
            for_ms=10_000,
        )

    assert actual[0] == pytest.approx(0.5, rel=0.1)


def test_idle_time_earns_no_credit() -> None:
    """A lane that was idle for a second gets no extra time afterwards."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        gateway.start()
        shares(gateway, {0: 8}, lambda e: MS, for_ms=1000)
        before = len(gateway.workers[0].ran)
        shares(gateway, {0: 8, 1: 8}, lambda e: MS, for_ms=200)
        models = [execute.model for execute in gateway.workers[0].ran[before:]]

    assert models.count(0) == pytest.approx(models.count(1), rel=0.1)


def is_served_within(gateway: Simulation, caller: RecordingCaller, limit_ns: int) -> bool:
    until_ns = gateway.loop.now_ns + limit_ns
    while not caller.outcome_count and gateway.loop.step(until_ns):
        pass
    return bool(caller.results)


def start_trained_worker(gateway: Simulation, *keys: int) -> SimulatedWorker:
    """Start a worker and train the cost models of the lanes on it: 2 ms + 10 us per row."""
    worker = gateway.start()
    worker.cost = lambda execute: 2 * MS + 10_000 * execute.rows
    worker.play()
    for key in keys:
        for rows in (1, 8, 1, 8, 1):
            gateway.submit_rows(key, rows)
            gateway.loop.run(10 * MS)
    return worker


@pytest.mark.parametrize("terms", [{}, {"budget_ms": 50.0}])
def test_single_request_is_not_starved_by_full_batches(terms: dict[str, float]) -> None:
    """The other lane always has full batches, and no request joins this one's batch."""
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        start_trained_worker(gateway, 0, 1)
        fill(gateway, 0, until=2000)
        gateway.loop.run(MS)
        _, caller = gateway.submit_rows(1, 1, **terms)

        assert is_served_within(gateway, caller, 20 * MS)
        assert len(gateway.lanes[0].queue) > 1000


@pytest.mark.parametrize("policy", ["deadline_aware", "fifo", "round_robin"])
def test_full_batches_of_two_lanes_alternate(policy: str) -> None:
    with Simulation(busy_lane(0), busy_lane(1)) as gateway:
        start_trained_worker(gateway, 0, 1)
        fill(gateway, 0, until=2000)
        gateway.loop.run(MS)
        _, caller = gateway.submit_rows(1, 8)

        assert is_served_within(gateway, caller, 20 * MS)


def test_work_on_other_workers_does_not_delay_a_lane() -> None:
    """Lane 0 has its own worker; lanes 1 and 2 share one. Lane 2 was idle, and its next request
    must not wait for the whole queue of lane 1."""
    with Simulation(busy_lane(0, 0.01), busy_lane(1), busy_lane(2)) as gateway:
        gateway.start(0).play()
        gateway.start(1, 2).play()
        fill(gateway, 0, until=200)
        fill(gateway, 1, until=2000)
        gateway.loop.run(20 * MS)
        _, caller = gateway.submit_rows(2, 8)

        assert is_served_within(gateway, caller, 10 * MS)


def test_lane_with_large_results_is_not_starved_by_one_with_small_ones() -> None:
    """Its batch needs the whole output arena; each of the other lane's needs half of it."""
    with Simulation(lane_of(0, rows_max=1024), busy_lane(1)) as gateway:
        gateway.start(output_bytes=2 * GRAIN_BYTES).play()
        fill(gateway, 1, until=2000)
        gateway.loop.run(MS)
        _, caller = gateway.submit_rows(0, 1024)

        assert is_served_within(gateway, caller, 20 * MS)
        assert len(gateway.lanes[1].queue) > 1000


def test_batch_without_results_counts_no_longer_than_it_was_in_flight() -> None:
    """It is cancelled after half of its expected time of 2 ms."""
    with Simulation(busy_lane(0)) as gateway:
        worker = start_trained_worker(gateway, 0)
        before_ns = gateway.lanes[0].virtual_ns
        gateway.submit_rows(0, 8)
        gateway.loop.run(MS)
        cancelled = Failed(worker.sent[-1].batch_id, "cancelled", "no")
        gateway.dispatcher.on_failed(worker, cancelled)

        assert gateway.lanes[0].virtual_ns - before_ns == pytest.approx(MS)


def test_slow_first_run_does_not_cause_lasting_rejections() -> None:
    """The first run takes 50 ms, later ones 1 ms; the clients' budget is 20 ms."""
    with Simulation(lane_of(0)) as gateway:
        worker = gateway.start()
        worker.play()
        worker.cost = lambda execute: 50 * MS
        gateway.submit_rows()
        gateway.loop.run(100 * MS)
        worker.cost = lambda execute: MS
        served = 0
        for _ in range(2000):
            try:
                _, caller = gateway.submit_rows(0, 1, budget_ms=20.0)
            except DeadlineUnreachable:
                continue
            finally:
                gateway.loop.run(10 * MS)
            served += bool(caller.results)

    assert served > 1000


def test_execute_frame_is_within_the_channel_limit() -> None:
    lane = lane_of(0, rows_max=65_536, **MANY)  # type: ignore[arg-type]
    with Simulation(lane, input_bytes=1 << 28) as gateway:
        worker = gateway.start(output_bytes=1 << 26)
        for _ in range(20_000):
            gateway.submit_rows()
        gateway.loop.turn()

        assert len(encode(worker.sent)) <= FRAME_BYTES_MAX


def test_requests_due_before_the_linger_are_served_in_time() -> None:
    """Linger is 10 ms, the budget 5 ms and the run time 2 ms."""
    with Simulation(lane_of(0, linger_us=10_000)) as gateway:
        start_trained_worker(gateway, 0)
        callers = []
        for _ in range(50):
            callers.append(gateway.submit_rows(0, 1, budget_ms=5.0)[1])
            gateway.loop.run(20 * MS)

        assert [caller.codes for caller in callers] == [[]] * 50


def test_lingering_batch_is_sent_after_the_linger() -> None:
    with Simulation(lane_of(0, linger_us=10_000)) as gateway:
        worker = gateway.start()
        gateway.submit_rows()
        gateway.loop.run(6 * MS)
        gateway.submit_rows()
        gateway.loop.run(3 * MS)
        assert worker.sent == []
        gateway.loop.run(2 * MS)

        assert [len(execute.slices) for execute in worker.sent] == [2]
        assert gateway.lanes[0].counts["closed.linger"] == 1


def test_batch_for_a_busy_worker_grows_until_the_worker_is_nearly_free() -> None:
    """Requests that arrive during a batch run together in the next batch."""
    with Simulation(busy_lane(0)) as gateway:
        worker = start_trained_worker(gateway, 0)
        before = len(worker.sent)
        for _ in range(4):
            gateway.submit_rows()
            gateway.loop.run(MS // 3)
        assert len(worker.sent) == before + 1
        gateway.loop.run(50 * MS)

        assert [len(e.slices) for e in worker.sent[before:]] == [1, 3]


@pytest.mark.parametrize("before", [3, 10, 200])
def test_one_slow_run_causes_few_rejections(before: int) -> None:
    """Runs take 10 ms, one takes 500 ms, and the budget is 12 ms."""
    with Simulation(lane_of(0)) as gateway:
        worker = gateway.start()
        worker.play()
        served = 0
        for turn in range(before + 3000):
            worker.cost = lambda execute, is_slow=turn == before: (500 if is_slow else 10) * MS
            try:
                _, caller = gateway.submit_rows(0, 1, budget_ms=12.0)
            except DeadlineUnreachable:
                caller = None
            gateway.loop.run(20 * MS)
            served += bool(caller and caller.results)

    assert served > 0.9 * (before + 3000)
