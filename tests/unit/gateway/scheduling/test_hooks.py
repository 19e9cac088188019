"""Hooks: each function reads each batch, each part of the results, and each ended worker, once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.lanes import lane_of
from support.simulation import Simulation

from iskander.gateway.scheduling.hooks import Hooks
from iskander.gateway.scheduling.tracing import LOST
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot
from iskander.interprocess.control.messages import Failed


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=8)) as gateway:
        yield gateway


class Reader:
    """Keeps what the dispatcher passes to its functions, in order."""

    def __init__(self, hooks: Hooks) -> None:
        self.read: list[tuple[object, ...]] = []
        hooks.on_batch.append(self._on_batch)
        hooks.on_results.append(self._on_results)
        hooks.on_worker_lost.append(lambda worker: self.read.append(("worker", worker.index)))

    def _on_batch(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        batch_id: int,
        _: int,
        run: int,
        outcome: str,
    ) -> None:
        self.read.append(("batch", batch_id, bool(run), outcome))

    def _on_results(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        part: BatchPart,
        results: bytes | memoryview | None,
    ) -> None:
        assert not part.request.is_over and batch.output.length_bytes
        self.read.append(("results", part.first, part.rows, results is not None))


def test_results_of_a_split_request_are_whole_with_its_last_rows(gateway: Simulation) -> None:
    readers = [Reader(gateway.dispatcher.hooks) for _ in range(2)]
    worker = gateway.start()
    _, caller = gateway.submit_rows(0, 12)
    gateway.loop.turn()
    for execute in list(worker.sent):
        gateway.done(worker, execute)

    assert len(caller.results) == 1
    expected = [
        ("batch", 1, True, ""),
        ("results", 0, 8, False),
        ("batch", 2, True, ""),
        ("results", 8, 4, True),
    ]
    assert [reader.read for reader in readers] == [expected, expected]
    assert gateway.is_clean()


def test_failed_and_lost_batches_have_an_outcome_and_no_results(gateway: Simulation) -> None:
    reader = Reader(gateway.dispatcher.hooks)
    worker = gateway.start()
    for _ in range(2):
        gateway.submit_rows(0, 8)
        gateway.loop.turn()
    gateway.dispatcher.on_failed(worker, Failed(1, "execution_failed", "no"))
    gateway.lose(worker)

    assert reader.read == [
        ("batch", 1, False, "execution_failed"),
        ("worker", worker.index),
        ("batch", 2, False, LOST),
    ]
