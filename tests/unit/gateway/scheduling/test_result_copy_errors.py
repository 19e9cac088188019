"""Errors while results are copied: only the affected request fails."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from support.lanes import lane_of
from support.simulation import SimulatedWorker, Simulation

from iskander.errors import ExecutionFailed, IskanderError
from iskander.gateway.scheduling import dispatch, results
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import CREDITS, BatchPart
from iskander.interprocess.memory import chunked_copy


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


class FailingCopies:
    """Replaces the functions that copy results; they fail for some requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.requests: set[Request] = set()
        self._error = error
        monkeypatch.setattr(dispatch, "copy_results", self._copy)
        monkeypatch.setattr(dispatch, "copy_small_results", self._copy_small)

    def _copy_small(self, part: BatchPart, arena: memoryview) -> bytes | None:
        if part.request in self.requests:
            raise self._error
        return results.copy_small_results(part, arena)

    def _copy(self, part: BatchPart, arena: memoryview) -> results.Copying:
        if part.request in self.requests:
            raise self._error
        return (yield from results.copy_results(part, arena))


ERRORS = [
    (ExecutionFailed("the strings are too many"), "execution_failed"),
    (AssertionError("strings beyond their body"), "internal"),
    (MemoryError(), "internal"),
]


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_copy_error_fails_one_request_of_a_batch(
    gateway: Simulation,
    worker: SimulatedWorker,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    code: str,
) -> None:
    failing = FailingCopies(monkeypatch, error)
    submitted = [gateway.submit_rows(0, 2) for _ in range(3)]
    failing.requests.add(submitted[1][0])
    gateway.loop.turn()

    gateway.done(worker, worker.sent[0])

    assert [caller.codes for _, caller in submitted] == [[], [code], []]
    assert [len(caller.results) for _, caller in submitted] == [1, 0, 1]
    assert gateway.lanes[0].counts[f"failed.{code}"] == 1
    assert worker.credits == CREDITS and gateway.is_clean()


def test_later_parts_of_a_failed_request_are_ignored(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingCopies(monkeypatch, ExecutionFailed("no"))
    request, caller = gateway.submit_rows(0, 24)
    failing.requests.add(request)
    gateway.loop.turn()

    gateway.done(worker, worker.sent[0])
    assert caller.codes == ["execution_failed"] and request.lease is not None
    for execute in worker.sent[1:]:
        gateway.done(worker, execute)

    assert caller.outcome_count == 1 and gateway.is_clean()


def test_copy_error_does_not_stop_other_large_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (chunked_copy, results):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    monkeypatch.setattr(results, "WHOLE_BYTES", 256)

    def copy(part: BatchPart, arena: memoryview) -> results.Copying:
        steps = results.copy_results(part, arena)
        yield next(steps)
        if part.request is first[0]:
            raise MemoryError
        return (yield from steps)

    monkeypatch.setattr(dispatch, "copy_results", copy)
    with Simulation(lane_of(0, rows_max=64)) as gateway:
        worker = gateway.start()
        first, second = gateway.submit_rows(0, 60), gateway.submit_rows(0, 60, first=100)
        gateway.loop.turn()
        for execute in list(worker.sent):
            worker.run(execute)
        gateway.loop.turn()

        third = gateway.submit_rows(0, 60)
        gateway.loop.turn()
        gateway.done(worker, worker.sent[2])
        gateway.loop.turn()

        assert first[1].codes == ["internal"]
        assert len(second[1].results) == len(third[1].results) == 1
        assert gateway.is_clean()


def test_batches_of_a_lost_worker_are_retried_after_a_copy_error(
    gateway: Simulation, worker: SimulatedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(part: BatchPart, arena: memoryview) -> results.Copying:
        yield
        raise MemoryError

    monkeypatch.setattr(dispatch, "copy_results", copy)
    monkeypatch.setattr(dispatch, "copy_small_results", lambda *_: None)
    computed, queued = gateway.submit_rows(0, 8), gateway.submit_rows(0, 8)
    gateway.loop.turn()
    worker.run(worker.sent[0])
    gateway.lose(worker)

    assert computed[1].codes == ["internal"]
    assert gateway.lanes[0].counts["retried"] == 1 and len(gateway.lanes[0].queue) == 1
    monkeypatch.setattr(dispatch, "copy_results", results.copy_results)
    gateway.start().play()
    gateway.loop.run(100_000_000)
    assert len(queued[1].results) == 1 and gateway.is_clean()


def test_exception_in_fail_does_not_affect_other_requests(
    gateway: Simulation,
    worker: SimulatedWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(request: Request, error: IskanderError) -> None:
        raise ValueError("broken caller")

    failing = FailingCopies(monkeypatch, MemoryError())
    submitted = [gateway.submit_rows(0, 2) for _ in range(2)]
    failing.requests.add(submitted[0][0])
    monkeypatch.setattr(submitted[0][1], "fail", fail)
    gateway.loop.turn()

    with caplog.at_level(logging.ERROR):
        gateway.done(worker, worker.sent[0])

    assert "broken caller" in caplog.text
    assert len(submitted[1][1].results) == 1 and gateway.is_clean()
