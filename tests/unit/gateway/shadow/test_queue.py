"""Queue of finished requests: rows of batches, buckets, and leases."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.request import NEVER_NS
from iskander.gateway.shadow.queue import QUEUED_NS, ShadowQueue, Usage


@pytest.fixture
def arena() -> Iterator[InputArena]:
    arena = InputArena(1 << 20)
    yield arena
    arena.close()


def finished(arena: InputArena, rows: int, bucket: int = 0) -> Any:
    """A request with a lease, which it has just given back itself."""
    lease = arena.arena.lease(100)
    return SimpleNamespace(
        rows=rows, shape=bucket, body_offset=0, input_bytes=100, lease=lease,
        terms=SimpleNamespace(hops=0),
    )  # fmt: skip


def put(queue: ShadowQueue, arena: InputArena, *requests: Any) -> None:
    for request in requests:
        queue.put(request, b"12345678", 7)
        arena.arena.give_back(request.lease)


def test_batch_has_rows_of_one_bucket_in_order(arena: InputArena) -> None:
    queue = ShadowQueue(arena, Usage())
    put(queue, arena, finished(arena, 3), finished(arena, 4), finished(arena, 5, bucket=1))
    parts = queue.peek(5)
    assert [(part.first, part.rows) for part in parts] == [(0, 3), (0, 2)]
    queue.take(parts)
    parts = queue.peek(100)
    assert [(part.first, part.rows, part.request.bucket) for part in parts] == [(2, 2, 0)]
    queue.take(parts)
    assert [part.request.bucket for part in queue.peek(100)] == [1]


def test_leases_are_released_after_the_last_batch(arena: InputArena) -> None:
    usage = Usage()
    queue = ShadowQueue(arena, usage)
    put(queue, arena, finished(arena, 4))
    first = queue.peek(3)
    queue.take(first)
    second = queue.peek(3)
    queue.take(second)
    assert not len(queue) and queue.expires_ns == NEVER_NS
    queue.finish(first)
    assert len(arena.arena) == usage.requests == 1 and usage.bytes == 108
    queue.finish(second)
    assert not len(arena.arena) and not usage.requests and not usage.bytes


def test_dropped_request_keeps_its_lease_for_a_running_batch(arena: InputArena) -> None:
    queue = ShadowQueue(arena, Usage())
    put(queue, arena, finished(arena, 4))
    parts = queue.peek(1)
    queue.take(parts)
    assert queue.expires_ns == 7 + QUEUED_NS
    assert queue.reclaim() == 0
    assert queue.drop_first() == 3
    assert len(arena.arena) == 1
    queue.finish(parts)
    assert not len(arena.arena)


def test_last_request_is_reclaimed_first(arena: InputArena) -> None:
    queue = ShadowQueue(arena, Usage())
    put(queue, arena, finished(arena, 4), finished(arena, 9))
    assert (queue.reclaim(), queue.reclaim(), queue.reclaim()) == (9, 4, 0)
    assert not len(arena.arena)
