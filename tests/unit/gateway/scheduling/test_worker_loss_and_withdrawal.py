"""Lost workers and withdrawn requests: retries, errors, and when memory is released."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import MS, RecordingCaller, lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.retry import LOSSES_MAX
from iskander.gateway.scheduling.worker_slot import CREDITS
from iskander.interprocess.control.messages import Failed


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8), lane_of(1, rows_max=8)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


def submit(gateway: Simulation, *rows: int, lane: int = 0) -> list[tuple[Request, RecordingCaller]]:
    submitted = [gateway.submit_rows(lane, each) for each in rows]
    gateway.loop.turn()
    return submitted


def codes(submitted: list[tuple[Request, RecordingCaller]]) -> list[list[str]]:
    return [caller.codes for _, caller in submitted]


def kill(gateway: Simulation, worker: SimulatedWorker, running: int | None) -> None:
    """Ends a worker while it runs the batch with this index, or none."""
    if running is not None:
        worker.begin(worker.sent[running])
    gateway.lose(worker)


def test_running_batch_is_retried_alone_and_waiting_batch_without_blame(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    submitted = submit(gateway, 4, 4, 5, 3)
    assert [len(execute.slices) for execute in worker.sent] == [2, 2]
    kill(gateway, worker, 0)

    assert codes(submitted) == [[]] * 4
    assert [(r.is_alone, r.kills) for r, _ in submitted] == [(True, 1)] * 2 + [(False, 0)] * 2
    assert gateway.lanes[0].counts["retried"] == 4
    replacement = gateway.start()
    replacement.play()
    gateway.loop.run(100 * MS)
    assert [[each.rows for each in e.slices] for e in replacement.sent] == [[4], [4], [5, 3]]
    assert [len(caller.results) for _, caller in submitted] == [1] * 4 and gateway.is_clean()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_retry_of_a_running_batch_has_its_gpu_to_itself(
    gateway: Simulation, worker: SimulatedWorker, device: str
) -> None:
    """Two batches run at once on a GPU, and the older one is blamed for both."""
    other = gateway.start()
    worker.device = other.device = device
    submit(gateway, 8, lane=1)
    ((request, _),) = submit(gateway, 8)
    lost, left = (worker, other) if other.sent[0].model else (other, worker)
    kill(gateway, lost, 0)
    assert request.kills == 1
    assert [execute.model for execute in left.sent] == [1, 0][: 1 if device == "gpu" else 2]
    left.run(left.sent[0])
    gateway.dispatcher.pump()
    submit(gateway, 8, lane=1)
    assert [execute.model for execute in left.sent] == [1, 0, 1][: 2 if device == "gpu" else 3]
    left.run(left.sent[1])
    gateway.dispatcher.pump()
    left.run(left.sent[2])
    assert left.credits == CREDITS and gateway.is_clean()


@pytest.mark.parametrize("running", [None, 0, 1])
def test_only_the_batch_in_the_heartbeat_is_blamed(
    gateway: Simulation, worker: SimulatedWorker, running: int | None
) -> None:
    """No batch began; the first; the second, with the response to the first lost."""
    submitted = submit(gateway, 8, 8)
    kill(gateway, worker, running)

    assert [request.kills for request, _ in submitted] == [int(i == running) for i in range(2)]


def test_request_that_killed_two_workers_is_poisoned(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """It shares a batch with two others, which the second and third worker answer."""
    workers = [worker, gateway.start(), gateway.start()]
    for each in workers:
        each.reference = lambda values: "die" if 100 in values else None
        each.play()
    submitted = [gateway.submit_rows(0, 2, first=first) for first in (0, 100, 200)]
    gateway.loop.run(100 * MS)

    assert codes(submitted) == [[], ["poisoned"], []]
    assert [len(caller.results) for _, caller in submitted] == [1, 0, 1]
    assert [bool(each.incarnation) for each in workers].count(True) == 1
    assert submitted[1][0].kills == 2 and gateway.is_clean()
    assert gateway.lanes[0].counts["failed.poisoned"] == 1


POISONER = Source("", 7)


def poisoned(gateway: Simulation) -> list[SimulatedWorker]:
    """Workers that die of the value 100; two are dead, and the source is slowed."""
    workers = [gateway.start() for _ in range(5)]
    for each in workers:
        each.reference = lambda values: "die" if 100 in values else None
        each.play()
    _, caller = gateway.submit_rows(0, 2, first=100, source=POISONER)
    gateway.loop.run(10 * MS)
    assert caller.codes == ["poisoned"]
    return workers


def test_source_of_a_request_that_never_ran_is_not_slowed(gateway: Simulation) -> None:
    """It was sent to workers that died before they began it, as often as is permitted."""
    worker = gateway.start()
    request, caller = gateway.submit_rows(0, 2, source=POISONER)
    request.losses = LOSSES_MAX - 1
    gateway.loop.turn()
    kill(gateway, worker, None)
    assert caller.codes == ["poisoned"]

    gateway.start().play()
    _, later = gateway.submit_rows(0, 2, source=POISONER)
    gateway.loop.run(10 * MS)

    assert not later.codes and len(later.results) == 1


def test_requests_of_a_slowed_source_are_rejected_wherever_they_are(gateway: Simulation) -> None:
    """Also one that waited at the worker that died, and is put back after the poisoned one."""
    worker = gateway.start()
    submitted = [gateway.submit_rows(0, 8, first=first, source=POISONER) for first in (0, 8, 16)]
    _, other = gateway.submit_rows(0, 8)
    submitted[0][0].kills, submitted[0][0].is_alone = 1, True
    gateway.loop.turn()
    assert len(worker.sent) == 2
    kill(gateway, worker, 0)
    assert codes(submitted) == [["poisoned"], ["client_over_share"], ["client_over_share"]]
    gateway.start().play()
    gateway.loop.run(10 * MS)
    assert len(other.results) == 1 and gateway.is_clean()


def test_one_worker_is_enough_for_a_source_that_is_known_to_end_workers(
    gateway: Simulation,
) -> None:
    """Its requests run alone, so that no other request is run again."""
    workers = poisoned(gateway)
    gateway.loop.run(10_000 * MS)
    submitted = [gateway.submit_rows(0, 2, first=first) for first in (0, 8)]
    bad, caller = gateway.submit_rows(0, 2, first=100, source=POISONER)
    gateway.loop.run(10 * MS)
    assert (caller.codes, bad.kills) == (["poisoned"], 1)
    assert codes(submitted) == [[], []] and not any(request.kills for request, _ in submitted)
    assert [bool(each.incarnation) for each in workers].count(True) == 2


def test_source_that_leaves_before_the_second_run_is_slowed_too(gateway: Simulation) -> None:
    worker = gateway.start()
    request, _ = gateway.submit_rows(0, 2, source=POISONER)
    gateway.loop.turn()
    worker.begin(worker.sent[0])
    gateway.dispatcher.withdraw(request)
    gateway.lose(worker)
    assert gateway.lanes[0].offenders.is_known(POISONER, gateway.loop.now_ns)


def test_only_lost_parts_of_a_split_request_are_retried(gateway: Simulation) -> None:
    """One part is done, one is lost with its worker, the others run at another worker."""
    first, second = gateway.start(), gateway.start()
    ((request, caller),) = [gateway.submit_rows(0, 30, first=500)]
    gateway.loop.turn()
    gateway.done(first, first.sent[0])
    kill(gateway, first, 1)
    assert caller.outcome_count == 0 and request.is_alone
    second.play()
    gateway.loop.run(100 * MS)

    ranges = sorted((s.first, s.rows) for e in second.ran for s in e.slices)
    assert ranges == [(8, 8), (16, 8), (24, 6)]
    assert caller.results[0][: 8 * 30] == b"".join(i.to_bytes(8, "little") for i in range(500, 530))
    assert gateway.is_clean()


def test_loss_affects_only_the_batches_of_that_worker(gateway: Simulation) -> None:
    lost, other = gateway.start(), gateway.start()
    submitted = submit(gateway, *[8] * (2 * CREDITS + 1))
    lost_requests = {part.request for f in lost.in_flight.values() for part in f.parts}
    (first, _), before = lost.sent, other.in_flight.copy()
    kill(gateway, lost, 0)
    gateway.done(lost, first) if lost.incarnation else None

    assert codes(submitted) == [[]] * len(submitted)
    assert other.in_flight == before and gateway.dispatcher.in_flight == CREDITS
    assert {r for r, _ in submitted if r.is_waiting} == lost_requests | {submitted[-1][0]}
    assert gateway.lanes[0].ready == {other.incarnation}


def test_request_of_a_lost_worker_is_sent_to_the_next(gateway: Simulation) -> None:
    submitted = submit(gateway, 1) if gateway.start() else []
    kill(gateway, gateway.workers[0], None)
    replacement = gateway.start()

    assert len(replacement.sent) == 1
    gateway.done(replacement, replacement.sent[0])
    assert len(submitted[0][1].results) == 1 and gateway.is_clean()


def test_lost_request_past_its_deadline_is_rejected(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    request, caller = gateway.submit_rows(0, 1, budget_ms=5.0)
    gateway.loop.run(10 * MS)
    assert request.running == 1
    other = gateway.start()
    kill(gateway, worker, 0)

    assert caller.codes == ["deadline_exceeded"] and other.sent == []
    assert gateway.is_clean()


def test_lost_request_gets_a_new_ttl(gateway: Simulation, worker: SimulatedWorker) -> None:
    """The request is not to blame for the loss, so its queue time starts again."""
    request, caller = gateway.submit_rows(0, 1)
    gateway.loop.run(20_000 * MS)
    kill(gateway, worker, 0)
    gateway.loop.run(20_000 * MS)

    assert caller.outcome_count == 0 and request.is_waiting
    worker = gateway.start()
    gateway.done(worker, worker.sent[0])
    assert caller.codes == [] and gateway.is_clean()


def test_closed_worker_finishes_its_batches_and_gets_no_more(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    submitted = submit(gateway, *[8] * (CREDITS + 1))
    gateway.dispatcher.close(worker)
    for execute in list(worker.sent):
        gateway.done(worker, execute)

    assert [len(caller.results) for _, caller in submitted] == [1] * CREDITS + [0]
    assert len(worker.sent) == CREDITS and not gateway.lanes[0].is_ready


def test_withdrawn_request_leaves_the_queue_at_once(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """Its queue position and its lease are released together."""
    submitted = submit(gateway, *[8] * (CREDITS + 2))
    (withdrawn, caller), (kept, _) = submitted[CREDITS:]

    gateway.dispatcher.withdraw(withdrawn)

    assert (withdrawn.lease, caller.outcome_count, withdrawn.is_waiting) == (None, 0, False)
    assert list(gateway.lanes[0].queue) == [kept]
    assert len(gateway.input_arena.arena) == CREDITS + 1
    assert gateway.lanes[0].counts["withdrawn"] == 1


@pytest.mark.parametrize("outcome", ["done", "failed", "cancelled", "lost"])
def test_withdrawn_request_keeps_its_lease_until_the_worker_responds(
    gateway: Simulation, worker: SimulatedWorker, outcome: str
) -> None:
    """The worker reads the input until it responds; the range is not reused before."""
    ((request, caller),) = submit(gateway, 4)
    gateway.dispatcher.withdraw(request)
    assert request.lease is not None and gateway.input_arena.arena.is_live(request.lease)

    if outcome == "done":
        gateway.done(worker, worker.sent[0])
    elif outcome == "lost":
        kill(gateway, worker, 0)
    else:
        gateway.dispatcher.on_failed(worker, Failed(worker.sent[0].batch_id, outcome, "no"))

    assert caller.outcome_count == 0 and request.lease is None and gateway.is_clean()
    assert gateway.lanes[0].counts["completed"] == gateway.lanes[0].counts["retried"] == 0


def test_batch_is_cancelled_when_all_its_requests_are_withdrawn(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    submitted = submit(gateway, 2, 3)
    gateway.dispatcher.withdraw(submitted[0][0])
    assert worker.aborted == []

    gateway.dispatcher.withdraw(submitted[1][0])

    assert worker.aborted == [worker.sent[0].batch_id]


def test_batches_of_a_withdrawn_split_request_are_cancelled(gateway: Simulation) -> None:
    """Except a batch with rows of another request; queued rows leave the queue."""
    first, second = gateway.start(), gateway.start()
    first.cost = second.cost = lambda execute: MS
    (large, _), (_, other) = gateway.submit_rows(0, 30), gateway.submit_rows(0, 2)
    gateway.loop.turn()
    mixed = next(e for w in (first, second) for e in w.sent if len(e.slices) == 2)
    gateway.dispatcher.withdraw(large)

    batch_ids = {execute.batch_id for each in (first, second) for execute in each.sent}
    assert set(first.aborted + second.aborted) == batch_ids - {mixed.batch_id}
    for each in (first, second):
        each.play()
    gateway.loop.run(100 * MS)
    assert len(other.results) == 1 and gateway.is_clean()


def test_batch_at_a_draining_worker_is_cancelled_too(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, _),) = submit(gateway, 4)
    gateway.dispatcher.close(worker)

    gateway.dispatcher.withdraw(request)

    assert worker.aborted == [worker.sent[0].batch_id]


def test_withdrawing_an_answered_or_unqueued_request_has_no_effect(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    ((request, caller),) = submit(gateway, 1)
    gateway.done(worker, worker.sent[0])
    for _ in range(2):
        gateway.dispatcher.withdraw(request)
    gateway.dispatcher.withdraw(Request(gateway.lanes[0], RecordingCaller(), 1, []))

    assert caller.outcome_count == 1 and gateway.lanes[0].counts["withdrawn"] == 0
    assert worker.credits == CREDITS and gateway.is_clean()


def test_partly_sent_request_is_superseded(gateway: Simulation, worker: SimulatedWorker) -> None:
    """Its queued rows never run; its lease is released by the response of the worker."""
    older, caller = gateway.submit_rows(0, 24, client="a", is_newest_wins=True)
    gateway.loop.turn()
    assert older.running == CREDITS and older.is_waiting
    gateway.submit_rows(0, 1, client="a", is_newest_wins=True)

    assert caller.codes == ["superseded"] and older.lease is not None
    worker.play()
    gateway.loop.run(100 * MS)
    assert [each.rows for e in worker.sent for each in e.slices] == [8, 8, 1]
    assert gateway.is_clean()


def test_worker_is_ended_after_a_failed_send_and_its_batches_are_retried(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frame is too long for the socket, or the socket is full."""
    killed: list[SimulatedWorker] = []
    monkeypatch.setattr(worker, "kill", lambda: killed.append(worker))

    def fail_to_send(frame: bytes) -> None:
        raise OSError(90, "Message too long")

    monkeypatch.setattr(worker.wire, "send", fail_to_send)
    ((request, caller),) = submit(gateway, 3)

    assert killed == [worker] and caller.outcome_count == 0 and request.running == 1
    gateway.lose(worker)
    gateway.start().play()
    gateway.loop.run(100 * MS)
    assert len(caller.results) == 1 and gateway.is_clean()


def test_withdrawn_request_is_not_reported_as_poisoned(
    gateway: Simulation, worker: SimulatedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    ((request, caller),) = submit(gateway, 3)
    request.kills = 1
    gateway.dispatcher.withdraw(request)
    kill(gateway, worker, 0)

    assert caller.outcome_count == 0 and not caplog.records and gateway.is_clean()
