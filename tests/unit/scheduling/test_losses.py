"""Workers that die and callers that leave: who runs again, who is told, and what is freed when."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.control.messages import Failed
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
    asked = [gateway.ask(lane, each) for each in rows]
    gateway.loop.turn()
    return asked


def codes(asked: list[tuple[Request, RecordingCaller]]) -> list[list[str]]:
    return [caller.codes for _, caller in asked]


def kill(gateway: Simulation, worker: SimulatedWorker, running: int | None) -> None:
    """A worker dies in one of the batches that it was sent, or in none."""
    if running is not None:
        worker.begin(worker.sent[running])
    gateway.lose(worker)


def test_what_was_running_is_tried_again_alone_and_what_waited_without_blame(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    asked = ask(gateway, 4, 4, 5, 3)
    assert [len(execute.slices) for execute in worker.sent] == [2, 2]
    kill(gateway, worker, 0)

    assert codes(asked) == [[]] * 4
    assert [(r.is_alone, r.kills) for r, _ in asked] == [(True, 1)] * 2 + [(False, 0)] * 2
    assert gateway.lanes[0].counts["retried"] == 4
    following = gateway.start()
    following.play()
    gateway.loop.run(100 * MS)
    assert [[each.rows for each in e.slices] for e in following.sent] == [[4], [4], [5, 3]]
    assert [len(caller.results) for _, caller in asked] == [1] * 4 and gateway.is_clean()


@pytest.mark.parametrize("running", [None, 0, 1])
def test_only_what_the_beat_names_is_blamed(
    gateway: Simulation, worker: SimulatedWorker, running: int | None
) -> None:
    """With no batch begun, with the first, and with the second after the first's lost answer."""
    asked = ask(gateway, 8, 8)
    kill(gateway, worker, running)

    assert [request.kills for request, _ in asked] == [int(i == running) for i in range(2)]


def test_what_killed_two_workers_is_given_to_no_third(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Among three that ran together; the innocent are answered by the second and third worker."""
    workers = [worker, gateway.start(), gateway.start()]
    for each in workers:
        each.reference = lambda values: "die" if 100 in values else None
        each.play()
    asked = [gateway.ask(0, 2, first=first) for first in (0, 100, 200)]
    gateway.loop.run(100 * MS)

    assert codes(asked) == [[], ["poisoned"], []]
    assert [len(caller.results) for _, caller in asked] == [1, 0, 1]
    assert [bool(each.incarnation) for each in workers].count(True) == 1
    assert asked[1][0].kills == 2 and gateway.is_clean()
    assert gateway.lanes[0].counts["failed.poisoned"] == 1


def test_of_a_split_request_only_what_was_lost_runs_again(gateway: Simulation) -> None:
    """One piece is done, another dies with its worker, a third is at another worker."""
    first, second = gateway.start(), gateway.start()
    ((request, caller),) = [gateway.ask(0, 30, first=500)]
    gateway.loop.turn()
    gateway.done(first, first.sent[0])
    kill(gateway, first, 1)
    assert caller.told == 0 and request.is_alone
    second.play()
    gateway.loop.run(100 * MS)

    ranges = sorted((s.first, s.rows) for e in second.ran for s in e.slices)
    assert ranges == [(8, 8), (16, 8), (24, 6)]
    assert caller.results[0][: 8 * 30] == b"".join(i.to_bytes(8, "little") for i in range(500, 530))
    assert gateway.is_clean()


def test_a_loss_concerns_exactly_the_batches_of_that_worker(gateway: Simulation) -> None:
    lost, other = gateway.start(), gateway.start()
    asked = ask(gateway, *[8] * (2 * CREDITS + 1))
    theirs = {part.request for f in lost.in_flight.values() for part in f.parts}
    (first, _), before = lost.sent, other.in_flight.copy()
    kill(gateway, lost, 0)
    gateway.done(lost, first) if lost.incarnation else None

    assert codes(asked) == [[]] * len(asked)
    assert other.in_flight == before and gateway.dispatcher.in_flight == CREDITS
    assert {r for r, _ in asked if r.is_waiting} == theirs | {asked[-1][0]}
    assert gateway.lanes[0].ready == {other.incarnation}


def test_what_waits_outlives_its_worker_and_goes_to_the_next(gateway: Simulation) -> None:
    asked = ask(gateway, 1) if gateway.start() else []
    kill(gateway, gateway.workers[0], None)
    following = gateway.start()

    assert len(following.sent) == 1
    gateway.done(following, following.sent[0])
    assert len(asked[0][1].results) == 1 and gateway.is_clean()


def test_a_lost_request_whose_deadline_has_passed_meanwhile_is_refused(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    request, caller = gateway.ask(0, 1, budget_ms=5.0)
    gateway.loop.run(10 * MS)
    assert request.running == 1
    other = gateway.start()
    kill(gateway, worker, 0)

    assert caller.codes == ["deadline_exceeded"] and other.sent == []
    assert gateway.is_clean()


def test_a_lost_request_waits_anew(gateway: Simulation, worker: SimulatedWorker) -> None:
    """It had its place and lost it through no fault of its own: the lane's time begins again."""
    request, caller = gateway.ask(0, 1)
    gateway.loop.run(20_000 * MS)
    kill(gateway, worker, 0)
    gateway.loop.run(20_000 * MS)

    assert caller.told == 0 and request.is_waiting
    worker = gateway.start()
    gateway.done(worker, worker.sent[0])
    assert caller.codes == [] and gateway.is_clean()


def test_a_closed_worker_finishes_what_it_has_and_gets_nothing_more(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    asked = ask(gateway, *[8] * (CREDITS + 1))
    gateway.dispatcher.close(worker)
    for execute in list(worker.sent):
        gateway.done(worker, execute)

    assert [len(caller.results) for _, caller in asked] == [1] * CREDITS + [0]
    assert len(worker.sent) == CREDITS and not gateway.lanes[0].is_ready


def test_a_withdrawn_request_leaves_the_queue_at_once(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Its place and its lease are free for others in the same moment."""
    asked = ask(gateway, *[8] * (CREDITS + 2))
    (gone, caller), (stays, _) = asked[CREDITS:]

    gateway.dispatcher.withdraw(gone)

    assert (gone.lease, caller.told, gone.is_waiting) == (None, 0, False)
    assert list(gateway.lanes[0].queue) == [stays]
    assert len(gateway.input_arena.arena) == CREDITS + 1
    assert gateway.lanes[0].counts["withdrawn"] == 1


@pytest.mark.parametrize("end", ["done", "failed", "cancelled", "lost"])
def test_a_request_whose_caller_left_is_freed_by_its_worker(
    gateway: Simulation, worker: SimulatedWorker, end: str
) -> None:
    """The worker reads the input until it answers: only then can the range be another's."""
    ((request, caller),) = ask(gateway, 4)
    gateway.dispatcher.withdraw(request)
    assert request.lease is not None and gateway.input_arena.arena.is_live(request.lease)

    if end == "done":
        gateway.done(worker, worker.sent[0])
    elif end == "lost":
        kill(gateway, worker, 0)
    else:
        gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, end, "no"))

    assert caller.told == 0 and request.lease is None and gateway.is_clean()
    assert gateway.lanes[0].counts["completed"] == gateway.lanes[0].counts["retried"] == 0


def test_a_batch_none_of_whose_callers_is_left_is_given_up(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """With the last of them, and not before."""
    asked = ask(gateway, 2, 3)
    gateway.dispatcher.withdraw(asked[0][0])
    assert worker.aborted == []

    gateway.dispatcher.withdraw(asked[1][0])

    assert worker.aborted == [worker.sent[0].batch_id]


def test_of_a_split_request_every_batch_is_given_up(gateway: Simulation) -> None:
    """But not one that has rows of another caller too; and what waits leaves the queue."""
    first, second = gateway.start(), gateway.start()
    first.cost = second.cost = lambda execute: MS
    (large, _), (_, other) = gateway.ask(0, 30), gateway.ask(0, 2)
    gateway.loop.turn()
    mixed = next(e for w in (first, second) for e in w.sent if len(e.slices) == 2)
    gateway.dispatcher.withdraw(large)

    every = {execute.batch_id for each in (first, second) for execute in each.sent}
    assert set(first.aborted + second.aborted) == every - {mixed.batch_id}
    for each in (first, second):
        each.play()
    gateway.loop.run(100 * MS)
    assert len(other.results) == 1 and gateway.is_clean()


def test_a_batch_at_a_worker_that_drains_is_given_up_too(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, _),) = ask(gateway, 4)
    gateway.dispatcher.close(worker)

    gateway.dispatcher.withdraw(request)

    assert worker.aborted == [worker.sent[0].batch_id]


def test_withdrawing_what_is_answered_or_was_never_queued_changes_nothing(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, caller),) = ask(gateway, 1)
    gateway.done(worker, worker.sent[0])
    for _ in range(2):
        gateway.dispatcher.withdraw(request)
    gateway.dispatcher.withdraw(Request(gateway.lanes[0], RecordingCaller(), 1, []))

    assert caller.told == 1 and gateway.lanes[0].counts["withdrawn"] == 0
    assert worker.credits == CREDITS and gateway.is_clean()


def test_one_that_is_superseded_while_a_worker_has_some_of_its_rows(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """The rest never runs, and its memory goes with the answer of the worker."""
    older, caller = gateway.ask(0, 24, client="a", is_newest_wins=True)
    gateway.loop.turn()
    assert older.running == CREDITS and older.is_waiting
    gateway.ask(0, 1, client="a", is_newest_wins=True)

    assert caller.codes == ["superseded"] and older.lease is not None
    worker.play()
    gateway.loop.run(100 * MS)
    assert [each.rows for e in worker.sent for each in e.slices] == [8, 8, 1]
    assert gateway.is_clean()


def test_a_worker_that_takes_no_messages_is_ended_and_its_batches_run_elsewhere(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame is too long for the socket, or the socket is full."""
    ended: list[SimulatedWorker] = []
    monkeypatch.setattr(worker, "kill", lambda: ended.append(worker))

    def refuse(frame: bytes) -> None:
        raise OSError(90, "Message too long")

    monkeypatch.setattr(worker.wire, "send", refuse)
    ((request, caller),) = ask(gateway, 3)

    assert ended == [worker] and caller.told == 0 and request.running == 1
    gateway.lose(worker)
    gateway.start().play()
    gateway.loop.run(100 * MS)
    assert len(caller.results) == 1 and gateway.is_clean()


def test_who_has_gone_with_what_a_worker_died_of_is_not_called_poison(
    gateway: Simulation, worker: SimulatedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    ((request, caller),) = ask(gateway, 3)
    request.kills = 1
    gateway.dispatcher.withdraw(request)
    kill(gateway, worker, 0)

    assert caller.told == 0 and not caplog.records and gateway.is_clean()
