"""Dispatcher: batches for workers, and exactly one result or error for each request.

Workers are real except for their processes, which are simulated on a virtual clock
(`support/simulation.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.config.models import LaneConfig
from iskander.contract.processing.row_relation import RowRelation
from iskander.errors import NotReady
from iskander.foundation.logs import requests
from iskander.gateway.scheduling.lanes.policies import POLICIES, Fifo, GuardedPolicy
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import CREDITS
from iskander.interprocess.control.messages import Done, Execute, Failed, Slice
from iskander.interprocess.memory.arena import GRAIN_BYTES


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8), lane_of(1, rows_max=8)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


def submit(gateway: Simulation, *rows: int, lane: int = 0) -> list[tuple[Request, RecordingCaller]]:
    """Submits requests in one loop iteration, and runs it."""
    submitted = [
        gateway.submit_rows(lane, each, first=100 * index) for index, each in enumerate(rows)
    ]
    gateway.loop.turn()
    return submitted


def values_of(caller: RecordingCaller) -> list[int]:
    (result,) = caller.results
    return np.frombuffer(result, np.int64).tolist()


def has_own_rows(submitted: tuple[Request, RecordingCaller], first: int) -> bool:
    """Whether the results are exactly the rows of the request."""
    request, caller = submitted
    expected = list(range(first, first + request.rows))
    return not caller.errors and values_of(caller)[: request.rows] == expected


def rows_of(execute: Execute) -> list[int]:
    return [each.rows for each in execute.slices]


def test_execute_message_refers_to_the_arenas(gateway: Simulation, worker: SimulatedWorker) -> None:
    ((request, _),) = submit(gateway, 5, lane=1)

    (batch,) = worker.in_flight.values()
    expected = Slice(request.body_offset, 5, 0, 5, batch.output.offset)
    assert worker.sent == [Execute(1, 1, 5, (expected,))]
    assert [part.request for part in batch.parts] == [request]
    assert not len(gateway.lanes[1].queue) and request.running == 1


def test_requests_of_one_loop_iteration_share_batches_and_one_frame(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Nothing is sent before the iteration ends; four requests fill two batches, in order."""
    submitted = [
        gateway.submit_rows(0, rows, first=100 * index) for index, rows in enumerate((3, 4, 1, 6))
    ]
    assert worker.sent == []

    gateway.loop.turn()

    assert [rows_of(execute) for execute in worker.sent] == [[3, 4, 1], [6]]
    assert worker.wire.frames == 1
    for execute in list(worker.sent):
        gateway.done(worker, execute)
    assert all(has_own_rows(each, 100 * index) for index, each in enumerate(submitted))
    assert gateway.is_clean()


def test_request_larger_than_a_batch_is_split_and_reassembled(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Its batches complete out of order, and one has rows of another request."""
    large, small = submit(gateway, 20, 3)
    gateway.done(worker, worker.sent[1])
    assert large[1].outcome_count == 0
    for execute in (worker.sent[0], worker.sent[2]):
        gateway.done(worker, execute)

    assert [rows_of(execute) for execute in worker.sent] == [[8], [8], [4, 3]]
    assert has_own_rows(large, 0) and has_own_rows(small, 100)
    assert len(large[1].results[0]) == gateway.lanes[0].layout(20).output_bytes
    assert gateway.is_clean()


def test_batch_is_padded_to_the_next_size() -> None:
    with Simulation(lane_of(0, rows_max=16, pad_to=(4, 16))) as gateway:
        worker = gateway.start()
        submitted = submit(gateway, 2, 3)
        gateway.done(worker, worker.sent[0])

        assert (worker.sent[0].rows, rows_of(worker.sent[0])) == (16, [2, 3])
        assert has_own_rows(submitted[0], 0) and has_own_rows(submitted[1], 100)
        assert gateway.lanes[0].metrics.batch_rows.sum == 5


def test_results_are_delivered_and_resources_released(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, caller),) = submit(gateway, 4)

    gateway.done(worker, worker.sent[0])

    assert values_of(caller)[:4] == [0, 1, 2, 3]
    assert (request.lease, request.is_over, request.running) == (None, True, 0)
    assert (worker.credits, worker.in_flight, worker.batches) == (CREDITS, {}, 1)
    assert gateway.lanes[0].counts["completed"] == 1
    assert gateway.is_clean()


@pytest.mark.parametrize("code", ["contract", "limit", "internal", "cancelled"])
def test_failed_batch_gives_its_error_code_and_releases_resources(
    gateway: Simulation, worker: SimulatedWorker, code: str
) -> None:
    ((_, caller),) = submit(gateway, 2)
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, code, "no"))

    assert caller.codes == [code]
    assert gateway.lanes[0].counts[f"failed.{code}"] == 1
    assert worker.credits == CREDITS and gateway.is_clean()


def test_batch_has_the_latest_deadline_and_most_hops_of_its_requests(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    gateway.submit_rows(0, 1, budget_ms=20.0, hops=2)
    gateway.submit_rows(0, 1, budget_ms=50.0)
    gateway.loop.turn()
    gateway.submit_rows(0, 1, budget_ms=20.0)
    gateway.submit_rows(0, 1)
    gateway.loop.turn()

    both, unlimited = worker.sent
    assert (both.deadline_ns, both.hops) == (gateway.loop.now_ns + 50 * MS, 2)
    assert (unlimited.deadline_ns, unlimited.hops) == (0, 0)


def test_lost_remote_server_is_counted_until_it_answers(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """All requests of a batch fail with it, with the time to retry that the worker reports."""
    lane, lost = gateway.lanes[0], []
    gateway.dispatcher.on_unreachable = lambda lane, error: lost.append(lane.unreachable)
    submitted = submit(gateway, 1, 1)
    failed = Failed(worker.sent[0].batch_id, "remote_unavailable", "lost", 250)
    gateway.dispatcher.on_failed(worker, failed)
    assert lost == [0]
    for _, caller in submitted:
        assert [(e.code, e.retry_after_ms) for e in caller.errors] == [("remote_unavailable", 250)]
    for code, left in (("remote_overloaded", 0), (None, 0)):
        lane.unreachable = 3
        submit(gateway, 1)
        if code is None:
            gateway.done(worker, worker.sent[-1])
        else:
            gateway.dispatcher.on_failed(worker, Failed(worker.sent[-1].batch_id, code, "busy"))
        assert lane.unreachable == left
    assert gateway.is_clean()


@pytest.mark.parametrize("code", ["execution_failed", "contract", "limit"])
def test_requests_of_a_failed_batch_are_retried_one_by_one(
    gateway: Simulation, worker: SimulatedWorker, code: str
) -> None:
    """The model, or a vocabulary before it, rejects a value of the third of four requests."""
    worker.reference = lambda values: code if 200 in values else None
    worker.play()
    submitted = submit(gateway, 2, 2, 2, 2)
    gateway.loop.run(100 * MS)

    assert [rows_of(execute) for execute in worker.sent] == [[2, 2, 2, 2], [2], [2], [2], [2]]
    assert submitted[2][1].codes == [code]
    assert all(has_own_rows(submitted[index], 100 * index) for index in (0, 1, 3))
    assert gateway.lanes[0].counts["retried"] == 4 and gateway.is_clean()


def test_failed_split_request_drops_all_its_parts(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """One part is done, one fails, and the third is queued."""
    ((request, caller),) = submit(gateway, 24)
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, "execution_failed", "no"))
    assert caller.codes == ["execution_failed"]
    assert request.lease is not None, "a worker still reads it"

    gateway.done(worker, worker.sent[1])

    assert len(worker.sent) == 2 and caller.outcome_count == 1 and gateway.is_clean()


def test_credits_bound_sent_batches(gateway: Simulation, worker: SimulatedWorker) -> None:
    """Each completed batch permits one more."""
    submitted = submit(gateway, *[8] * (CREDITS + 3))
    assert len(worker.sent) == gateway.dispatcher.in_flight == CREDITS
    assert list(gateway.lanes[0].queue) == [request for request, _ in submitted[CREDITS:]]

    gateway.done(worker, worker.sent[0])

    assert len(worker.sent) == CREDITS + 1 and gateway.dispatcher.in_flight == CREDITS
    assert [execute.batch_id for execute in worker.sent] == list(range(1, CREDITS + 2))


def test_batches_are_spread_over_the_workers(gateway: Simulation) -> None:
    """Most credits first: each worker gets one batch before any gets two."""
    workers = [gateway.start() for _ in range(3)]

    submit(gateway, 8, 8, 8)
    assert [len(worker.sent) for worker in workers] == [1, 1, 1]
    submit(gateway, *[8] * 6)
    assert [len(worker.sent) for worker in workers] == [2, 2, 2]
    assert len(gateway.lanes[0].queue) == 3


def test_blocked_lane_does_not_block_another(gateway: Simulation) -> None:
    busy, free = gateway.start(0), gateway.start(1)
    submit(gateway, *[8] * (CREDITS + 1))

    submit(gateway, 1, lane=1)

    assert len(busy.sent) == CREDITS
    assert [execute.model for execute in free.sent] == [1]


def test_held_lane_sends_nothing_until_its_release(gateway: Simulation) -> None:
    """It waits for the reason why a worker ended that ran one of its batches."""
    worker = gateway.start(0)
    gateway.lanes[0].is_held = True
    submit(gateway, 8)
    assert not worker.sent

    gateway.lanes[0].is_held = False
    gateway.dispatcher.pump()

    assert len(worker.sent) == 1


def test_worker_serves_only_lanes_of_its_models(gateway: Simulation) -> None:
    gateway.start(0)

    assert gateway.lanes[0].is_ready and not gateway.lanes[1].is_ready
    with pytest.raises(NotReady):
        gateway.submit_rows(1)


def test_batch_waits_for_space_in_the_output_arena() -> None:
    """The worker has a credit, but no space for results until a batch completes."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        worker = gateway.start(output_bytes=2 * GRAIN_BYTES)
        submit(gateway, 1024, 1024)
        assert (len(worker.sent), worker.credits) == (1, CREDITS - 1)

        gateway.done(worker, worker.sent[0])
        assert len(worker.sent) == 2


def test_batch_is_limited_by_the_output_arena() -> None:
    """Results are rounded up for each request, so many small ones need more than one large."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        worker = gateway.start(output_bytes=GRAIN_BYTES)
        submitted = submit(gateway, *[1] * 100)
        assert rows_of(worker.sent[0]) == [1] * (GRAIN_BYTES // 64)
        worker.play()
        gateway.loop.run(100 * MS)

        assert all(has_own_rows(each, 100 * index) for index, each in enumerate(submitted))


def test_batch_goes_to_another_worker_if_an_output_arena_is_full() -> None:
    """Both workers have one credit left; only the second has space for the results."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        full = gateway.start(output_bytes=2 * GRAIN_BYTES)
        submit(gateway, 1024)
        other = gateway.start()
        submit(gateway, 1024)
        assert (full.credits, other.credits) == (CREDITS - 1, CREDITS - 1)
        submit(gateway, 1024)

        assert (len(full.sent), len(other.sent)) == (1, 2)


@pytest.mark.parametrize("kind", ["done", "failed"])
def test_late_message_is_counted_and_dropped(gateway: Simulation, kind: str) -> None:
    """The batch is in flight at another worker, or at none."""
    first, second = gateway.start(), gateway.start()
    submitted = submit(gateway, 8, 8)
    (execute,) = second.sent

    for batch_id in (execute.batch_id, 0, 99):
        if kind == "done":
            gateway.dispatcher.on_done(first, Done(batch_id, 7))
        else:
            gateway.dispatcher.on_failed(first, Failed(batch_id, "contract", "no"))

    assert gateway.dispatcher.counts["late_messages"] == 3
    assert [caller.outcome_count for _, caller in submitted] == [0, 0]
    assert first.credits == second.credits == CREDITS - 1


def test_duplicate_response_is_late(gateway: Simulation, worker: SimulatedWorker) -> None:
    ((_, caller),) = submit(gateway, 1)
    for _ in range(2):
        gateway.done(worker, worker.sent[0])

    assert caller.outcome_count == 1 and worker.credits == CREDITS
    assert gateway.dispatcher.counts["late_messages"] == 1


def test_exception_in_deliver_does_not_affect_other_requests(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    # A kept traceback would hold a view of the arena.
    monkeypatch.setattr(
        requests, "result_delivery_failed", lambda *, model, error: logged.append(model)
    )
    (bad, good) = submit(gateway, 1, 1)

    def fail_to_deliver(*_: object) -> None:
        raise ValueError("no")

    bad[1].deliver = fail_to_deliver  # type: ignore[method-assign]
    gateway.done(worker, worker.sent[0])

    assert bad[1].codes == ["internal"] and has_own_rows(good, 100)
    assert gateway.is_clean()
    assert len(logged) == 1


def test_expired_request_is_rejected_and_never_sent(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """It expires while it waits for a credit; the other requests are unaffected."""
    submit(gateway, 8, 8)
    _, timely = gateway.submit_rows(0, 1, ttl_ms=50.0)
    _, late = gateway.submit_rows(0, 1, ttl_ms=5.0)
    gateway.loop.run(4 * MS)
    assert (timely.outcome_count, late.outcome_count) == (0, 0)
    gateway.loop.run(2 * MS)

    assert (timely.codes, late.codes) == ([], ["deadline_exceeded"])
    assert gateway.lanes[0].counts["refused.deadline_exceeded"] == 1
    gateway.done(worker, worker.sent[0])
    assert rows_of(worker.sent[-1]) == [1] and len(gateway.input_arena.arena) == 2


def test_request_that_cannot_meet_its_deadline_is_rejected_at_its_turn(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """It was admitted before the cost of the model, 10 ms, was learned."""
    worker.cost = lambda execute: 10 * MS
    submit(gateway, 8, 8)
    _, doomed = gateway.submit_rows(0, 1, budget_ms=5.0)
    gateway.loop.turn()
    gateway.done(worker, worker.sent[0])

    assert doomed.codes == ["deadline_unreachable"]
    assert len(worker.sent) == 2 and len(gateway.input_arena.arena) == 1


def test_reject_queued_rejects_the_requests_of_one_lane(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    submit(gateway, *[8] * CREDITS)
    ((_, rejected),) = submit(gateway, 1)
    ((_, kept),) = submit(gateway, 1, lane=1)

    gateway.dispatcher.reject_queued(gateway.lanes[0], NotReady("gone", retry_after_ms=1))

    assert (rejected.codes, kept.codes) == (["not_ready"], [])
    assert rejected.errors[0].retry_after_ms is not None
    assert len(gateway.lanes[1].queue) == 1 and len(gateway.input_arena.arena) == CREDITS + 1


def test_outstanding_count_falls_with_every_outcome(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    submitted = [gateway.submit_rows(0, 8, client="a")[0] for _ in range(4)]
    gateway.loop.turn()
    assert gateway.lanes[0].outstanding == {"a": 4}
    gateway.done(worker, worker.sent[0])
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[1].batch_id, "contract", "no"))
    for request in submitted[2:]:
        gateway.dispatcher.withdraw(request)

    assert gateway.lanes[0].outstanding == {}


@pytest.mark.parametrize("seed", range(5))
def test_earliest_deadline_is_sent_first_to_any_free_worker(seed: int) -> None:
    """Full batches, so that each request is sent alone; the workers differ in speed."""
    draw = random.Random(seed)
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        workers = [gateway.start(), gateway.start()]
        gateway.loop.run(10 * MS)
        for _ in range(2 * CREDITS):
            gateway.submit_rows(0, 8)
        gateway.loop.turn()
        submitted = [
            gateway.submit_rows(0, 8, budget_ms=draw.uniform(1000, 2000))[0] for _ in range(40)
        ]
        gateway.loop.turn()
        for worker, run_ns in zip(workers, (3 * MS, 7 * MS), strict=True):
            worker.cost = lambda execute, run_ns=run_ns: run_ns
            worker.play()
        gateway.loop.run(1000 * MS)

        by_offset = {request.body_offset: request for request in submitted}
        sent = sorted((e for w in workers for e in w.ran), key=lambda execute: execute.batch_id)
        order = [by_offset[e.slices[0].input_offset] for e in sent[2 * CREDITS :]]
        assert order == sorted(submitted, key=lambda request: request.deadline_ns)
        assert all(len(worker.ran) > CREDITS for worker in workers)


@pytest.mark.parametrize(("base_ns", "first"), [(10_000, 1), (1_000_000, 3)])
def test_idle_worker_gets_a_brief_batch_at_once(base_ns: int, first: int) -> None:
    """The other requests of the iteration share a batch; costly batches wait for all of them."""
    with Simulation(lane_of(0, rows_max=64)) as gateway:
        worker = gateway.start()
        for rows in (1, 16, 1, 16):
            gateway.lanes[0].cost_of(worker)
            gateway.lanes[0].on_ran(worker, rows, base_ns + 1000 * rows, gateway.loop.now_ns)
        for _ in range(3):
            gateway.submit_rows(0, 1)
        assert [len(e.slices) for e in worker.sent] == ([1] if first == 1 else [])
        gateway.loop.turn()

        assert len(worker.sent[0].slices) == first
        worker.play()
        gateway.loop.run(100 * MS)
        assert sum(len(e.slices) for e in worker.ran) == 3 and gateway.is_clean()


def test_loop_fails_only_the_request_with_its_hops(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """The batch has the most hops of its requests; the others are retried."""
    (_, first), (_, second) = gateway.submit_rows(0, 1), gateway.submit_rows(0, 1, hops=4)
    gateway.loop.turn()
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, "remote_loop", "no"))
    gateway.dispatcher.pump()
    gateway.done(worker, worker.sent[1])

    assert (len(first.results), first.codes) == (1, [])
    assert (len(second.results), second.codes) == (0, ["remote_loop"])
    assert [execute.hops for execute in worker.sent] == [4, 0] and gateway.is_clean()


def test_request_that_is_late_on_one_worker_waits_for_another(gateway: Simulation) -> None:
    """The worker that is free in time has no credit when the request arrives."""
    first, second = gateway.start(), gateway.start()
    first.cost = second.cost = lambda execute: MS
    submit(gateway, 8, 8)
    for worker in (first, second):
        gateway.done(worker, worker.sent[0])
    submit(gateway, 8, 8, 8)
    assert (first.credits, second.credits) == (CREDITS - 2, CREDITS - 1)
    second.busy_until_ns += 50 * MS
    _, caller = gateway.submit_rows(0, 1, budget_ms=20.0)
    gateway.loop.turn()
    for execute in first.sent[1:3]:
        gateway.done(first, execute)

    assert caller.codes == [] and rows_of(first.sent[-1]) == [1]


def faulty_policy(name: str) -> Any:
    """A policy by arrival; its method of this name raises an exception."""

    def fail(*_: object) -> None:
        raise ValueError("no")

    fifo = Fifo(LaneConfig())
    methods = {each: getattr(fifo, each) for each in ("rank", "on_put", "on_taken", "on_left")}
    return SimpleNamespace(linger_ns=0, **(methods | {name: fail}))


@pytest.mark.parametrize("name", ["rank", "on_put", "on_taken", "on_left"])
def test_exceptions_of_an_installed_policy_lose_no_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(requests, "policy_failed", lambda *, policy, error: logged.append(policy))
    guarded = GuardedPolicy("mine", faulty_policy(name))
    monkeypatch.setitem(POLICIES, "mine", lambda config: guarded)
    with Simulation(lane_of(0, rows_max=8, policy="mine")) as gateway:
        worker = gateway.start()
        submitted = submit(gateway, 8, 8, 8)
        gateway.dispatcher.withdraw(submitted[2][0])
        for execute in list(worker.sent):
            gateway.done(worker, execute)

        assert has_own_rows(submitted[0], 0) and has_own_rows(submitted[1], 100)
        assert logged == ["mine"] and gateway.is_clean()


def test_batches_before_a_failed_one_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICIES, "mine", lambda config: faulty_policy("on_taken"))
    with Simulation(lane_of(0), lane_of(1, policy="mine")) as gateway:
        worker = gateway.start()
        gateway.submit_rows(0)
        gateway.submit_rows(1)
        with pytest.raises(ValueError, match="no"):
            gateway.loop.turn()

        assert [execute.model for execute in worker.sent] == [0]


def test_requests_queued_before_the_rows_were_measured(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """The second worker finds that the rows depend on each other: what was cut is rejected."""
    submit(gateway, *[8] * CREDITS)
    ((_, whole), (_, large)) = submit(gateway, 8, 9)
    gateway.lanes[0].weaken_relation(RowRelation("dependent", "row 3 differs"))
    worker.play()
    gateway.loop.run(100 * MS)

    assert len(whole.results) == 1 and large.codes == ["limit"]
    assert all(len(each.slices) == 1 for each in worker.sent)
    assert gateway.is_clean()
