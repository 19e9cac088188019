"""Dispatch: who gets which batch, and who is told what happened to it; exactly once.

The workers are real but for their processes: this process stands for each of them, and what the
gateway would send over ZMQ is kept in a list.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from iskander.contract.tensors import ColumnType, Contract, TensorSpec
from iskander.errors import ContractError, ExecutionFailed, IskanderError, NotReady, WorkerLost
from iskander.gateway import dispatch
from iskander.gateway.dispatch import Dispatcher
from iskander.gateway.intake import Intake
from iskander.gateway.lanes import Lane, Request
from iskander.gateway.workers import CREDITS, Place, Worker
from iskander.memory.arena import GRAIN_BYTES
from iskander.wire.messages import Done, Execute, Failed, ModelSpec, decode_to_worker

ARENA_BYTES = 64 * GRAIN_BYTES
CONTRACT = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
)


class Wire:
    """Stands for the ZMQ socket to a worker."""

    def __init__(self) -> None:
        self.sent: list[Execute] = []

    def send(self, frame: bytes) -> None:
        for message in decode_to_worker(frame):
            assert isinstance(message, Execute)
            self.sent.append(message)

    def close(self) -> None:
        """Nothing to close."""


class Asker:
    """A caller that keeps what it is told."""

    def __init__(self) -> None:
        self.results: list[bytes] = []
        self.errors: list[IskanderError] = []

    @property
    def told(self) -> int:
        return len(self.results) + len(self.errors)

    def deliver(self, request: Request, output: memoryview) -> None:
        self.results.append(bytes(output))

    def fail(self, request: Request, error: IskanderError) -> None:
        self.errors.append(error)


class Gateway:
    """Lanes, an input arena and a dispatcher, without a network on either side."""

    def __init__(self, lanes: int = 2) -> None:
        self.lanes = {key: make_lane(key) for key in range(lanes)}
        self.intake = Intake(ARENA_BYTES, 0)
        self.dispatcher = Dispatcher(self.intake, self.lanes)
        self.workers: list[Worker] = []
        self.wires: dict[int, Wire] = {}
        self._incarnation = 0

    def start(self, *models: int, output_bytes: int = ARENA_BYTES) -> Worker:
        """A worker that has these models, or all, and takes work."""
        worker = Worker(Place(len(self.workers), 0, (0,), None))
        self._incarnation += 1
        worker.attach(self._incarnation, os.getpid(), output_bytes)
        self.wires[self._incarnation] = Wire()
        worker.sender = self.wires[self._incarnation]  # type: ignore[assignment]
        worker.models = set(models or self.lanes)
        self.workers.append(worker)
        self.dispatcher.open(worker)
        return worker

    def lose(self, worker: Worker) -> None:
        """What the supervisor does when a process has ended."""
        self.dispatcher.close(worker)
        self.dispatcher.on_lost(worker)
        worker.detach()

    def ask(self, lane: int = 0, rows: int = 4) -> tuple[Request, Asker]:
        asker = Asker()
        request = Request(self.lanes[lane], asker, rows, [memoryview(bytes(8 * rows))])
        asyncio.run(self.intake.admit(self.lanes[lane], request))
        self.dispatcher.submit(request)
        return request, asker

    def sent(self, worker: Worker) -> list[Execute]:
        return self.wires[worker.incarnation].sent

    def done(self, worker: Worker, message: Execute) -> None:
        self.dispatcher.on_done(Done(worker.incarnation, message.batch_id, 7))

    def close(self) -> None:
        for worker in self.workers:
            worker.detach()
        self.intake.close()


def make_lane(key: int) -> Lane:
    model = ModelSpec(
        key, f"m{key}", "1", "onnx", "f", ("cpu",), 0, 0, "level3", False, True, 1, ""
    )
    lane = Lane(model, 1000)
    lane.set_contract(CONTRACT)
    return lane


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def worker(gateway: Gateway) -> Worker:
    return gateway.start()


def test_a_request_goes_to_a_worker_as_it_lies_in_the_arenas(
    gateway: Gateway, worker: Worker
) -> None:
    request, _ = gateway.ask(lane=1, rows=5)

    (flight,) = worker.in_flight.values()
    (message,) = gateway.sent(worker)
    assert message == Execute(1, 1, 5, request.body_offset, flight.output.offset)
    assert flight.output_bytes == 64
    assert flight.request is request
    assert not gateway.lanes[1].queue


def test_results_are_delivered_and_everything_is_given_back(
    gateway: Gateway, worker: Worker
) -> None:
    request, asker = gateway.ask()
    (message,) = gateway.sent(worker)
    assert worker.output is not None
    worker.output.view[message.output_offset : message.output_offset + 64] = bytes(range(64))

    gateway.done(worker, message)

    assert (asker.results, asker.errors) == ([bytes(range(64))], [])
    assert request.lease is None
    assert gateway.intake.arena.leased_bytes == worker.output_arena.leased_bytes == 0
    assert (worker.credits, worker.in_flight, worker.batches) == (CREDITS, {}, 1)
    lane = gateway.lanes[0]
    assert (lane.counts["completed"], lane.run_ns) == (1, 7)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("execution_failed", ExecutionFailed), ("contract", ContractError), ("odd", IskanderError)],
)
def test_a_failure_is_told_by_its_code_and_everything_is_given_back(
    gateway: Gateway, worker: Worker, code: str, kind: type[IskanderError]
) -> None:
    _, asker = gateway.ask()
    (message,) = gateway.sent(worker)

    gateway.dispatcher.on_failed(Failed(worker.incarnation, message.batch_id, code, "no"))

    (error,) = asker.errors
    assert (type(error), error.message, asker.results) == (kind, "no", [])
    assert gateway.intake.arena.leased_bytes == worker.output_arena.leased_bytes == 0
    assert (worker.credits, worker.in_flight) == (CREDITS, {})
    assert gateway.lanes[0].counts[f"failed.{kind.code}"] == 1


def test_credits_bound_what_is_sent(gateway: Gateway, worker: Worker) -> None:
    """One more goes out for each one that comes back, and no more."""
    requests = [gateway.ask()[0] for _ in range(CREDITS + 3)]
    assert len(gateway.sent(worker)) == CREDITS
    assert list(gateway.lanes[0].queue) == requests[CREDITS:]

    gateway.done(worker, gateway.sent(worker)[0])
    gateway.dispatcher.pump()

    assert len(gateway.sent(worker)) == CREDITS + 1
    assert gateway.dispatcher.in_flight == CREDITS
    assert list(gateway.lanes[0].queue) == requests[CREDITS + 1 :]


def test_batches_have_numbers_that_are_never_used_twice(gateway: Gateway, worker: Worker) -> None:
    for _ in range(3):
        gateway.ask()
        gateway.done(worker, gateway.sent(worker)[-1])

    assert [message.batch_id for message in gateway.sent(worker)] == [1, 2, 3]


def test_work_is_spread_over_the_workers(gateway: Gateway) -> None:
    """Most credits first: everyone has one batch before anyone has two."""
    workers = [gateway.start() for _ in range(3)]

    for _ in range(3):
        gateway.ask()
    assert [len(gateway.sent(worker)) for worker in workers] == [1, 1, 1]

    for _ in range(6):
        gateway.ask()
    assert [len(gateway.sent(worker)) for worker in workers] == [2, 2, 2]
    assert len(gateway.lanes[0].queue) == 3


def test_the_oldest_goes_first_among_lanes(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of two lanes wait in turns for one worker, on a clock of the test's own."""
    ticks = iter(range(100))
    monkeypatch.setattr(dispatch, "now_ns", lambda: next(ticks))
    worker = gateway.start()
    for _ in range(CREDITS):
        gateway.ask(lane=0)
    lanes = [1, 0, 0, 1, 1, 0]
    for lane in lanes:
        gateway.ask(lane=lane)

    for message in gateway.sent(worker):  # Grows as long as something waits.
        gateway.done(worker, message)
        gateway.dispatcher.pump()

    assert [message.model for message in gateway.sent(worker)[CREDITS:]] == lanes


def test_a_lane_that_cannot_send_does_not_hold_back_another(gateway: Gateway) -> None:
    """The oldest request is of a model whose only worker is busy."""
    busy, free = gateway.start(0), gateway.start(1)
    for _ in range(CREDITS + 1):
        gateway.ask(lane=0)

    gateway.ask(lane=1)

    assert len(gateway.sent(busy)) == CREDITS
    assert [message.model for message in gateway.sent(free)] == [1]


def test_a_worker_gets_only_models_that_it_has(gateway: Gateway) -> None:
    gateway.start(0)

    assert gateway.lanes[0].is_ready and not gateway.lanes[1].is_ready
    with pytest.raises(NotReady):
        gateway.ask(lane=1)


def test_a_full_output_arena_waits_for_what_comes_back(gateway: Gateway) -> None:
    """There is a credit, but no room for results; the room that comes back is used."""
    worker = gateway.start(output_bytes=2 * GRAIN_BYTES)
    gateway.ask(rows=2 * GRAIN_BYTES // 4)
    gateway.ask(rows=4)
    assert (len(gateway.sent(worker)), worker.credits) == (1, CREDITS - 1)

    gateway.done(worker, gateway.sent(worker)[0])
    gateway.dispatcher.pump()

    assert len(gateway.sent(worker)) == 2


def test_a_full_output_arena_of_one_worker_is_no_reason_to_wait_for_it(gateway: Gateway) -> None:
    """Both workers have one credit left, and only the second has room for the results."""
    full = gateway.start(output_bytes=2 * GRAIN_BYTES)
    gateway.ask(rows=2 * GRAIN_BYTES // 4)
    other = gateway.start()
    gateway.ask()
    assert (full.credits, other.credits) == (CREDITS - 1, CREDITS - 1)
    gateway.ask()

    assert (len(gateway.sent(full)), len(gateway.sent(other))) == (1, 2)


@pytest.mark.parametrize("incarnation", [0, 1, 2, 99])
@pytest.mark.parametrize("kind", ["done", "failed"])
def test_a_late_message_is_counted_and_dropped(
    gateway: Gateway, incarnation: int, kind: str
) -> None:
    """An old incarnation, one that never was, or a batch that is not in flight: nothing happens."""
    gateway.lose(gateway.start())
    worker = gateway.start()
    _, asker = gateway.ask()
    (message,) = gateway.sent(worker)
    batch_id = message.batch_id if incarnation != worker.incarnation else message.batch_id + 1

    if kind == "done":
        gateway.dispatcher.on_done(Done(incarnation, batch_id, 7))
    else:
        gateway.dispatcher.on_failed(Failed(incarnation, batch_id, "contract", "no"))

    assert gateway.dispatcher.counts["late_messages"] == 1
    assert asker.told == 0
    assert (worker.credits, len(worker.in_flight)) == (CREDITS - 1, 1)
    assert len(gateway.intake.arena) == len(worker.output_arena) == 1


def test_an_answer_that_comes_twice_is_late_the_second_time(
    gateway: Gateway, worker: Worker
) -> None:
    _, asker = gateway.ask()
    (message,) = gateway.sent(worker)

    gateway.done(worker, message)
    gateway.done(worker, message)

    assert asker.told == 1
    assert worker.credits == CREDITS
    assert gateway.dispatcher.counts["late_messages"] == 1


def test_another_workers_batch_is_not_its_own(gateway: Gateway) -> None:
    """A worker cannot answer for another one, whose results it never wrote."""
    first, second = gateway.start(), gateway.start()
    asked = [gateway.ask(), gateway.ask()]
    (message,) = gateway.sent(second)

    gateway.done(first, message)

    assert [asker.told for _, asker in asked] == [0, 0]
    assert gateway.dispatcher.counts["late_messages"] == 1


def test_a_loss_fails_exactly_the_batches_of_that_worker(gateway: Gateway) -> None:
    """Two workers have two batches each and one waits; one worker dies."""
    lost, other = gateway.start(), gateway.start()
    asked = [gateway.ask() for _ in range(2 * CREDITS + 1)]
    theirs = {flight.request for flight in lost.in_flight.values()}
    assert len(theirs) == CREDITS
    (first, _) = gateway.sent(lost)
    incarnation = lost.incarnation

    gateway.lose(lost)
    gateway.dispatcher.on_done(Done(incarnation, first.batch_id, 7))

    for request, asker in asked:
        assert [type(error) for error in asker.errors] == [WorkerLost] * (request in theirs)
        assert (request.lease is None) == (request in theirs)
        assert asker.results == []
    assert asked[0][0].lane.counts["failed.worker_lost"] == CREDITS
    assert gateway.dispatcher.counts["late_messages"] == 1
    assert gateway.dispatcher.in_flight == len(other.in_flight) == CREDITS
    assert lost.in_flight == {}
    assert gateway.lanes[0].ready == {other.incarnation}
    assert len(gateway.lanes[0].queue) == 1


def test_a_lost_batch_may_be_tried_again(gateway: Gateway, worker: Worker) -> None:
    _, asker = gateway.ask()

    gateway.lose(worker)

    (error,) = asker.errors
    assert error.retryable and error.retry_after_ms is not None
    assert "`m0/1`" in error.message


def test_what_waits_outlives_its_worker_and_goes_to_the_next(gateway: Gateway) -> None:
    worker = gateway.start()
    asked = [gateway.ask() for _ in range(CREDITS + 1)]

    gateway.lose(worker)
    following = gateway.start()

    assert len(gateway.sent(following)) == 1
    gateway.done(following, gateway.sent(following)[0])
    assert len(asked[-1][1].results) == 1


def test_a_closed_worker_finishes_what_it_has_and_gets_nothing_more(gateway: Gateway) -> None:
    worker = gateway.start()
    asked = [gateway.ask() for _ in range(CREDITS + 1)]

    gateway.dispatcher.close(worker)
    for message in gateway.sent(worker):
        gateway.done(worker, message)
    gateway.dispatcher.pump()

    assert [len(asker.results) for _, asker in asked] == [1] * CREDITS + [0]
    assert len(gateway.sent(worker)) == CREDITS
    assert not gateway.lanes[0].is_ready


def test_a_closed_worker_that_dies_fails_what_it_still_had(gateway: Gateway) -> None:
    worker = gateway.start()
    _, asker = gateway.ask()

    gateway.dispatcher.close(worker)
    gateway.dispatcher.on_lost(worker)

    assert [type(error) for error in asker.errors] == [WorkerLost]
    assert gateway.intake.arena.leased_bytes == 0


def test_a_withdrawn_request_leaves_the_queue_at_once(gateway: Gateway, worker: Worker) -> None:
    for _ in range(CREDITS):
        gateway.ask()
    (gone, gone_asker), (stays, _) = gateway.ask(), gateway.ask()

    gateway.dispatcher.withdraw(gone)

    assert gone.lease is None and gone_asker.told == 0
    assert list(gateway.lanes[0].queue) == [stays]
    assert len(gateway.intake.arena) == CREDITS + 1
    assert gateway.lanes[0].counts["withdrawn"] == 1


@pytest.mark.parametrize("end", ["done", "failed", "lost"])
def test_an_abandoned_batch_tells_nobody_and_is_freed_by_its_worker(
    gateway: Gateway, worker: Worker, end: str
) -> None:
    """The worker reads the input until it answers: only then can the range be another's."""
    request, asker = gateway.ask()
    (message,) = gateway.sent(worker)

    gateway.dispatcher.withdraw(request)
    assert request.lease is not None and gateway.intake.arena.is_live(request.lease)
    assert len(worker.output_arena) == 1

    if end == "done":
        gateway.done(worker, message)
    elif end == "failed":
        gateway.dispatcher.on_failed(Failed(worker.incarnation, message.batch_id, "contract", ""))
    else:
        gateway.lose(worker)
    assert asker.told == 0
    assert request.lease is None and gateway.intake.arena.leased_bytes == 0
    assert gateway.dispatcher.in_flight == 0
    if end != "lost":
        assert (worker.credits, len(worker.output_arena)) == (CREDITS, 0)
    assert (gateway.lanes[0].counts["abandoned"] == 1) == (end == "done")
    assert gateway.lanes[0].counts["completed"] == 0


def test_withdrawing_after_the_answer_changes_nothing(gateway: Gateway, worker: Worker) -> None:
    request, asker = gateway.ask()
    gateway.done(worker, gateway.sent(worker)[0])

    gateway.dispatcher.withdraw(request)

    assert (len(asker.results), worker.credits) == (1, CREDITS)
    assert gateway.intake.arena.leased_bytes == 0


def test_what_nobody_will_come_back_to_is_refused(gateway: Gateway, worker: Worker) -> None:
    """Only the lanes that were named; both have requests that wait."""
    for _ in range(CREDITS):
        gateway.ask()
    (_, refused), (_, kept) = gateway.ask(lane=0), gateway.ask(lane=1)

    gateway.dispatcher.refuse_queued([gateway.lanes[0]])

    assert [type(error) for error in refused.errors] == [NotReady]
    assert refused.errors[0].retry_after_ms is not None
    assert kept.told == 0
    assert not gateway.lanes[0].queue and len(gateway.lanes[1].queue) == 1
    assert len(gateway.intake.arena) == CREDITS + 1


class DispatchMachine(RuleBasedStateMachine):
    """Requests, answers, deaths and departures in any order: everyone is told exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.gateway = Gateway()
        self.asked: list[tuple[Request, Asker]] = []
        self.live: list[Worker] = []
        self.closed: dict[int, int] = {}
        self.late = 0

    def in_flight(self) -> list[tuple[Worker, int]]:
        return [(worker, batch_id) for worker in self.live for batch_id in worker.in_flight]

    @precondition(lambda self: len(self.live) < 3)
    @rule(models=st.sampled_from([(0,), (1,), (0, 1)]), grains=st.integers(1, 3))
    def start(self, models: tuple[int, ...], grains: int) -> None:
        self.live.append(self.gateway.start(*models, output_bytes=grains * GRAIN_BYTES))

    @rule(lane=st.integers(0, 1), rows=st.sampled_from([1, GRAIN_BYTES // 4]))
    def ask(self, lane: int, rows: int) -> None:
        if self.gateway.lanes[lane].is_ready and len(self.gateway.intake.arena) < 16:
            self.asked.append(self.gateway.ask(lane, rows))

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), is_done=st.booleans())
    def answer(self, data: st.DataObject, is_done: bool) -> None:
        worker, batch_id = data.draw(st.sampled_from(self.in_flight()))
        if is_done:
            self.gateway.dispatcher.on_done(Done(worker.incarnation, batch_id, 1))
        else:
            self.gateway.dispatcher.on_failed(Failed(worker.incarnation, batch_id, "contract", ""))
        self.gateway.dispatcher.pump()

    @rule(incarnation=st.integers(0, 9))
    def answer_late(self, incarnation: int) -> None:
        self.late += 1
        self.gateway.dispatcher.on_done(Done(incarnation, 1 << 40, 1))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.live))
        self.live.remove(worker)
        self.gateway.lose(worker)
        self.gateway.dispatcher.pump()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.live))
        self.gateway.dispatcher.close(worker)
        self.closed.setdefault(worker.incarnation, len(self.gateway.sent(worker)))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        request, _ = data.draw(st.sampled_from(self.asked))
        self.gateway.dispatcher.withdraw(request)

    @rule()
    def refuse(self) -> None:
        lanes = [lane for lane in self.gateway.lanes.values() if not lane.is_ready]
        self.gateway.dispatcher.refuse_queued(lanes)

    @invariant()
    def leases_are_those_of_queues_and_flights(self) -> None:
        queued = [request for lane in self.gateway.lanes.values() for request in lane.queue]
        flying = [flight.request for w in self.live for flight in w.in_flight.values()]
        holders = [request for request, _ in self.asked if request.lease is not None]
        assert len(set(queued + flying)) == len(queued + flying)
        assert set(holders) == set(queued + flying)
        assert len(self.gateway.intake.arena) == len(holders)
        assert self.gateway.dispatcher.in_flight == len(flying)

    @invariant()
    def credits_count_what_is_under_way(self) -> None:
        for worker in self.live:
            assert worker.credits + len(worker.in_flight) == CREDITS
            assert len(worker.output_arena) == len(worker.in_flight)
            worker.output_arena.validate()
            if worker.incarnation in self.closed:
                sent = self.gateway.sent(worker)
                assert len(sent) == self.closed[worker.incarnation]

    @invariant()
    def everyone_is_told_once(self) -> None:
        for request, asker in self.asked:
            is_over = request.lease is None
            if request.is_abandoned:
                assert asker.told <= is_over
            else:
                assert asker.told == is_over
        assert self.gateway.dispatcher.counts["late_messages"] == self.late

    @invariant()
    def nobody_is_idle_while_there_is_work(self) -> None:
        for lane in self.gateway.lanes.values():
            for incarnation in lane.ready if lane.queue else ():
                worker = next(w for w in self.live if w.incarnation == incarnation)
                assert worker.credits == 0 or worker.in_flight

    def teardown(self) -> None:
        for worker in self.live:
            self.gateway.lose(worker)
        self.live = []
        self.refuse()
        assert self.gateway.intake.arena.leased_bytes == 0
        self.everyone_is_told_once()
        self.gateway.close()


TestDispatchMachine = DispatchMachine.TestCase
TestDispatchMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
