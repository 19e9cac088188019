"""Who waits for room in a full input arena, in which order, and that nothing is lost by it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator

import pytest
from support.input_arena import (
    FOR_EVER,
    GRAINS,
    QUEUE_REQUESTS,
    admit,
    in_loop,
    open_lane,
    request_of,
    submit,
    turn,
    turns,
)

from iskander.auth.source import Source
from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, DeadlineExceeded, NotReady, QueueFull, SegmentError
from iskander.memory.arena import GRAIN_BYTES
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Request, Terms


@pytest.fixture
def lane() -> Lane:
    return open_lane()


@pytest.fixture
def input_arena() -> Iterator[InputArena]:
    """An arena of a few grains, whose waiters wait for ever."""
    input_arena = InputArena(GRAINS * GRAIN_BYTES, FOR_EVER)
    yield input_arena
    input_arena.close()


class Room:
    """A full arena, and requests that wait for it in the order in which they came."""

    def __init__(self, input_arena: InputArena, lane: Lane) -> None:
        self.input_arena, self.lane = input_arena, lane
        self.holders: list[Request] = []
        self.order: list[Request] = []

    async def fill(self, *grains: int) -> None:
        for each in grains:
            self.holders.append(request_of(self.lane, each))
            await admit(self.input_arena, self.holders[-1])
        for request in list(self.lane.queue):
            self.lane.queue.remove(request)

    async def ask(self, grains: int) -> tuple[Request, asyncio.Task[None]]:
        request = request_of(self.lane, grains)
        task = asyncio.create_task(admit(self.input_arena, request))
        await turn()
        return request, task


@pytest.fixture
def room(input_arena: InputArena, lane: Lane) -> Room:
    return Room(input_arena, lane)


@in_loop
async def test_a_full_arena_lets_wait_in_order(room: Room) -> None:
    """Every grain that comes back goes to who has waited longest."""
    await room.fill(1, 1, 1, 1)
    waiting = [await room.ask(1) for _ in range(3)]
    await turns()
    assert not any(task.done() for _, task in waiting)

    for holder in room.holders[:3]:
        room.input_arena.give_back(holder)
    await turns()

    assert all(task.done() for _, task in waiting)
    assert list(room.lane.queue) == [request for request, _ in waiting]


@in_loop
async def test_one_that_comes_back_lets_one_in(room: Room) -> None:
    await room.fill(1, 1, 1, 1)
    (_, first), (_, second) = await room.ask(1), await room.ask(1)

    room.input_arena.give_back(room.holders[2])
    await turns()

    assert first.done() and not second.done()
    second.cancel()
    await turns()


@in_loop
async def test_a_small_one_does_not_overtake_a_large_one(room: Room) -> None:
    """One grain is free and would do; but then the large one might wait for ever."""
    await room.fill(3)
    (large, _), (small, small_task) = await room.ask(3), await room.ask(1)
    await turns()
    assert not small_task.done()

    room.input_arena.give_back(room.holders[0])
    await turns()

    assert list(room.lane.queue) == [large, small]


@in_loop
async def test_a_newcomer_does_not_overtake_who_waits(room: Room) -> None:
    """It comes in the turn in which room is made, before the one that waits has run."""
    await room.fill(2, 2)
    first, first_task = await room.ask(4)

    room.input_arena.give_back(room.holders[0])
    newcomer, newcomer_task = await room.ask(2)
    assert not first_task.done() and not newcomer_task.done()
    room.input_arena.give_back(room.holders[1])
    await turns()

    assert list(room.lane.queue) == [first]
    room.input_arena.give_back(first)
    await turns()
    assert list(room.lane.queue) == [first, newcomer]


@pytest.mark.parametrize("wait_ms", [0, 1])
@in_loop
async def test_who_waits_too_long_is_refused_and_may_come_again(lane: Lane, wait_ms: int) -> None:
    input_arena = InputArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=wait_ms))
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
async def test_nobody_waits_for_room_past_the_moment_when_it_expires(
    room: Room, terms: Terms
) -> None:
    """It would wait for an hour; room that comes later is for others."""
    await room.fill(4)
    late = request_of(room.lane, 1, terms)

    with pytest.raises(DeadlineExceeded):
        await admit(room.input_arena, late)

    assert late.lease is None and room.lane.counts["refused.deadline_exceeded"] == 1
    room.input_arena.give_back(room.holders[0])
    assert room.input_arena.arena.leased_bytes == 0


@pytest.mark.parametrize("change", ["workers", "queue"])
@in_loop
async def test_who_waited_is_asked_again_whether_it_may_join(room: Room, change: str) -> None:
    """Meanwhile the workers are gone, or the queue has filled up; the room goes to the next."""
    await room.fill(4)
    (_, refused), (_, following) = await room.ask(1), await room.ask(1)
    if change == "workers":
        room.lane.workers.clear()
    else:
        for _ in range(QUEUE_REQUESTS):
            submit(request_of(room.lane))
    room.input_arena.give_back(room.holders[0])
    await turns()

    kind = NotReady if change == "workers" else QueueFull
    assert isinstance(refused.exception(), kind) and isinstance(following.exception(), kind)
    assert room.input_arena.arena.leased_bytes == 0


@in_loop
async def test_when_the_first_gives_up_the_next_is_let_in(room: Room) -> None:
    """The large one held back a small one that had room all along."""
    await room.fill(3)
    _, large = await room.ask(2)
    small, _ = await room.ask(1)

    large.cancel()
    await turns()

    assert list(room.lane.queue) == [small]


@in_loop
async def test_who_is_cancelled_leaves_nothing_behind(room: Room) -> None:
    """First, middle and last of a line; those that stay are let in, in order."""
    await room.fill(1, 1, 1, 1)
    line = [await room.ask(1) for _ in range(5)]
    for index in (0, 2, 4):
        line[index][1].cancel()
    await turns()
    assert all(line[index][1].cancelled() for index in (0, 2, 4))

    for holder in room.holders:
        room.input_arena.give_back(holder)
    await turns()

    assert list(room.lane.queue) == [line[1][0], line[3][0]]
    assert len(room.input_arena.arena) == 2


@in_loop
async def test_granted_and_then_cancelled_in_one_turn(room: Room) -> None:
    """The lease was made for a task that will never take it: it goes to the next."""
    await room.fill(4)
    (cancelled, task), (following, _) = await room.ask(4), await room.ask(1)

    room.input_arena.give_back(room.holders[0])
    task.cancel()
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(room.lane.queue) == [following]
    assert room.input_arena.arena.leased_bytes == GRAIN_BYTES


@in_loop
async def test_cancelled_and_then_granted_in_one_turn(room: Room) -> None:
    """So ends a stream that waits: its reader is cancelled, then its leases come back."""
    await room.fill(4)
    (cancelled, task), (following, _) = await room.ask(4), await room.ask(1)

    task.cancel()
    room.input_arena.give_back(room.holders[0])
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(room.lane.queue) == [following]
    assert room.input_arena.arena.leased_bytes == GRAIN_BYTES


@pytest.mark.parametrize("turns_between", [0, 1, 2])
@in_loop
async def test_granted_and_too_late_in_one_turn(lane: Lane, turns_between: int) -> None:
    """Room is made just before, in, and just after the turn that ends the wait: nothing is lost."""
    room = Room(InputArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=0)), lane)
    await room.fill(1)
    request = request_of(lane)
    task = asyncio.create_task(admit(room.input_arena, request))
    loop = asyncio.get_running_loop()

    make_room = functools.partial(room.input_arena.give_back, room.holders[0])
    for _ in range(turns_between):
        make_room = functools.partial(loop.call_soon, make_room)
    loop.call_soon(make_room)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    await turns()

    assert outcome is None or isinstance(outcome, ArenaFull)
    assert (request.lease is not None) == (outcome is None)
    assert len(room.input_arena.arena) == (outcome is None)
    room.input_arena.close()


@in_loop
async def test_what_can_never_fit_is_refused_at_once(room: Room) -> None:
    with pytest.raises(SegmentError, match="can never fit"):
        await admit(room.input_arena, request_of(room.lane, GRAINS + 1))

    assert room.input_arena.arena.leased_bytes == 0


@in_loop
async def test_what_can_never_fit_is_refused_at_once_also_behind_others(room: Room) -> None:
    """In the line it would hold back everyone, and fail whoever gives a lease back."""
    await room.fill(4)
    (first, _), (never, task) = await room.ask(1), await room.ask(GRAINS + 1)
    following, _ = await room.ask(1)

    room.input_arena.give_back(room.holders[0])
    await turns()

    assert isinstance(task.exception() if task.done() else None, SegmentError)
    assert list(room.lane.queue) == [first, following] and never.lease is None


ONE, OTHER = Source(connection=1), Source(connection=2)


class LargeRoom:
    """An arena that is large enough to be divided between sources, with a grain for a request."""

    GRAINS = 180

    def __init__(self) -> None:
        self.lane = open_lane()
        self.input_arena = InputArena(self.GRAINS * GRAIN_BYTES, FOR_EVER)
        self.held: list[Request] = []

    async def admit(self, source: Source, grains: int = 1) -> asyncio.Task[None]:
        """Ask for room; what is admitted leaves the queue, and keeps its lease."""
        request = request_of(self.lane, grains, terms=Terms(source=source))
        task = asyncio.create_task(admit(self.input_arena, request))
        await turns()
        if task.done() and task.exception() is None:
            self.lane.queue.remove(request)
            self.held.append(request)
        return task


@in_loop
async def test_one_source_does_not_fill_the_arena_for_others() -> None:
    room = LargeRoom()
    tasks = [await room.admit(ONE) for _ in range(room.GRAINS)]
    admitted = sum(task.done() for task in tasks)
    assert room.GRAINS * 8 // 9 <= admitted < room.GRAINS

    other = await room.admit(OTHER)

    assert other.done() and other.exception() is None
    for task in tasks:
        task.cancel()
    await turns()
    room.input_arena.close()


@in_loop
async def test_sources_that_wait_are_let_in_in_turn() -> None:
    """And not in the order in which they asked: one of them asked often."""
    room = LargeRoom()
    waiting = []
    for grains in (8, 1):
        for connection in range(100, 200):
            task = await room.admit(Source(connection=connection), grains)
            if not task.done():
                waiting.append(task)
                break
    for task in waiting:
        task.cancel()
    waiting = [await room.admit(ONE, 8) for _ in range(9)]
    late = await room.admit(OTHER, 8)

    for request in room.held[:2]:
        room.input_arena.give_back(request)
        await turns()

    assert late.done()
    assert sum(task.done() for task in waiting) == 1
    for task in waiting:
        task.cancel()
    await turns()
    assert not room.input_arena._waiting
    room.input_arena.close()
