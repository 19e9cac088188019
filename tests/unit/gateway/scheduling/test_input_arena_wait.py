"""Waiting for space in a full input arena: order, rejections, and no lost leases."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator

import pytest
from support.input_arena import (
    FOR_EVER,
    GRAINS,
    QUEUE_REQUESTS,
    EntryArena,
    admit,
    in_loop,
    open_lane,
    request_of,
    submit,
    turn,
    turns,
)

from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, DeadlineExceeded, NotReady, QueueFull, SegmentError
from iskander.gateway.auth.source import Source
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


class FullArena:
    """A full arena and requests that wait for space in it."""

    def __init__(self, input_arena: EntryArena, lane: Lane) -> None:
        self.input_arena, self.lane = input_arena, lane
        self.holders: list[Request] = []
        self.order: list[Request] = []

    async def fill(self, *grains: int) -> None:
        for each in grains:
            self.holders.append(request_of(self.lane, each))
            await admit(self.input_arena, self.holders[-1])
        for request in list(self.lane.queue):
            self.lane.queue.remove(request)

    async def submit(self, grains: int) -> tuple[Request, asyncio.Task[None]]:
        request = request_of(self.lane, grains)
        task = asyncio.create_task(admit(self.input_arena, request))
        await turn()
        return request, task


@pytest.fixture
def harness(input_arena: EntryArena, lane: Lane) -> FullArena:
    return FullArena(input_arena, lane)


@in_loop
async def test_requests_wait_in_order_of_arrival(harness: FullArena) -> None:
    """Each released grain goes to the request that has waited longest."""
    await harness.fill(1, 1, 1, 1)
    waiting = [await harness.submit(1) for _ in range(3)]
    await turns()
    assert not any(task.done() for _, task in waiting)

    for holder in harness.holders[:3]:
        harness.input_arena.give_back(holder)
    await turns()

    assert all(task.done() for _, task in waiting)
    assert list(harness.lane.queue) == [request for request, _ in waiting]


@in_loop
async def test_lane_is_not_empty_while_a_request_waits_and_is_empty_after_it(
    harness: FullArena,
) -> None:
    """An unloaded model is closed when its lane is empty."""
    await harness.fill(4)
    harness.lane.outstanding.clear()
    assert harness.lane.is_empty

    _, task = await harness.submit(1)
    assert not harness.lane.is_empty
    task.cancel()
    await turns()

    assert harness.lane.is_empty


@in_loop
async def test_one_release_admits_one_request(harness: FullArena) -> None:
    await harness.fill(1, 1, 1, 1)
    (_, first), (_, second) = await harness.submit(1), await harness.submit(1)

    harness.input_arena.give_back(harness.holders[2])
    await turns()

    assert first.done() and not second.done()
    second.cancel()
    await turns()


@in_loop
async def test_small_request_does_not_overtake_a_large_one(harness: FullArena) -> None:
    """One grain is free and sufficient, but the large request could then wait without end."""
    await harness.fill(3)
    (large, _), (small, small_task) = await harness.submit(3), await harness.submit(1)
    await turns()
    assert not small_task.done()

    harness.input_arena.give_back(harness.holders[0])
    await turns()

    assert list(harness.lane.queue) == [large, small]


@in_loop
async def test_new_request_does_not_overtake_a_waiting_one(harness: FullArena) -> None:
    """It arrives in the iteration of the release, before the waiting task runs."""
    await harness.fill(2, 2)
    first, first_task = await harness.submit(4)

    harness.input_arena.give_back(harness.holders[0])
    new_request, new_task = await harness.submit(2)
    assert not first_task.done() and not new_task.done()
    harness.input_arena.give_back(harness.holders[1])
    await turns()

    assert list(harness.lane.queue) == [first]
    harness.input_arena.give_back(first)
    await turns()
    assert list(harness.lane.queue) == [first, new_request]


@pytest.mark.parametrize("wait_ms", [0, 1])
@in_loop
async def test_request_is_rejected_after_the_wait_limit_and_can_retry(
    lane: Lane, wait_ms: int
) -> None:
    input_arena = EntryArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=wait_ms))
    holder, late = request_of(lane), request_of(lane)
    await admit(input_arena, holder)

    with pytest.raises(ArenaFull, match=f"full for {wait_ms} ms") as caught:
        await admit(input_arena, late)

    assert caught.value.retry_after_ms
    assert lane.counts["refused.arena_full"] == 1
    assert late.lease is None and list(lane.queue) == [holder]
    input_arena.give_back(holder)
    await admit(input_arena, late)
    assert late.lease is not None
    input_arena.close()


@pytest.mark.parametrize("terms", [Terms(budget_ms=1.0), Terms(ttl_ms=1.0)])
@in_loop
async def test_wait_ends_when_the_request_expires(harness: FullArena, terms: Terms) -> None:
    """The wait limit is an hour; space that is released later goes to others."""
    await harness.fill(4)
    late = request_of(harness.lane, 1, terms)

    with pytest.raises(DeadlineExceeded):
        await admit(harness.input_arena, late)

    assert late.lease is None and harness.lane.counts["refused.deadline_exceeded"] == 1
    harness.input_arena.give_back(harness.holders[0])
    assert harness.input_arena.arena.leased_bytes == 0


@pytest.mark.parametrize("change", ["workers", "queue"])
@in_loop
async def test_admission_is_checked_again_after_the_wait(harness: FullArena, change: str) -> None:
    """In the meantime the workers exited or the queue filled; both requests are rejected."""
    await harness.fill(4)
    (_, rejected), (_, following) = await harness.submit(1), await harness.submit(1)
    if change == "workers":
        harness.lane.workers.clear()
    else:
        for _ in range(QUEUE_REQUESTS):
            submit(request_of(harness.lane))
    harness.input_arena.give_back(harness.holders[0])
    await turns()

    error = NotReady if change == "workers" else QueueFull
    assert isinstance(rejected.exception(), error) and isinstance(following.exception(), error)
    assert harness.input_arena.arena.leased_bytes == 0


@in_loop
async def test_next_request_is_admitted_when_the_first_is_cancelled(harness: FullArena) -> None:
    """The large request blocked a small one that fits."""
    await harness.fill(3)
    _, large = await harness.submit(2)
    small, _ = await harness.submit(1)

    large.cancel()
    await turns()

    assert list(harness.lane.queue) == [small]


@in_loop
async def test_cancelled_requests_keep_no_lease(harness: FullArena) -> None:
    """The first, middle and last are cancelled; the others are admitted in order."""
    await harness.fill(1, 1, 1, 1)
    waiting = [await harness.submit(1) for _ in range(5)]
    for index in (0, 2, 4):
        waiting[index][1].cancel()
    await turns()
    assert all(waiting[index][1].cancelled() for index in (0, 2, 4))

    for holder in harness.holders:
        harness.input_arena.give_back(holder)
    await turns()

    assert list(harness.lane.queue) == [waiting[1][0], waiting[3][0]]
    assert len(harness.input_arena.arena) == 2


@in_loop
async def test_lease_granted_and_then_cancelled_in_one_iteration(harness: FullArena) -> None:
    """The lease of the cancelled task goes to the next request."""
    await harness.fill(4)
    (cancelled, task), (following, _) = await harness.submit(4), await harness.submit(1)

    harness.input_arena.give_back(harness.holders[0])
    task.cancel()
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(harness.lane.queue) == [following]
    assert harness.input_arena.arena.leased_bytes == GRAIN_BYTES


@in_loop
async def test_request_cancelled_before_a_release_in_one_iteration(harness: FullArena) -> None:
    """The end of a waiting stream: its reader is cancelled, then its leases are released."""
    await harness.fill(4)
    (cancelled, task), (following, _) = await harness.submit(4), await harness.submit(1)

    task.cancel()
    harness.input_arena.give_back(harness.holders[0])
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(harness.lane.queue) == [following]
    assert harness.input_arena.arena.leased_bytes == GRAIN_BYTES


@pytest.mark.parametrize("turns_between", [0, 1, 2])
@in_loop
async def test_release_around_the_end_of_the_wait_leaks_nothing(
    lane: Lane, turns_between: int
) -> None:
    """The release is in the iteration before, at, or after the end of the wait."""
    harness = FullArena(EntryArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=0)), lane)
    await harness.fill(1)
    request = request_of(lane)
    task = asyncio.create_task(admit(harness.input_arena, request))
    loop = asyncio.get_running_loop()

    release = functools.partial(harness.input_arena.give_back, harness.holders[0])
    for _ in range(turns_between):
        release = functools.partial(loop.call_soon, release)
    loop.call_soon(release)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    await turns()

    assert outcome is None or isinstance(outcome, ArenaFull)
    assert (request.lease is not None) == (outcome is None)
    assert len(harness.input_arena.arena) == (outcome is None)
    harness.input_arena.close()


@in_loop
async def test_request_larger_than_the_arena_is_rejected_at_once(harness: FullArena) -> None:
    with pytest.raises(SegmentError, match="can never fit"):
        await admit(harness.input_arena, request_of(harness.lane, GRAINS + 1))

    assert harness.input_arena.arena.leased_bytes == 0


@in_loop
async def test_request_larger_than_the_arena_is_rejected_behind_others(harness: FullArena) -> None:
    """As a waiting request it would block all others and fail the release of a lease."""
    await harness.fill(4)
    (first, _), (oversized, task) = await harness.submit(1), await harness.submit(GRAINS + 1)
    following, _ = await harness.submit(1)

    harness.input_arena.give_back(harness.holders[0])
    await turns()

    assert isinstance(task.exception() if task.done() else None, SegmentError)
    assert list(harness.lane.queue) == [first, following] and oversized.lease is None


FIRST, OTHER = Source(connection=1), Source(connection=2)


class SharedArena:
    """An arena large enough to be divided between sources; one grain per request."""

    GRAINS = 180

    def __init__(self) -> None:
        self.lane = open_lane()
        self.input_arena = EntryArena(self.GRAINS * GRAIN_BYTES, FOR_EVER)
        self.holders: list[Request] = []

    async def admit(self, source: Source, grains: int = 1) -> asyncio.Task[None]:
        """Submits a request; if admitted, it leaves the queue and keeps its lease."""
        request = request_of(self.lane, grains, terms=Terms(source=source))
        task = asyncio.create_task(admit(self.input_arena, request))
        await turns()
        if task.done() and task.exception() is None:
            self.lane.queue.remove(request)
            self.holders.append(request)
        return task


@in_loop
async def test_one_source_cannot_fill_the_arena() -> None:
    harness = SharedArena()
    tasks = [await harness.admit(FIRST) for _ in range(harness.GRAINS)]
    admitted = sum(task.done() for task in tasks)
    assert harness.GRAINS * 8 // 9 <= admitted < harness.GRAINS

    other = await harness.admit(OTHER)

    assert other.done() and other.exception() is None
    for task in tasks:
        task.cancel()
    await turns()
    harness.input_arena.close()


@in_loop
async def test_waiting_sources_are_admitted_round_robin() -> None:
    """Not in order of arrival: one of the sources has many requests."""
    harness = SharedArena()
    waiting = []
    for grains in (8, 1):
        for connection in range(100, 200):
            task = await harness.admit(Source(connection=connection), grains)
            if not task.done():
                waiting.append(task)
                break
    for task in waiting:
        task.cancel()
    waiting = [await harness.admit(FIRST, 8) for _ in range(9)]
    late = await harness.admit(OTHER, 8)

    for request in harness.holders[:2]:
        harness.input_arena.give_back(request)
        await turns()

    assert late.done()
    assert sum(task.done() for task in waiting) == 1
    for task in waiting:
        task.cancel()
    await turns()
    assert not harness.input_arena._waiting
    harness.input_arena.close()


@in_loop
async def test_large_request_is_not_starved_by_those_of_other_sources() -> None:
    """Each released piece has the size of the other request, which counts as large, too."""
    harness = SharedArena()
    arena = harness.input_arena.arena
    held = [arena.lease(4 * GRAIN_BYTES) for _ in range(harness.GRAINS // 4)]
    large, other = await harness.admit(FIRST, 7), await harness.admit(OTHER, 4)

    for released, lease in enumerate(held[:3], 1):
        assert lease is not None
        arena.give_back(lease)
        harness.input_arena.grant_waiting()
        await turns()
        assert (large.done(), other.done()) == (released >= 2, released >= 3)

    harness.input_arena.close()
