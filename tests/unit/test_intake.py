"""The way into shared memory: what is written, who waits in which order, and that nothing leaks."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.contract.tensors import ALIGNMENT, ColumnType, Contract, TensorSpec
from iskander.errors import IskanderError, NotReady, Overloaded, SegmentError
from iskander.gateway.arrow_types import input_schema
from iskander.gateway.intake import Intake
from iskander.gateway.lanes import Lane, Request
from iskander.memory.arena import GRAIN_BYTES
from iskander.wire.messages import ModelSpec

QUEUE_REQUESTS = 64
GRAINS = 4
FOR_EVER_MS = 3_600_000
"""A wait that no test sees the end of."""

CONTRACT = Contract(
    inputs=(
        TensorSpec("id", "id", ColumnType("int64"), ()),
        TensorSpec("flag", "flag", ColumnType("bool"), ()),
    ),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
)


class Nobody:
    """A caller that is never told anything: no worker runs here."""

    def deliver(self, request: Request, output: memoryview) -> None:
        raise AssertionError("delivered")

    def fail(self, request: Request, error: IskanderError) -> None:
        raise AssertionError("failed")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test inside an event loop of its own."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run


async def turn() -> None:
    """Let everything run that can run now: one turn of the loop."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_soon(over.set_result, None)
    await over


async def turns() -> None:
    """As many turns as any chain of wake-ups here needs."""
    for _ in range(8):
        await turn()


@pytest.fixture
def lane() -> Lane:
    return open_lane()


def open_lane() -> Lane:
    model = ModelSpec(0, "m", "1", "onnx", "m.onnx", ("cpu",), 0, 0, "level3", False, True, 1, "")
    lane = Lane(model, QUEUE_REQUESTS)
    lane.set_contract(CONTRACT)
    lane.ready.add(1)
    return lane


@pytest.fixture
def intake() -> Iterator[Intake]:
    """An arena of a few grains, whose waiters wait for ever."""
    intake = Intake(GRAINS * GRAIN_BYTES, FOR_EVER_MS)
    yield intake
    intake.close()


def request_of(lane: Lane, grains: int = 1) -> Request:
    """A request that takes so many grains of the arena."""
    rows = (grains * GRAIN_BYTES - 1024) // 9 // 64 * 64
    ids, flags = bytes(8 * rows), bytes(rows // 8)
    request = Request(lane, Nobody(), rows, [memoryview(ids), memoryview(flags)])
    taken = -(-lane.layout(rows).input_bytes // GRAIN_BYTES)
    assert taken == grains
    return request


@in_loop
async def test_a_request_is_written_as_an_arrow_message(intake: Intake, lane: Lane) -> None:
    """Given two columns, what lies in the arena is read by pyarrow as the batch that they are."""
    batch = pa.record_batch(
        [pa.array([3, 1, 2], pa.int64()), pa.array([True, False, True])],
        schema=input_schema(CONTRACT),
    )
    values = [memoryview(column.buffers()[1]).cast("B") for column in batch.columns]
    tensors = [values[0][:24], values[1][:1]]
    request = Request(lane, Nobody(), 3, tensors)

    await intake.admit(lane, request)

    assert request.lease is not None and request.tensors == []
    lease = request.lease
    raw = intake.segment.view[lease.offset : lease.offset + lease.length_bytes]
    assert pa.ipc.read_record_batch(pa.py_buffer(raw), batch.schema).equals(batch)
    assert (intake.segment.address + request.body_offset) % ALIGNMENT == 0
    assert request.body_offset - lease.offset == len(lane.layout(3).header)
    assert list(lane.queue) == [request]
    assert (lane.counts["requests"], lane.counts["rows"]) == (1, 3)
    raw.release()


@in_loop
async def test_a_lane_without_workers_is_refused_before_anything_is_leased(
    intake: Intake, lane: Lane
) -> None:
    lane.ready.clear()

    with pytest.raises(NotReady, match="`m/1` has no ready worker") as caught:
        await intake.admit(lane, request_of(lane))

    assert caught.value.retry_after_ms
    assert (intake.arena.leased_bytes, len(lane.queue)) == (0, 0)


@in_loop
async def test_a_full_queue_is_refused_before_anything_is_leased(lane: Lane) -> None:
    """Both sides of the limit."""
    intake = Intake((QUEUE_REQUESTS + 1) * GRAIN_BYTES, FOR_EVER_MS)
    for _ in range(QUEUE_REQUESTS):
        await intake.admit(lane, request_of(lane))

    with pytest.raises(Overloaded, match=f"{QUEUE_REQUESTS} requests wait"):
        await intake.admit(lane, request_of(lane))

    assert len(intake.arena) == len(lane.queue) == QUEUE_REQUESTS
    intake.close()


@in_loop
async def test_a_lease_is_given_back_once(intake: Intake, lane: Lane) -> None:
    request = request_of(lane)
    await intake.admit(lane, request)

    intake.give_back(request)

    assert request.lease is None
    assert intake.arena.leased_bytes == 0
    with pytest.raises(AssertionError):
        intake.give_back(request)


@in_loop
async def test_a_write_that_fails_gives_its_lease_back(intake: Intake, lane: Lane) -> None:
    request = request_of(lane)
    request.tensors.pop()

    with pytest.raises(ValueError):
        await intake.admit(lane, request)

    assert (intake.arena.leased_bytes, len(lane.queue)) == (0, 0)


class Room:
    """A full arena, and requests that wait for it in the order in which they came."""

    def __init__(self, intake: Intake, lane: Lane) -> None:
        self.intake, self.lane = intake, lane
        self.holders: list[Request] = []
        self.order: list[Request] = []

    async def fill(self, *grains: int) -> None:
        for each in grains:
            self.holders.append(request_of(self.lane, each))
            await self.intake.admit(self.lane, self.holders[-1])
        self.lane.queue.clear()

    async def ask(self, grains: int) -> tuple[Request, asyncio.Task[None]]:
        request = request_of(self.lane, grains)
        task = asyncio.create_task(self.intake.admit(self.lane, request))
        await turn()
        return request, task


@pytest.fixture
def room(intake: Intake, lane: Lane) -> Room:
    return Room(intake, lane)


@in_loop
async def test_a_full_arena_lets_wait_in_order(room: Room) -> None:
    """Every grain that comes back goes to who has waited longest."""
    await room.fill(1, 1, 1, 1)
    waiting = [await room.ask(1) for _ in range(3)]
    await turns()
    assert not any(task.done() for _, task in waiting)

    for holder in room.holders[:3]:
        room.intake.give_back(holder)
    await turns()

    assert all(task.done() for _, task in waiting)
    assert list(room.lane.queue) == [request for request, _ in waiting]


@in_loop
async def test_one_that_comes_back_lets_one_in(room: Room) -> None:
    await room.fill(1, 1, 1, 1)
    (_, first), (_, second) = await room.ask(1), await room.ask(1)

    room.intake.give_back(room.holders[2])
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

    room.intake.give_back(room.holders[0])
    await turns()

    assert list(room.lane.queue) == [large, small]


@in_loop
async def test_a_newcomer_does_not_overtake_who_waits(room: Room) -> None:
    """It comes in the turn in which room is made, before the one that waits has run."""
    await room.fill(2, 2)
    first, first_task = await room.ask(4)

    room.intake.give_back(room.holders[0])
    newcomer, newcomer_task = await room.ask(2)
    assert not first_task.done() and not newcomer_task.done()
    room.intake.give_back(room.holders[1])
    await turns()

    assert list(room.lane.queue) == [first]
    room.intake.give_back(first)
    await turns()
    assert list(room.lane.queue) == [first, newcomer]


@pytest.mark.parametrize("wait_ms", [0, 1])
@in_loop
async def test_who_waits_too_long_is_refused_and_may_come_again(lane: Lane, wait_ms: int) -> None:
    intake = Intake(GRAIN_BYTES, wait_ms)
    holder, late = request_of(lane), request_of(lane)
    await intake.admit(lane, holder)

    with pytest.raises(Overloaded, match=f"full for {wait_ms} ms") as caught:
        await intake.admit(lane, late)

    assert caught.value.retry_after_ms == wait_ms
    assert late.lease is None and list(lane.queue) == [holder]
    intake.give_back(holder)
    await intake.admit(lane, late)
    assert late.lease is not None
    intake.close()


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
        room.intake.give_back(holder)
    await turns()

    assert list(room.lane.queue) == [line[1][0], line[3][0]]
    assert len(room.intake.arena) == 2


@in_loop
async def test_granted_and_then_cancelled_in_one_turn(room: Room) -> None:
    """The lease was made for a task that will never take it: it goes to the next."""
    await room.fill(4)
    (cancelled, task), (following, _) = await room.ask(4), await room.ask(1)

    room.intake.give_back(room.holders[0])
    task.cancel()
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(room.lane.queue) == [following]
    assert room.intake.arena.leased_bytes == GRAIN_BYTES


@in_loop
async def test_cancelled_and_then_granted_in_one_turn(room: Room) -> None:
    """So ends a stream that waits: its reader is cancelled, then its leases come back."""
    await room.fill(4)
    (cancelled, task), (following, _) = await room.ask(4), await room.ask(1)

    task.cancel()
    room.intake.give_back(room.holders[0])
    await turns()

    assert task.cancelled() and cancelled.lease is None
    assert list(room.lane.queue) == [following]
    assert room.intake.arena.leased_bytes == GRAIN_BYTES


@pytest.mark.parametrize("turns_between", [0, 1, 2])
@in_loop
async def test_granted_and_too_late_in_one_turn(lane: Lane, turns_between: int) -> None:
    """Room is made just before, in, and just after the turn that ends the wait: nothing is lost."""
    room = Room(Intake(GRAIN_BYTES, 0), lane)
    await room.fill(1)
    request = request_of(lane)
    task = asyncio.create_task(room.intake.admit(lane, request))
    loop = asyncio.get_running_loop()

    make_room = functools.partial(room.intake.give_back, room.holders[0])
    for _ in range(turns_between):
        make_room = functools.partial(loop.call_soon, make_room)
    loop.call_soon(make_room)
    (outcome,) = await asyncio.gather(task, return_exceptions=True)
    await turns()

    assert outcome is None or isinstance(outcome, Overloaded)
    assert (request.lease is not None) == (outcome is None)
    assert len(room.intake.arena) == (outcome is None)
    room.intake.close()


@in_loop
async def test_what_can_never_fit_is_refused_at_once(room: Room) -> None:
    with pytest.raises(SegmentError, match="can never fit"):
        await room.intake.admit(room.lane, request_of(room.lane, GRAINS + 1))

    assert room.intake.arena.leased_bytes == 0


@in_loop
async def test_what_can_never_fit_is_refused_at_once_also_behind_others(room: Room) -> None:
    """In the line it would hold back everyone, and fail whoever gives a lease back."""
    await room.fill(4)
    (first, _), (never, task) = await room.ask(1), await room.ask(GRAINS + 1)
    following, _ = await room.ask(1)

    room.intake.give_back(room.holders[0])
    await turns()

    assert isinstance(task.exception() if task.done() else None, SegmentError)
    assert list(room.lane.queue) == [first, following] and never.lease is None


STEPS = st.lists(
    st.tuples(st.just("ask"), st.integers(1, GRAINS))
    | st.tuples(st.sampled_from(["cancel", "give back"]), st.integers(0, 7))
    | st.tuples(st.just("turn"), st.just(0)),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(STEPS)
def test_no_order_of_events_loses_room(steps: list[tuple[str, int]]) -> None:
    """Given any asking, cancelling and giving back, within a turn or over several: no leak."""
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int]]) -> None:
    lane = open_lane()
    intake = Intake(GRAINS * GRAIN_BYTES, FOR_EVER_MS)
    asked: list[tuple[Request, asyncio.Task[None]]] = []
    try:
        for step, number in steps:
            if step == "ask":
                request = request_of(lane, number)
                asked.append((request, asyncio.create_task(intake.admit(lane, request))))
            elif step == "turn":
                await turns()
            else:
                _cancel_or_give_back(intake, asked, step, number)
            intake.arena.validate()
        while any(not task.done() for _, task in asked) or _holders(asked):
            for request in _holders(asked):
                intake.give_back(request)
            await turns()
        assert all(task.cancelled() or task.exception() is None for _, task in asked)
        intake.arena.validate()
        assert intake.arena.leased_bytes == 0
    finally:
        for _, task in asked:
            task.cancel()
        await turns()
        intake.close()


def _holders(asked: list[tuple[Request, asyncio.Task[None]]]) -> list[Request]:
    return [request for request, _ in asked if request.lease is not None]


def _cancel_or_give_back(
    intake: Intake, asked: list[tuple[Request, asyncio.Task[None]]], step: str, number: int
) -> None:
    waiting, holding = [task for _, task in asked if not task.done()], _holders(asked)
    if step == "cancel" and waiting:
        waiting[number % len(waiting)].cancel()
    elif step == "give back" and holding:
        intake.give_back(holding[number % len(holding)])
