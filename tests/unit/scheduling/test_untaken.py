"""Results that cannot be taken: their request is told so, and nothing else is held up."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from support.lanes import lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.errors import ExecutionFailed, IskanderError
from iskander.memory import chunked_copy as pieces
from iskander.scheduling import dispatch, results
from iskander.scheduling.request import Request
from iskander.scheduling.worker_slot import CREDITS, BatchPart


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


class Untakeable:
    """In the place of what takes results: does it, but for some requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.requests: set[Request] = set()
        self._error = error
        monkeypatch.setattr(dispatch, "copy_results", self._taken)
        monkeypatch.setattr(dispatch, "copy_small_results", self._taken_at_once)

    def _taken_at_once(self, part: BatchPart, arena: memoryview) -> bytes | None:
        if part.request in self.requests:
            raise self._error
        return results.copy_small_results(part, arena)

    def _taken(self, part: BatchPart, arena: memoryview) -> results.Copying:
        if part.request in self.requests:
            raise self._error
        return (yield from results.copy_results(part, arena))


ERRORS = [
    (ExecutionFailed("the strings are too many"), "execution_failed"),
    (AssertionError("strings beyond their body"), "internal"),
    (MemoryError(), "internal"),
]


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_one_request_of_a_batch_is_told_and_the_others_get_their_results(
    gateway: Simulation,
    worker: SimulatedWorker,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: str,
) -> None:
    untakeable = Untakeable(monkeypatch, error)
    asked = [gateway.ask(0, 2) for _ in range(3)]
    untakeable.requests.add(asked[1][0])
    gateway.loop.turn()

    gateway.done(worker, worker.sent[0])

    assert [caller.codes for _, caller in asked] == [[], [code], []]
    assert [len(caller.results) for _, caller in asked] == [1, 0, 1]
    assert gateway.lanes[0].counts[f"failed.{code}"] == 1
    assert worker.credits == CREDITS and gateway.is_clean()


def test_parts_of_a_request_that_come_after_it_was_told_change_nothing(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    untakeable = Untakeable(monkeypatch, ExecutionFailed("no"))
    request, caller = gateway.ask(0, 24)
    untakeable.requests.add(request)
    gateway.loop.turn()

    gateway.done(worker, worker.sent[0])
    assert caller.codes == ["execution_failed"] and request.lease is not None
    for execute in worker.sent[1:]:
        gateway.done(worker, execute)

    assert caller.told == 1 and gateway.is_clean()


def test_large_results_behind_them_are_still_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pieces, results):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(results, "WHOLE_BYTES", 256)

    def taken(part: BatchPart, arena: memoryview) -> results.Copying:
        taking = results.copy_results(part, arena)
        yield next(taking)
        if part.request is first[0]:
            raise MemoryError
        return (yield from taking)

    monkeypatch.setattr(dispatch, "copy_results", taken)
    with Simulation(lane_of(0, rows_max=64)) as gateway:
        worker = gateway.start()
        first, second = gateway.ask(0, 60), gateway.ask(0, 60, first=100)
        gateway.loop.turn()
        for execute in list(worker.sent):
            worker.run(execute)
        gateway.loop.turn()

        third = gateway.ask(0, 60)
        gateway.loop.turn()
        gateway.done(worker, worker.sent[2])
        gateway.loop.turn()

        assert first[1].codes == ["internal"]
        assert len(second[1].results) == len(third[1].results) == 1
        assert gateway.is_clean()


def test_what_a_lost_worker_had_left_goes_back_though_its_results_cannot_be_taken(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def taken(part: BatchPart, arena: memoryview) -> results.Copying:
        yield
        raise MemoryError

    monkeypatch.setattr(dispatch, "copy_results", taken)
    monkeypatch.setattr(dispatch, "copy_small_results", lambda *_: None)
    computed, waiting = gateway.ask(0, 8), gateway.ask(0, 8)
    gateway.loop.turn()
    worker.run(worker.sent[0])
    gateway.lose(worker)

    assert computed[1].codes == ["internal"]
    assert gateway.lanes[0].counts["retried"] == 1 and len(gateway.lanes[0].queue) == 1
    monkeypatch.setattr(dispatch, "copy_results", results.copy_results)
    gateway.start().play()
    gateway.loop.run(100_000_000)
    assert len(waiting[1].results) == 1 and gateway.is_clean()


def test_a_caller_that_fails_at_its_own_error_keeps_nobody_else_from_theirs(
    gateway: Simulation,
    worker: SimulatedWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(request: Request, error: IskanderError) -> None:
        raise ValueError("broken caller")

    untakeable = Untakeable(monkeypatch, MemoryError())
    asked = [gateway.ask(0, 2) for _ in range(2)]
    untakeable.requests.add(asked[0][0])
    monkeypatch.setattr(asked[0][1], "fail", fail)
    gateway.loop.turn()

    with caplog.at_level(logging.ERROR):
        gateway.done(worker, worker.sent[0])

    assert "broken caller" in caplog.text
    assert len(asked[1][1].results) == 1 and gateway.is_clean()
