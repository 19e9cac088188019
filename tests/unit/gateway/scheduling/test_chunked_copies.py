"""Copies of large requests and results in pieces, with other work between the pieces."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.input_arena import (
    CONTRACT,
    GRAINS,
    EntryArena,
    admit,
    in_loop,
    open_lane,
    request_of,
    turn,
)
from support.lanes import RecordingCaller, lane_of
from support.lanes import request_of as lane_request_of
from support.simulation import SimulatedWorker, Simulation

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import QueueFull
from iskander.gateway.scheduling import input_arena as input_arena_module
from iskander.gateway.scheduling import results
from iskander.gateway.scheduling.worker_slot import BatchPart
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.memory import chunked_copy
from iskander.interprocess.memory.arena import GRAIN_BYTES

PIECE = 64


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large request has more than four pieces of 64 bytes."""
    for module in (chunked_copy, results):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(results, "WHOLE_BYTES", 4 * PIECE)


@pytest.fixture
def input_arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[EntryArena]:
    monkeypatch.setattr(input_arena_module, "WHOLE_BYTES", 4 * PIECE)
    input_arena = EntryArena(GRAINS * GRAIN_BYTES, LimitsConfig())
    yield input_arena
    input_arena.close()


@pytest.fixture
def gateway() -> Iterator[Simulation]:
    with Simulation(lane_of(0, rows_max=64)) as gateway:
        yield gateway


@pytest.fixture
def worker(gateway: Simulation) -> SimulatedWorker:
    return gateway.start()


def values_of(caller: RecordingCaller) -> list[int]:
    (result,) = caller.results
    return np.frombuffer(result, np.int64).tolist()


@pytest.mark.parametrize("length", [0, 1, PIECE, PIECE + 1, 10 * PIECE - 1])
def test_copy_is_complete_and_pauses_after_each_piece(length: int) -> None:
    source = bytes(index % 251 for index in range(length))
    target = bytearray(length)

    pauses = sum(1 for _ in chunked_copy.copy_in_pieces(memoryview(target), memoryview(source)))

    assert bytes(target) == source
    assert pauses == -(-length // PIECE)


@in_loop
async def test_copy_of_a_large_request_yields_after_each_piece(
    input_arena: EntryArena,
) -> None:
    request = request_of(open_lane(), 2)
    request.tensors = [
        memoryview(bytes(index % 251 for index in range(len(tensor)))) for tensor in request.tensors
    ]
    expected, turns = [bytes(tensor) for tensor in request.tensors], 0

    assert not input_arena.admit(request)
    task = asyncio.create_task(input_arena.admit_later(request))
    while not task.done():
        await turn()
        turns += 1

    assert turns > 10
    for each, offset in zip(expected, request.layout.offsets, strict=True):
        start = request.body_offset + offset
        assert input_arena.segment.view[start : start + len(each)] == each
    input_arena.give_back(request)
    assert input_arena.arena.leased_bytes == 0


@in_loop
async def test_cancelled_copy_releases_its_lease(
    input_arena: EntryArena,
) -> None:
    request = request_of(open_lane(), 2)
    assert not input_arena.admit(request)
    task = asyncio.create_task(input_arena.admit_later(request))
    for _ in range(4):
        await turn()
    assert input_arena.arena.leased_bytes

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert (request.lease, input_arena.arena.leased_bytes) == (None, 0)


@in_loop
async def test_request_is_rejected_if_the_queue_is_full_after_its_copy(
    input_arena: EntryArena,
) -> None:
    """Both pass admission before their copies; the first copied request is queued."""
    lane = lane_of(contract=CONTRACT, rows_max=1 << 20, queue_requests=1)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    requests = [request_of(lane), request_of(lane)]

    first, second = (asyncio.create_task(admit(input_arena, request)) for request in requests)
    await asyncio.wait([first, second])

    assert first.exception() is None
    error = second.exception()
    assert isinstance(error, QueueFull)
    error.__traceback__ = None  # It refers to the arena, which is closed at the end.
    assert len(lane.queue) == 1 and requests[1].lease is None
    input_arena.give_back(requests[0])
    assert input_arena.arena.leased_bytes == 0


def test_large_results_are_copied_in_pieces_and_small_ones_overtake_them(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    large, small = gateway.submit_rows(0, 60, first=0), gateway.submit_rows(0, 5, first=100)
    gateway.loop.turn()
    first, second = worker.sent

    gateway.done(worker, first)
    assert not large[1].outcome_count and gateway.dispatcher.in_flight
    gateway.done(worker, second)
    assert values_of(small[1])[:5] == list(range(100, 105)) and not large[1].outcome_count
    for _ in range(20):
        gateway.loop.turn()

    assert values_of(large[1])[:60] == list(range(60))
    assert not gateway.dispatcher.in_flight and gateway.is_clean()


def test_results_of_a_split_request_are_copied_in_pieces(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    request, caller = gateway.submit_rows(0, 200, first=0)
    gateway.loop.turn()
    while not caller.outcome_count:
        for execute in list(worker.sent):
            if execute.batch_id in worker.in_flight:
                gateway.done(worker, execute)
        gateway.loop.turn()

    assert values_of(caller)[:200] == list(range(200))
    assert request.is_over and gateway.is_clean()


def test_first_results_of_a_large_request_touch_only_their_own_memory() -> None:
    """One of 1024 rows of 256 KiB arrives; the resident memory grows by much less than all rows."""
    wide = TensorSpec("y", "y", ColumnType("float32", (1 << 16,)), (1 << 16,))
    request = lane_request_of(lane_of(contract=Contract(CONTRACT.inputs, (wide,))), 1024)
    row = memoryview(bytes(range(256)) * 1024)
    before = resident_bytes()

    for _ in results.copy_results(BatchPart(request, 1, 1, 0), row):
        pass

    assert resident_bytes() - before < 64 << 20
    assert isinstance(request.results, memoryview)
    assert request.results[len(row) : 2 * len(row)] == row and not any(request.results[:99])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_copy_in_progress_is_finished_when_the_worker_is_lost(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    """The results are complete, and their arena is unmapped with the worker."""
    request, caller = gateway.submit_rows(0, 60, first=0)
    gateway.loop.turn()
    gateway.done(worker, worker.sent[0])
    assert not caller.outcome_count

    gateway.dispatcher.on_lost(worker)

    assert values_of(caller)[:60] == list(range(60)) and request.losses == 0
    gateway.loop.turn()
    assert not gateway.dispatcher.in_flight


def test_withdrawal_during_the_copy_delivers_nothing(
    gateway: Simulation, worker: SimulatedWorker
) -> None:
    request, caller = gateway.submit_rows(0, 60, first=0)
    gateway.loop.turn()
    gateway.done(worker, worker.sent[0])

    gateway.dispatcher.withdraw(request)
    for _ in range(20):
        gateway.loop.turn()

    assert not caller.outcome_count and gateway.is_clean()
