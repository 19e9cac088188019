"""Dispatch: who gets which batch, and who is told what became of it; exactly once.

The workers are real but for their processes: this process stands for each of them, on a clock of
the test's own (`support/simulation.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.control.messages import Done, Execute, Failed, Slice
from iskander.errors import NotReady
from iskander.memory.arena import GRAIN_BYTES
from iskander.scheduling import dispatch
from iskander.scheduling.request import Request
from iskander.scheduling.worker_slot import CREDITS


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8), lane_of(1, rows_max=8)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


def ask(gateway: Simulation, *rows: int, lane: int = 0) -> list[tuple[Request, RecordingCaller]]:
    """Requests that come in one turn of the loop; what can be sent has been when this returns."""
    asked = [gateway.ask(lane, each, first=100 * index) for index, each in enumerate(rows)]
    gateway.loop.turn()
    return asked


def values_of(caller: RecordingCaller) -> list[int]:
    (result,) = caller.results
    return np.frombuffer(result, np.int64).tolist()


def is_right(asked: tuple[Request, RecordingCaller], first: int) -> bool:
    """It has exactly the rows that it asked with."""
    request, caller = asked
    wanted = list(range(first, first + request.rows))
    return not caller.errors and values_of(caller)[: request.rows] == wanted


def rows_of(execute: Execute) -> list[int]:
    return [each.rows for each in execute.slices]


def test_a_request_goes_to_a_worker_as_it_lies_in_the_arenas(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, _),) = ask(gateway, 5, lane=1)

    (flight,) = worker.in_flight.values()
    wanted = Slice(request.body_offset, 5, 0, 5, flight.output.offset)
    assert worker.sent == [Execute(1, 1, 5, (wanted,))]
    assert [part.request for part in flight.parts] == [request]
    assert not len(gateway.lanes[1].queue) and request.running == 1


def test_what_comes_in_one_turn_goes_in_one_batch_and_one_frame(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Nothing goes out before the turn is over; and three batches' rows go as two, in order."""
    asked = [gateway.ask(0, rows, first=100 * index) for index, rows in enumerate((3, 4, 1, 6))]
    assert worker.sent == []

    gateway.loop.turn()

    assert [rows_of(execute) for execute in worker.sent] == [[3, 4, 1], [6]]
    assert worker.wire.frames == 1
    for execute in list(worker.sent):
        gateway.done(worker, execute)
    assert all(is_right(each, 100 * index) for index, each in enumerate(asked))
    assert gateway.is_clean()


def test_a_request_larger_than_a_batch_is_answered_whole(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Its pieces come back in another order, beside rows of others."""
    large, small = ask(gateway, 20, 3)
    gateway.done(worker, worker.sent[1])
    assert large[1].told == 0
    for execute in (worker.sent[0], worker.sent[2]):
        gateway.done(worker, execute)

    assert [rows_of(execute) for execute in worker.sent] == [[8], [8], [4, 3]]
    assert is_right(large, 0) and is_right(small, 100)
    assert len(large[1].results[0]) == gateway.lanes[0].layout(20).output_bytes
    assert gateway.is_clean()


def test_a_batch_is_filled_up_to_what_the_model_is_run_with() -> None:
    with Simulation(lane_of(0, rows_max=16, pad_to=(4, 16))) as gateway:
        worker = gateway.start()
        asked = ask(gateway, 2, 3)
        gateway.done(worker, worker.sent[0])

        assert (worker.sent[0].rows, rows_of(worker.sent[0])) == (16, [2, 3])
        assert is_right(asked[0], 0) and is_right(asked[1], 100)
        assert gateway.lanes[0].metrics.batch_rows.sum == 5


def test_results_are_delivered_and_everything_is_given_back(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, caller),) = ask(gateway, 4)

    gateway.done(worker, worker.sent[0])

    assert values_of(caller)[:4] == [0, 1, 2, 3]
    assert (request.lease, request.is_over, request.running) == (None, True, 0)
    assert (worker.credits, worker.in_flight, worker.batches) == (CREDITS, {}, 1)
    assert gateway.lanes[0].counts["completed"] == 1
    assert gateway.is_clean()


@pytest.mark.parametrize("code", ["contract", "limit", "internal", "cancelled"])
def test_a_failure_is_told_by_its_code_and_everything_is_given_back(
    gateway: Simulation, worker: SimulatedWorker, code: str
) -> None:
    ((_, caller),) = ask(gateway, 2)
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, code, "no"))

    assert caller.codes == [code]
    assert gateway.lanes[0].counts[f"failed.{code}"] == 1
    assert worker.credits == CREDITS and gateway.is_clean()


@pytest.mark.parametrize("code", ["execution_failed", "contract", "limit"])
def test_what_failed_together_is_tried_again_alone_and_only_the_guilty_is_told(
    gateway: Simulation, worker: SimulatedWorker, code: str
) -> None:
    """The third of four has a value that the model, or a vocabulary before it, refuses."""
    worker.reference = lambda values: code if 200 in values else None
    worker.play()
    asked = ask(gateway, 2, 2, 2, 2)
    gateway.loop.run(100 * MS)

    assert [rows_of(execute) for execute in worker.sent] == [[2, 2, 2, 2], [2], [2], [2], [2]]
    assert asked[2][1].codes == [code]
    assert all(is_right(asked[index], 100 * index) for index in (0, 1, 3))
    assert gateway.lanes[0].counts["retried"] == 4 and gateway.is_clean()


def test_of_a_split_request_that_fails_every_piece_is_forgotten(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """One piece is done, one fails, and the third is still to be sent."""
    ((request, caller),) = ask(gateway, 24)
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, "execution_failed", "no"))
    assert caller.codes == ["execution_failed"]
    assert request.lease is not None, "a worker still reads it"

    gateway.done(worker, worker.sent[1])

    assert len(worker.sent) == 2 and caller.told == 1 and gateway.is_clean()


def test_credits_bound_what_is_sent(gateway: Simulation, worker: SimulatedWorker) -> None:
    """One more goes out for each one that comes back, and no more."""
    asked = ask(gateway, *[8] * (CREDITS + 3))
    assert len(worker.sent) == gateway.dispatcher.in_flight == CREDITS
    assert list(gateway.lanes[0].queue) == [request for request, _ in asked[CREDITS:]]

    gateway.done(worker, worker.sent[0])

    assert len(worker.sent) == CREDITS + 1 and gateway.dispatcher.in_flight == CREDITS
    assert [execute.batch_id for execute in worker.sent] == list(range(1, CREDITS + 2))


def test_work_is_spread_over_the_workers(gateway: Simulation) -> None:
    """Most credits first: everyone has one batch before anyone has two."""
    workers = [gateway.start() for _ in range(3)]

    ask(gateway, 8, 8, 8)
    assert [len(worker.sent) for worker in workers] == [1, 1, 1]
    ask(gateway, *[8] * 6)
    assert [len(worker.sent) for worker in workers] == [2, 2, 2]
    assert len(gateway.lanes[0].queue) == 3


def test_a_lane_that_cannot_send_does_not_hold_back_another(gateway: Simulation) -> None:
    busy, free = gateway.start(0), gateway.start(1)
    ask(gateway, *[8] * (CREDITS + 1))

    ask(gateway, 1, lane=1)

    assert len(busy.sent) == CREDITS
    assert [execute.model for execute in free.sent] == [1]


def test_a_worker_gets_only_models_that_it_has(gateway: Simulation) -> None:
    gateway.start(0)

    assert gateway.lanes[0].is_ready and not gateway.lanes[1].is_ready
    with pytest.raises(NotReady):
        gateway.ask(1)


def test_a_full_output_arena_waits_for_what_comes_back() -> None:
    """There is a credit, but no room for results; the room that comes back is used."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        worker = gateway.start(output_bytes=2 * GRAIN_BYTES)
        ask(gateway, 1024, 1024)
        assert (len(worker.sent), worker.credits) == (1, CREDITS - 1)

        gateway.done(worker, worker.sent[0])
        assert len(worker.sent) == 2


def test_a_batch_has_no_more_requests_than_their_results_have_room() -> None:
    """Each request's results are rounded up, so that many small ones take more than one large."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        worker = gateway.start(output_bytes=GRAIN_BYTES)
        asked = ask(gateway, *[1] * 100)
        assert rows_of(worker.sent[0]) == [1] * (GRAIN_BYTES // 64)
        worker.play()
        gateway.loop.run(100 * MS)

        assert all(is_right(each, 100 * index) for index, each in enumerate(asked))


def test_a_full_output_arena_of_one_worker_is_no_reason_to_wait_for_it() -> None:
    """Both workers have one credit left, and only the second has room for the results."""
    with Simulation(lane_of(0, rows_max=1024)) as gateway:
        full = gateway.start(output_bytes=2 * GRAIN_BYTES)
        ask(gateway, 1024)
        other = gateway.start()
        ask(gateway, 1024)
        assert (full.credits, other.credits) == (CREDITS - 1, CREDITS - 1)
        ask(gateway, 1024)

        assert (len(full.sent), len(other.sent)) == (1, 2)


@pytest.mark.parametrize("kind", ["done", "failed"])
def test_a_late_message_is_counted_and_dropped(gateway: Simulation, kind: str) -> None:
    """A batch that is not in flight at this worker, though it is at another: nothing happens."""
    first, second = gateway.start(), gateway.start()
    asked = ask(gateway, 8, 8)
    (execute,) = second.sent

    for batch_id in (execute.batch_id, 0, 99):
        if kind == "done":
            gateway.dispatcher.on_done(first, Done(batch_id, 7))
        else:
            gateway.dispatcher.on_failed(first, Failed(batch_id, "contract", "no"))

    assert gateway.dispatcher.counts["late_messages"] == 3
    assert [caller.told for _, caller in asked] == [0, 0]
    assert first.credits == second.credits == CREDITS - 1


def test_an_answer_that_comes_twice_is_late_the_second_time(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((_, caller),) = ask(gateway, 1)
    for _ in range(2):
        gateway.done(worker, worker.sent[0])

    assert caller.told == 1 and worker.credits == CREDITS
    assert gateway.dispatcher.counts["late_messages"] == 1


def test_a_caller_that_cannot_take_its_results_costs_nobody_else_anything(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[object] = []
    # A kept traceback would hold a view of the arena.
    monkeypatch.setattr(dispatch.log, "exception", lambda *args: logged.append(args))
    (bad, good) = ask(gateway, 1, 1)

    def refuse(*_: object) -> None:
        raise ValueError("no")

    bad[1].deliver = refuse  # type: ignore[method-assign]
    gateway.done(worker, worker.sent[0])

    assert bad[1].codes == ["internal"] and is_right(good, 100)
    assert gateway.is_clean()
    assert len(logged) == 1


def test_what_has_expired_is_refused_and_never_sent(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """While it waits for a credit, at the moment that its client named; the others go on."""
    ask(gateway, 8, 8)
    _, timely = gateway.ask(0, 1, ttl_ms=50.0)
    _, late = gateway.ask(0, 1, ttl_ms=5.0)
    gateway.loop.run(4 * MS)
    assert (timely.told, late.told) == (0, 0)
    gateway.loop.run(2 * MS)

    assert (timely.codes, late.codes) == ([], ["deadline_exceeded"])
    assert gateway.lanes[0].counts["refused.deadline_exceeded"] == 1
    gateway.done(worker, worker.sent[0])
    assert rows_of(worker.sent[-1]) == [1] and len(gateway.input_arena.arena) == 2


def test_what_cannot_be_in_time_any_more_is_refused_when_its_turn_comes(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """It was admitted while nothing was known of the model's cost: 10 ms."""
    worker.cost = lambda execute: 10 * MS
    ask(gateway, 8, 8)
    _, doomed = gateway.ask(0, 1, budget_ms=5.0)
    gateway.loop.turn()
    gateway.done(worker, worker.sent[0])

    assert doomed.codes == ["deadline_unreachable"]
    assert len(worker.sent) == 2 and len(gateway.input_arena.arena) == 1


def test_what_nobody_will_come_back_to_is_refused(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Only of the lane that was named; both have requests that wait."""
    ask(gateway, *[8] * CREDITS)
    ((_, refused),) = ask(gateway, 1)
    ((_, kept),) = ask(gateway, 1, lane=1)

    gateway.dispatcher.reject_queued(gateway.lanes[0], NotReady("gone", retry_after_ms=1))

    assert (refused.codes, kept.codes) == (["not_ready"], [])
    assert refused.errors[0].retry_after_ms is not None
    assert len(gateway.lanes[1].queue) == 1 and len(gateway.input_arena.arena) == CREDITS + 1


def test_a_client_that_is_answered_may_ask_again(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """What is outstanding of a client falls with every kind of end."""
    asked = [gateway.ask(0, 8, client="a")[0] for _ in range(4)]
    gateway.loop.turn()
    assert gateway.lanes[0].outstanding == {"a": 4}
    gateway.done(worker, worker.sent[0])
    gateway.dispatcher.on_failed(worker, Failed(worker.sent[1].batch_id, "contract", "no"))
    for request in asked[2:]:
        gateway.dispatcher.withdraw(request)

    assert gateway.lanes[0].outstanding == {}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_due_first_goes_first_whichever_worker_is_free(seed: int) -> None:
    """Full batches, so that each goes by itself; two workers of different speed."""
    draw = random.Random(seed)
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        workers = [gateway.start(), gateway.start()]
        gateway.loop.run(10 * MS)
        for _ in range(2 * CREDITS):
            gateway.ask(0, 8)
        gateway.loop.turn()
        asked = [gateway.ask(0, 8, budget_ms=draw.uniform(1000, 2000))[0] for _ in range(40)]
        gateway.loop.turn()
        for worker, run_ns in zip(workers, (3 * MS, 7 * MS), strict=True):
            worker.cost = lambda execute, run_ns=run_ns: run_ns
            worker.play()
        gateway.loop.run(1000 * MS)

        places = {request.body_offset: request for request in asked}
        sent = sorted((e for w in workers for e in w.ran), key=lambda execute: execute.batch_id)
        order = [places[e.slices[0].input_offset] for e in sent[2 * CREDITS :]]
        assert order == sorted(asked, key=lambda request: request.deadline_ns)
        assert all(len(worker.ran) > CREDITS for worker in workers)


@pytest.mark.parametrize(("base_ns", "first"), [(10_000, 1), (1_000_000, 3)])
def test_an_idle_worker_begins_at_once_where_batches_are_brief(base_ns: int, first: int) -> None:
    """The rest of the turn goes together; where a batch is costly, all of it does."""
    with Simulation(lane_of(0, rows_max=64)) as gateway:
        worker = gateway.start()
        for rows in (1, 16, 1, 16):
            gateway.lanes[0].cost_of(worker)
            gateway.lanes[0].on_ran(worker, rows, base_ns + 1000 * rows, gateway.loop.now_ns)
        for _ in range(3):
            gateway.ask(0, 1)
        assert [len(e.slices) for e in worker.sent] == ([1] if first == 1 else [])
        gateway.loop.turn()

        assert len(worker.sent[0].slices) == first
        worker.play()
        gateway.loop.run(100 * MS)
        assert sum(len(e.slices) for e in worker.ran) == 3 and gateway.is_clean()
