"""Input arena: written messages, rejections before a lease, and released leases."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.input_arena import (
    CONTRACT,
    FOR_EVER,
    GRAINS,
    QUEUE_REQUESTS,
    EntryArena,
    NullCaller,
    admit,
    in_loop,
    open_lane,
    request_of,
    turns,
)
from support.random_examples import up_to

from iskander.arrow.types import input_schema
from iskander.config.schema import LimitsConfig
from iskander.contract.tensors import ALIGNMENT
from iskander.errors import LimitExceeded, NotReady, QueueFull
from iskander.foundation.clock import now_ns
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request, Terms
from iskander.interprocess.memory.arena import GRAIN_BYTES


@pytest.fixture
def lane() -> Lane:
    return open_lane()


@pytest.fixture
def input_arena() -> Iterator[EntryArena]:
    """An arena of a few grains with a very long wait limit."""
    input_arena = EntryArena(GRAINS * GRAIN_BYTES, FOR_EVER)
    yield input_arena
    input_arena.close()


@in_loop
async def test_request_is_written_as_an_arrow_message(input_arena: EntryArena, lane: Lane) -> None:
    """pyarrow reads the message in the arena as a batch that equals the two columns."""
    batch = pa.record_batch(
        [pa.array([3, 1, 2], pa.int64()), pa.array([True, False, True])],
        schema=input_schema(CONTRACT),
    )
    values = [memoryview(column.buffers()[1]).cast("B") for column in batch.columns]
    tensors = [values[0][:24], values[1][:1]]
    request = Request(lane, NullCaller(), 3, tensors, arrived_ns=now_ns())

    await admit(input_arena, request)

    assert request.lease is not None and request.tensors == []
    lease = request.lease
    raw = input_arena.segment.view[lease.offset : lease.offset + lease.length_bytes]
    assert pa.ipc.read_record_batch(pa.py_buffer(raw), batch.schema).equals(batch)
    assert (input_arena.segment.address + request.body_offset) % ALIGNMENT == 0
    assert request.body_offset - lease.offset == len(lane.layout(3).header)
    assert list(lane.queue) == [request]
    assert (lane.counts["requests"], lane.counts["rows"]) == (1, 3)
    raw.release()


@in_loop
async def test_request_without_a_worker_is_rejected_before_a_lease(
    input_arena: EntryArena, lane: Lane
) -> None:
    lane.workers.clear()

    with pytest.raises(NotReady, match="`m0/1` has no ready worker") as caught:
        await admit(input_arena, request_of(lane))

    assert caught.value.retry_after_ms
    assert (input_arena.arena.leased_bytes, len(lane.queue)) == (0, 0)


@in_loop
async def test_request_to_a_full_queue_is_rejected_before_a_lease(lane: Lane) -> None:
    """Both sides of the limit."""
    input_arena = EntryArena((QUEUE_REQUESTS + 1) * GRAIN_BYTES, FOR_EVER)
    for _ in range(QUEUE_REQUESTS):
        await admit(input_arena, request_of(lane))

    with pytest.raises(QueueFull, match=f"{QUEUE_REQUESTS} requests queued"):
        await admit(input_arena, request_of(lane))

    assert len(input_arena.arena) == len(lane.queue) == QUEUE_REQUESTS
    input_arena.close()


@in_loop
async def test_request_with_too_large_results_is_rejected_before_a_lease(lane: Lane) -> None:
    """Both sides of the limit; the size follows from the number of rows."""
    request = request_of(lane)
    output_bytes = request.layout.output_bytes
    for result_bytes in (output_bytes - 1, output_bytes):
        input_arena = EntryArena(GRAINS * GRAIN_BYTES, LimitsConfig(result_bytes=result_bytes))
        if result_bytes < output_bytes:
            size = rf"{request.rows} rows make {output_bytes} .* "
            message = rf"{size}{result_bytes} \(`limits.result_bytes`\)"
            with pytest.raises(LimitExceeded, match=message) as caught:
                input_arena.admit(request)
            assert not caught.value.retryable and input_arena.arena.leased_bytes == 0
        else:
            assert input_arena.admit(request)
        input_arena.close()


@in_loop
async def test_admitted_and_rejected_requests_are_observed_once(
    input_arena: EntryArena, lane: Lane
) -> None:
    """The rhythm of a client includes its rejected requests."""
    terms = Terms(client="robot", is_named=True)
    intervals = [samples for _, _, samples in lane.arrivals.clients()]
    for is_open in (True, False, True, False, False):
        workers = dict(lane.workers)
        if not is_open:
            lane.workers.clear()
        with contextlib.nullcontext() if is_open else pytest.raises(NotReady):
            await admit(input_arena, request_of(lane, terms=terms))
        lane.workers.update(workers)
        intervals += [samples for _, _, samples in lane.arrivals.clients()]

    assert intervals == [0, 1, 2, 3, 4]


@in_loop
async def test_lease_is_released_once(input_arena: EntryArena, lane: Lane) -> None:
    request = request_of(lane)
    await admit(input_arena, request)

    input_arena.give_back(request)

    assert request.lease is None
    assert input_arena.arena.leased_bytes == 0
    with pytest.raises(AssertionError):
        input_arena.give_back(request)


@in_loop
async def test_failed_write_releases_its_lease(input_arena: EntryArena, lane: Lane) -> None:
    request = request_of(lane)
    request.tensors.pop()

    with pytest.raises(AssertionError):
        await admit(input_arena, request)

    assert (input_arena.arena.leased_bytes, len(lane.queue)) == (0, 0)


STEPS = st.lists(
    st.tuples(st.just("submit"), st.integers(1, GRAINS))
    | st.tuples(st.sampled_from(["cancel", "release"]), st.integers(0, 7))
    | st.tuples(st.just("turn"), st.just(0)),
    max_size=40,
)


@settings(deadline=None, max_examples=up_to(150))
@given(STEPS)
def test_no_order_of_events_leaks_arena_space(steps: list[tuple[str, int]]) -> None:
    """Submissions, cancellations and releases, in one loop iteration or in several."""
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int]]) -> None:
    lane = open_lane()
    input_arena = EntryArena(GRAINS * GRAIN_BYTES, FOR_EVER)
    submitted: list[tuple[Request, asyncio.Task[None]]] = []
    try:
        for step, number in steps:
            if step == "submit":
                request = request_of(lane, number)
                submitted.append((request, asyncio.create_task(admit(input_arena, request))))
            elif step == "turn":
                await turns()
            else:
                _cancel_or_release(input_arena, submitted, step, number)
            input_arena.arena.validate()
        while any(not task.done() for _, task in submitted) or _holders(submitted):
            for request in _holders(submitted):
                input_arena.give_back(request)
            await turns()
        assert all(task.cancelled() or task.exception() is None for _, task in submitted)
        input_arena.arena.validate()
        assert input_arena.arena.leased_bytes == 0
    finally:
        for _, task in submitted:
            task.cancel()
        await turns()
        input_arena.close()


def _holders(submitted: list[tuple[Request, asyncio.Task[None]]]) -> list[Request]:
    return [request for request, _ in submitted if request.lease is not None]


def _cancel_or_release(
    input_arena: EntryArena,
    submitted: list[tuple[Request, asyncio.Task[None]]],
    step: str,
    number: int,
) -> None:
    waiting, holding = [task for _, task in submitted if not task.done()], _holders(submitted)
    if step == "cancel" and waiting:
        waiting[number % len(waiting)].cancel()
    elif step == "release" and holding:
        input_arena.give_back(holding[number % len(holding)])
