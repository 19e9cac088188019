"""Queue of a lane: all its orders hold the same requests and agree with a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.lanes import lane_of, request_of
from support.random_examples import up_to

from iskander.gateway.scheduling.lanes.queue import WaitingQueue
from iskander.gateway.scheduling.request import NEVER_NS, Request

LANE = lane_of()


def waiting_of(number: int, rank: int = 0, rows: int = 1, *, priority: int = 1) -> Request:
    request = request_of(LANE, rows, priority=priority)
    request.number, request.rank, request.expires_ns = number, rank, NEVER_NS
    return request


class QueueMachine(RuleBasedStateMachine):
    """A queue and a list of its requests, which is sorted at each comparison."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[Request] = []
        self.removed: list[Request] = []
        self.rows: dict[int, int] = {}
        self.numbers = 0
        self.now_ns = 0

    def pick(self, index: int) -> Request:
        return self.ranked()[index % len(self.waiting)]

    def ranked(self) -> list[Request]:
        return sorted(self.waiting, key=lambda request: (request.rank, request.number))

    @rule(
        rank=st.integers(0, 5),
        rows=st.integers(1, 9),
        priority=st.integers(0, 2),
        ttl_ns=st.integers(1, 20) | st.none(),
    )
    def put(self, rank: int, rows: int, priority: int, ttl_ns: int | None) -> None:
        self.numbers += 1
        request = waiting_of(self.numbers, rank, rows, priority=priority)
        if ttl_ns is not None:
            request.expires_ns = self.now_ns + ttl_ns
        self.queue.put(request)
        self.waiting.append(request)
        self.rows[request.number] = rows

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99), rows=st.integers(1, 9))
    def take(self, index: int, rows: int) -> None:
        request = self.pick(index)
        first, left = request.todo[0]
        assert self.queue.take(request, rows) == (first, min(rows, left))
        self.rows[request.number] -= min(rows, left)
        if not self.rows[request.number]:
            self.waiting.remove(request)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99))
    def remove(self, index: int) -> None:
        request = self.pick(index)
        self.queue.remove(request)
        self.waiting.remove(request)
        self.removed.append(request)

    @precondition(lambda self: self.waiting)
    @rule(index=st.integers(0, 99), rows=st.integers(1, 9))
    def put_back_rows(self, index: int, rows: int) -> None:
        """Rows return from a worker while other rows of the request are queued."""
        request = self.pick(index)
        self.queue.remove(request)
        request.todo.append((100, rows))
        self.rows[request.number] += rows
        if self.is_in_order(request):
            self.queue.put(request)
        else:
            self.waiting.remove(request)
            self.removed.append(request)

    def is_in_order(self, request: Request) -> bool:
        """Whether no later request of its priority is queued."""
        return not any(
            other.number > request.number and other.terms.priority == request.terms.priority
            for other in self.waiting
        )

    @precondition(lambda self: self.waiting)
    @rule(ns=st.integers(0, 9))
    def expire(self, ns: int) -> None:
        self.now_ns += ns
        expired = self.queue.expired(self.now_ns)
        assert expired == [r for r in self.ranked() if r.expires_ns <= self.now_ns]
        for request in expired:
            self.queue.remove(request)
            self.waiting.remove(request)

    @invariant()
    def agrees_with_the_list(self) -> None:
        queue, ranked = self.queue, self.ranked()
        queue.validate()
        assert list(queue) == ranked
        assert len(queue) == queue.requests == len(ranked)
        assert queue.rows == sum(self.rows[request.number] for request in ranked)
        assert queue.bytes == sum(request.input_bytes for request in ranked)
        assert [request.is_waiting for request in ranked] == [True] * len(ranked)
        for rank in range(7):
            before = sum(self.rows[r.number] for r in ranked if r.rank <= rank)
            assert queue.rows_before(waiting_of(0, rank)) == before
        if not ranked:
            assert queue.next_expiry_ns == NEVER_NS
            return
        assert next(iter(queue)) is ranked[0]
        for highest in (0, 1, 2, 9):
            older = [request for request in ranked if request.terms.priority >= highest]
            assert list(queue.oldest_first(highest)) == sorted(older, key=lambda r: r.number)
        for above in (-1, 0, 1, 9):
            lower = [request for request in ranked if request.terms.priority > above]
            lower.sort(key=lambda r: (-r.terms.priority, -r.number))
            assert list(queue.least_first(above)) == lower


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=up_to(60), stateful_step_count=40, deadline=None)


def test_request_leaves_with_its_last_rows() -> None:
    """Returned ranges of rows are taken one by one and not merged."""
    queue = WaitingQueue()
    request = waiting_of(1, rows=10)
    request.todo = [(4, 3), (0, 2)]
    queue.put(request)

    taken = [queue.take(request, 2), queue.take(request, 2)]
    assert (request.is_waiting, queue.rows, len(queue)) == (True, 2, 1)
    taken.append(queue.take(request, 99))

    assert taken == [(4, 2), (6, 1), (0, 2)]
    assert (request.is_waiting, queue.rows, queue.bytes, request.todo) == (False, 0, 0, [])


def test_equal_ranks_run_in_order_of_admission() -> None:
    queue = WaitingQueue()
    later, sooner = waiting_of(2, rank=7), waiting_of(1, rank=7)
    queue.put(later)
    queue.put(sooner)

    assert list(queue) == [sooner, later]


def test_only_a_queued_request_can_be_removed() -> None:
    queue = WaitingQueue()
    queued, other = waiting_of(1), waiting_of(1)
    queue.put(queued)

    with pytest.raises(AssertionError):
        queue.remove(other)
    with pytest.raises(AssertionError):
        queue.put(queued)
    assert list(queue) == [queued]


@pytest.mark.parametrize(("now_ns", "count"), [(4, 0), (5, 1), (6, 1)])
def test_request_expires_at_its_expiry_time(now_ns: int, count: int) -> None:
    """Both sides."""
    queue = WaitingQueue()
    request = waiting_of(1)
    request.expires_ns = 5
    queue.put(request)
    queue.put(waiting_of(2))

    assert queue.expired(now_ns) == [request][:count]
    assert queue.next_expiry_ns == (NEVER_NS if count else 5)
