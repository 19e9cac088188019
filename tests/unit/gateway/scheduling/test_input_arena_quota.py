"""Limits of grants before the lease of a request: what they count, and for how long."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.input_arena import (
    FOR_EVER,
    GRAINS,
    EntryArena,
    admit,
    in_loop,
    open_lane,
    request_of,
    turns,
)

from iskander.config.auth import GrantLimits
from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, ClientOverShare, LimitExceeded, RateLimited
from iskander.gateway.auth.quota import Quota, Quotas
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request, Terms
from iskander.interprocess.memory.arena import GRAIN_BYTES

OWN, OTHER = Terms(source=Source("scoring", 1)), Terms(source=Source("other", 2))


@pytest.fixture
def lane() -> Lane:
    return open_lane()


@pytest.fixture
def input_arena() -> Iterator[EntryArena]:
    input_arena = EntryArena(GRAINS * GRAIN_BYTES, FOR_EVER)
    yield input_arena
    input_arena.close()


def limited(input_arena: EntryArena, **limits: float) -> Quota:
    quotas = Quotas()
    quotas.configure({"scoring": GrantLimits(**limits)})
    input_arena.entry.quotas = quotas.by_name
    return quotas.by_name["scoring"]


@in_loop
async def test_rows_are_outstanding_until_the_lease_is_given_back(
    lane: Lane, input_arena: EntryArena
) -> None:
    first, second = request_of(lane, 1, OWN), request_of(lane, 1, OWN)
    quota = limited(input_arena, outstanding_rows=first.rows + 5)
    assert input_arena.admit(first) and quota.outstanding_rows == first.rows
    with pytest.raises(ClientOverShare) as caught:
        input_arena.admit(second)
    assert caught.value.retry_after_ms and second.lease is None
    assert lane.counts["refused.client_over_share"] == 1
    assert input_arena.admit(request_of(lane, 1, OTHER)), "another grant is not affected"
    input_arena.give_back(first)
    assert quota.outstanding_rows == 0
    assert input_arena.admit(second)


@in_loop
async def test_refused_request_takes_no_lease_and_no_rate(
    lane: Lane, input_arena: EntryArena
) -> None:
    quota = limited(input_arena, requests_per_s=0.001, burst_requests=1, batch_rows=1)
    with pytest.raises(LimitExceeded, match="batch_rows"):
        input_arena.admit(request_of(lane, 1, OWN))
    assert not input_arena.arena.leased_bytes and not quota.counts["requests"]
    quota.configure(GrantLimits(requests_per_s=0.001, burst_requests=1))
    assert input_arena.admit(request_of(lane, 1, OWN))
    with pytest.raises(RateLimited):
        input_arena.admit(request_of(lane, 1, OWN))
    assert quota.counts == {"requests": 1, "rows": quota.counts["rows"]} | {
        "refused.limit": 1,
        "refused.rate_limited": 1,
    }


@in_loop
async def test_request_of_a_closed_lane_costs_no_rate(input_arena: EntryArena) -> None:
    lane = open_lane()
    quota = limited(input_arena, requests_per_s=0.001, burst_requests=1)
    workers, lane.workers = lane.workers, {}
    with pytest.raises(Exception, match="no ready worker"):
        input_arena.admit(request_of(lane, 1, OWN))
    lane.workers = workers
    assert not quota.counts["requests"] and input_arena.admit(request_of(lane, 1, OWN))


@in_loop
async def test_waiting_request_counts_once_and_not_after_a_cancellation(
    lane: Lane, input_arena: EntryArena
) -> None:
    quota = limited(input_arena, outstanding_rows=1 << 30)
    holder = request_of(lane, GRAINS, OTHER)
    assert input_arena.admit(holder)
    waiting, gone, unstarted = (request_of(lane, 1, OWN) for _ in range(3))
    assert not any(map(input_arena.admit, (waiting, gone, unstarted)))
    tasks = [asyncio.create_task(input_arena.admit_later(each)) for each in (waiting, gone)]
    await turns()
    assert quota.outstanding_rows == waiting.rows + gone.rows
    tasks[1].cancel()
    never_started = asyncio.create_task(input_arena.admit_later(unstarted))
    never_started.cancel()
    await asyncio.gather(tasks[1], never_started, return_exceptions=True)
    assert quota.outstanding_rows == waiting.rows
    input_arena.give_back(holder)
    await tasks[0]
    assert quota.outstanding_rows == waiting.rows and quota.counts["requests"] == 3
    input_arena.give_back(waiting)
    assert quota.outstanding_rows == 0


@in_loop
async def test_waiting_requests_share_the_limit(lane: Lane, input_arena: EntryArena) -> None:
    """Both pass the first check, before either waits."""
    requests = [request_of(lane, 1, OWN) for _ in range(2)]
    limited(input_arena, outstanding_rows=requests[0].rows)
    holder = request_of(lane, GRAINS, OTHER)
    assert input_arena.admit(holder)
    assert not any(map(input_arena.admit, requests))
    tasks = [asyncio.create_task(input_arena.admit_later(each)) for each in requests]
    await turns()
    input_arena.give_back(holder)
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0] is None and isinstance(outcomes[1], ClientOverShare)


@in_loop
async def test_timeout_of_a_wait_ends_the_count(lane: Lane) -> None:
    input_arena = EntryArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=0))
    quota = limited(input_arena, outstanding_rows=1 << 30)
    await admit(input_arena, request_of(lane, 1, OTHER))
    with pytest.raises(ArenaFull):
        await admit(input_arena, request_of(lane, 1, OWN))
    assert quota.outstanding_rows == 0
    input_arena.close()


@in_loop
async def test_request_that_waits_in_vain_costs_no_rate(lane: Lane) -> None:
    input_arena = EntryArena(GRAIN_BYTES, LimitsConfig(arena_wait_ms=0))
    limited(input_arena, requests_per_s=0.001, burst_requests=1)
    holder = request_of(lane, 1, OTHER)
    await admit(input_arena, holder)
    for _ in range(3):
        with pytest.raises(ArenaFull):
            await admit(input_arena, request_of(lane, 1, OWN))
    input_arena.give_back(holder)
    await admit(input_arena, request_of(lane, 1, OWN))
    with pytest.raises(RateLimited):
        input_arena.admit(request_of(lane, 1, OWN))
    input_arena.close()


@in_loop
async def test_removed_limits_end_the_count_of_open_requests(
    lane: Lane, input_arena: EntryArena
) -> None:
    quotas = Quotas()
    quotas.configure({"scoring": GrantLimits(batch_rows=1 << 30)})
    input_arena.entry.quotas = quotas.by_name
    before, quota = request_of(lane, 1, OWN), quotas.by_name["scoring"]
    assert input_arena.admit(before)
    quotas.configure({})
    during = request_of(lane, 1, OWN)
    assert input_arena.admit(during)
    quotas.configure({"scoring": GrantLimits(batch_rows=1 << 30)})
    for request in (before, during):
        input_arena.give_back(request)
    assert quota.outstanding_rows == quotas.by_name["scoring"].outstanding_rows == 0


@in_loop
async def test_parts_of_a_batch_are_checked_as_one(lane: Lane, input_arena: EntryArena) -> None:
    parts: list[Request] = [request_of(lane, 1, OWN) for _ in range(2)]
    rows = sum(part.rows for part in parts)
    parts[0].whole, parts[1].is_part = (rows, 9), True
    quota = limited(input_arena, batch_rows=rows - 1)
    with pytest.raises(LimitExceeded, match=f"{rows:,} rows"):
        input_arena.admit(parts[0])
    quota.configure(GrantLimits(batch_rows=rows, outstanding_rows=rows, requests_per_s=1))
    assert all(map(input_arena.admit, parts))
    assert quota.outstanding_rows == quota.counts["rows"] == rows and quota.counts["requests"] == 1
