"""Held leases: bounds, shared output leases, requests in several batches, and early release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lanes import lane_of, request_of
from support.observed import make_worker

from iskander.gateway.observation.holds import Holds
from iskander.gateway.observation.messages import OutputPart
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.worker_slot import InFlightBatch, WorkerSlot
from iskander.interprocess.memory.arena import GRAIN_BYTES, Arena

GRAINS = 64
LANE = lane_of()


class Arenas:
    """An input arena, two workers with output arenas, and holds."""

    def __init__(self, requests_max: int = 8, grains_max: int = GRAINS) -> None:
        self.input = Arena(GRAINS * GRAIN_BYTES)
        self.workers: list[WorkerSlot] = [make_worker(0), make_worker(1)]
        self.holds = Holds(self.input, requests_max, grains_max * GRAIN_BYTES)

    def request(self, rows: int = 1) -> Request:
        request = request_of(LANE, rows)
        request.lease = self.input.lease(GRAIN_BYTES)
        return request

    def batch(self, worker: int = 0) -> InFlightBatch:
        lease = self.workers[worker].output_arena.lease(GRAIN_BYTES)
        assert lease is not None
        return InFlightBatch(LANE, [], lease, 1, 0, 0)

    def add(
        self, request: Request, batch: InFlightBatch, first: int = 0, rows: int = 1, worker: int = 0
    ) -> bool:
        part = OutputPart(self.workers[worker].incarnation, batch.output.offset, 8, first, rows)
        return self.holds.add_part(request, self.workers[worker], batch, part, now=1000)

    def complete(self, request: Request) -> tuple[int, tuple[OutputPart, ...]]:
        assert self.holds.can_complete(request)
        lease, request.lease = request.lease, None
        assert lease is not None
        return self.holds.complete(request, lease)

    def end_batch(self, batch: InFlightBatch, worker: int = 0) -> None:
        """As the dispatcher does after the copy of the results."""
        if not self.holds.keep_output(batch.output):
            self.workers[worker].output_arena.give_back(batch.output)

    @property
    def leased_bytes(self) -> int:
        arenas = [self.input, *(worker.output_arena for worker in self.workers)]
        return sum(arena.leased_bytes for arena in arenas)


@pytest.fixture
def arenas() -> Iterator[Arenas]:
    made = Arenas()
    yield made
    assert made.holds.bytes == made.leased_bytes == 0
    assert not len(made.holds)


def test_new_limits_apply_to_the_next_request(arenas: Arenas) -> None:
    held = []
    steps = [(1, GRAINS, True), (1, GRAINS, False), (2, 2, False), (2, GRAINS, True)]
    for requests_max, grains_max, is_held in steps:
        arenas.holds.configure(requests_max, grains_max * GRAIN_BYTES)
        request, batch = arenas.request(), arenas.batch()
        assert arenas.add(request, batch) is is_held
        if is_held:
            held.append(arenas.complete(request)[0])
        else:
            arenas.holds.discard(request)
            assert request.lease is not None
            arenas.input.give_back(request.lease)
        arenas.end_batch(batch)
    assert all(map(arenas.holds.release, held))


def test_leases_are_held_until_the_release(arenas: Arenas) -> None:
    request, batch = arenas.request(), arenas.batch()
    assert arenas.add(request, batch)
    ticket, _ = arenas.complete(request)
    arenas.end_batch(batch)
    assert arenas.holds.bytes == arenas.leased_bytes == 2 * GRAIN_BYTES
    assert arenas.holds.release(ticket)
    assert not arenas.holds.release(ticket)


def test_output_lease_of_a_batch_is_held_for_its_last_sample(arenas: Arenas) -> None:
    batch, requests = arenas.batch(), [arenas.request(), arenas.request()]
    for request in requests:
        assert arenas.add(request, batch)
    tickets = [arenas.complete(request)[0] for request in requests]
    arenas.end_batch(batch)
    assert arenas.holds.bytes == 3 * GRAIN_BYTES
    arenas.holds.release(tickets[0])
    assert arenas.workers[0].output_arena.leased_bytes == GRAIN_BYTES
    arenas.holds.release(tickets[1])


def test_release_during_the_copy_leaves_the_output_lease_to_the_dispatcher(arenas: Arenas) -> None:
    """Else the dispatcher would give it back a second time."""
    request, batch = arenas.request(), arenas.batch()
    arenas.add(request, batch)
    ticket, _ = arenas.complete(request)
    arenas.holds.release(ticket)
    assert arenas.workers[0].output_arena.is_live(batch.output)
    arenas.end_batch(batch)


def test_parts_of_a_request_are_in_the_order_of_its_rows(arenas: Arenas) -> None:
    request = arenas.request(rows=5)
    batches = [arenas.batch(0), arenas.batch(1)]
    assert arenas.add(request, batches[0], first=3, rows=2)
    assert not arenas.holds.can_complete(request)
    assert arenas.add(request, batches[1], first=0, rows=3, worker=1)
    ticket, parts = arenas.complete(request)
    assert [(part.first, part.rows) for part in parts] == [(0, 3), (3, 2)]
    arenas.end_batch(batches[0], 0)
    arenas.end_batch(batches[1], 1)
    arenas.holds.release(ticket)


def test_request_that_lost_its_first_part_is_never_complete(arenas: Arenas) -> None:
    request = arenas.request(rows=2)
    first, second = arenas.batch(0), arenas.batch(1)
    assert arenas.add(request, first)
    arenas.end_batch(first)
    assert arenas.holds.oldest_output(arenas.workers[0].incarnation) is request
    arenas.holds.abandon(request)
    assert arenas.workers[0].output_arena.leased_bytes == 0
    assert not arenas.add(request, second, first=1, worker=1)
    assert not arenas.holds.can_complete(request)
    arenas.holds.discard(request)
    arenas.end_batch(second, 1)
    arenas.input.give_back(request.lease)  # type: ignore[arg-type]


def test_bounds_of_number_and_bytes() -> None:
    arenas = Arenas(requests_max=2, grains_max=5)
    requests = [arenas.request() for _ in range(3)]
    batches = [arenas.batch() for _ in range(3)]
    for request, batch in zip(requests[:2], batches, strict=False):
        assert arenas.add(request, batch)
        arenas.complete(request)
        arenas.end_batch(batch)
    assert not arenas.add(requests[2], batches[2])  # The number.
    arenas.holds.release(arenas.holds.oldest_input())
    assert arenas.add(requests[2], batches[2])
    arenas.complete(requests[2])
    arenas.end_batch(batches[2])
    arenas.holds.release(arenas.holds.oldest_input())

    fat = arenas.request()
    big = arenas.batch()
    assert arenas.add(fat, big)
    arenas.holds.bytes = 5 * GRAIN_BYTES
    assert not arenas.holds.can_complete(fat)


def test_oldest_first_and_expiry(arenas: Arenas) -> None:
    tickets = []
    for _ in range(3):
        request, batch = arenas.request(), arenas.batch()
        arenas.add(request, batch)
        tickets.append(arenas.complete(request)[0])
        arenas.end_batch(batch)
    assert arenas.holds.oldest_input() == tickets[0]
    assert arenas.holds.oldest_output(arenas.workers[0].incarnation) == tickets[0]
    assert arenas.holds.oldest_output(arenas.workers[1].incarnation) is None
    assert arenas.holds.expired(before_ns=1000) == []
    assert arenas.holds.expired(before_ns=1001) == tickets
    assert arenas.holds.release_all() == tickets


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "complete", "end", "release", "discard"]), st.integers(0, 9)),
    max_size=60,
)


@given(STEPS)
def test_every_lease_comes_back(steps: list[tuple[str, int]]) -> None:
    """Any order of events: the bytes are exact, and nothing is given back twice."""
    arenas = Arenas(requests_max=4, grains_max=6)
    open_batches: list[InFlightBatch] = []
    pending: list[Request] = []
    free: list[Request] = []
    for name, number in steps:
        step(arenas, name, number, open_batches, pending, free)
        held = arenas.holds._outputs
        inputs = sum(each.input is not None for each in arenas.holds._held.values())
        assert arenas.holds.bytes == (len(held) + inputs) * GRAIN_BYTES
        assert len(arenas.holds) <= 4
        for arena in (arenas.input, *(worker.output_arena for worker in arenas.workers)):
            arena.validate()
    for batch in open_batches:
        arenas.end_batch(batch)
    arenas.holds.release_all()
    for request in {*pending, *free}:
        if request.lease is not None:
            arenas.input.give_back(request.lease)
    assert arenas.holds.bytes == arenas.leased_bytes == 0


def step(arenas: Arenas, name: str, number: int, batches: Any, pending: Any, free: Any) -> None:
    """One event of the property test."""
    if name == "add" and arenas.input.leased_bytes < GRAINS * GRAIN_BYTES:
        if not batches or number < 5:
            batches.append(arenas.batch())
        request = arenas.request()
        free.append(request)
        if arenas.add(request, batches[number % len(batches)]):
            pending.append(request)
    elif name == "complete" and pending:
        request = pending.pop(number % len(pending))
        if arenas.holds.can_complete(request):
            arenas.complete(request)
        else:
            arenas.holds.discard(request)
    elif name == "discard" and pending:
        arenas.holds.discard(pending.pop(number % len(pending)))
    elif name == "end" and batches:
        arenas.end_batch(batches.pop(number % len(batches)))
    elif name == "release" and (ticket := arenas.holds.oldest_input()):
        assert arenas.holds.release(ticket)
