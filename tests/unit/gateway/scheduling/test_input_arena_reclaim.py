"""Held leases of finished requests: they are given back before a request waits for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.input_arena import FOR_EVER, EntryArena, in_loop, open_lane, request_of, turns

from iskander.gateway.auth.quota import Quota
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request
from iskander.interprocess.memory.arena import GRAIN_BYTES, Lease

GRAINS = 180


class Holder:
    """Holds the leases of finished requests, as an observer does."""

    def __init__(self, input_arena: EntryArena) -> None:
        self.input_arena = input_arena
        self.held: list[Lease] = []
        input_arena.reclaimers.append(self.reclaim)

    def finish(self, request: Request) -> None:
        self.held.append(self.input_arena.hold(request))

    def reclaim(self) -> bool:
        if not self.held:
            return False
        self.input_arena.arena.give_back(self.held.pop(0))
        return True


@pytest.fixture
def input_arena() -> Iterator[EntryArena]:
    made = EntryArena(GRAINS * GRAIN_BYTES, FOR_EVER)
    yield made
    made.close()


@pytest.fixture
def lane() -> Lane:
    return open_lane()


def admitted(input_arena: EntryArena, lane: Lane, grains: int = 1) -> Request:
    request = request_of(lane, grains)
    assert input_arena.admit(request)
    return request


@in_loop
async def test_held_lease_is_given_back_for_the_reserve(
    input_arena: EntryArena, lane: Lane
) -> None:
    """All memory but the reserved ninth belongs to one source, partly in finished requests."""
    holder = Holder(input_arena)
    running = [admitted(input_arena, lane) for _ in range(156)]
    for request in [admitted(input_arena, lane) for _ in range(4)]:
        holder.finish(request)
    assert input_arena.arena.leased_bytes == 160 * GRAIN_BYTES
    running.append(admitted(input_arena, lane))
    assert len(holder.held) == 3
    assert input_arena.arena.leased_bytes == 160 * GRAIN_BYTES
    for request in running:
        input_arena.give_back(request)


@in_loop
async def test_held_leases_are_given_back_for_a_range_that_is_long_enough(
    input_arena: EntryArena, lane: Lane
) -> None:
    """Enough memory is free, but not in one piece."""
    holder = Holder(input_arena)
    requests = [admitted(input_arena, lane) for _ in range(160)]
    rest = input_arena.arena.lease(20 * GRAIN_BYTES)
    assert rest is not None
    for request in requests[::2]:
        input_arena.give_back(request)
    for request in requests[1::2]:
        holder.finish(request)
    large = admitted(input_arena, lane, grains=6)
    assert len(holder.held) == 77
    input_arena.give_back(large)


@in_loop
async def test_held_leases_are_charged_to_no_source(input_arena: EntryArena, lane: Lane) -> None:
    holder = Holder(input_arena)
    for _ in range(5):
        holder.finish(admitted(input_arena, lane))
    assert input_arena._leased == {}


@in_loop
async def test_waiting_request_gets_memory_that_was_held(
    input_arena: EntryArena, lane: Lane
) -> None:
    holder = Holder(input_arena)
    running = [admitted(input_arena, lane, grains=6) for _ in range(26)]
    waiting = request_of(lane, 6)
    assert not input_arena.admit(waiting)
    task = asyncio.ensure_future(input_arena.admit_later(waiting))
    await turns()
    assert input_arena.has_waiting and not task.done()
    holder.finish(running.pop())
    input_arena.grant_waiting()
    await task
    assert not holder.held
    for request in (waiting, *running):
        input_arena.give_back(request)


@in_loop
async def test_held_request_leaves_its_quota(input_arena: EntryArena, lane: Lane) -> None:
    holder = Holder(input_arena)
    request = admitted(input_arena, lane)
    request.quota = quota = Quota.__new__(Quota)
    quota.outstanding_rows = request.rows
    holder.finish(request)
    assert quota.outstanding_rows == 0 and request.quota is None
