"""A lane's waiting requests in the order of their ranks; and by priority, for who gives way.

A sorted list, not a heap: removing from the middle (a caller that left, a request that expired) is
as exact and as cheap as taking the first, and nothing stale stays behind. With the few thousand
entries that a queue may have, moving a list's tail is quicker than anything a tree does in Python.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import merge
from operator import itemgetter

from iskander.gateway.lanes.request import NEVER_NS, Request


class WaitingQueue:
    """Requests with rows that no worker has.

    Attributes:
        requests: How many wait.
        rows: That wait, over all requests.
        bytes: Of the inputs of the requests that wait.
        bound: Requests with a deadline, of a shape of their own, or that have to run alone.
        next_expiry_ns: Nothing expires before this moment; then `expired` looks.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.rows = 0
        self.bytes = 0
        self.bound = 0
        self.next_expiry_ns = NEVER_NS
        self._by_rank: list[tuple[float, int, Request]] = []
        self._levels: dict[int, dict[int, Request]] = {}

    def __len__(self) -> int:
        return len(self._by_rank)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are to run."""
        return (entry[2] for entry in self._by_rank)

    @property
    def first(self) -> Request:
        """Whose turn it is."""
        return self._by_rank[0][2]

    def put(self, request: Request) -> None:
        """Let a request wait; its rank, number and todo are set."""
        assert not request.is_waiting
        request.is_waiting = True
        insort(self._by_rank, (request.rank, request.number, request))
        self.next_expiry_ns = min(self.next_expiry_ns, request.expires_ns)
        self._levels.setdefault(request.terms.priority, {})[request.number] = request
        self.requests += 1
        self.rows += request.waiting_rows
        self.bytes += request.input_bytes
        self.bound += _is_bound(request)

    def remove(self, request: Request) -> None:
        """Take a request out; it is there."""
        index = bisect_left(self._by_rank, (request.rank, request.number))
        assert self._by_rank[index][2] is request, "the request does not wait here"
        del self._by_rank[index]
        del self._levels[request.terms.priority][request.number]
        request.is_waiting = False
        self.requests -= 1
        self.rows -= request.waiting_rows
        self.bytes -= request.input_bytes
        self.bound -= _is_bound(request)
        if not self._by_rank:
            self.next_expiry_ns = NEVER_NS

    def take(self, request: Request, rows: int) -> tuple[int, int]:
        """Take rows of a request for a batch; it leaves the queue with its last ones.

        Returns:
            The first of the rows, and how many there are.
        """
        first, left = request.todo[0]
        if rows < left:
            request.todo[0] = (first + rows, left - rows)
            self.rows -= rows
            return first, rows
        if len(request.todo) == 1:
            self.remove(request)
        else:
            self.rows -= left
        del request.todo[0]
        return first, left

    def expired(self, now_ns: int) -> list[Request]:
        """Those whose time has passed; they still wait."""
        if now_ns < self.next_expiry_ns:
            return []
        expired = [request for request in self if request.expires_ns <= now_ns]
        later = (request.expires_ns for request in self if request.expires_ns > now_ns)
        self.next_expiry_ns = min(later, default=NEVER_NS)
        return expired

    def rows_before(self, rank: float) -> int:
        """Rows that go before a newcomer of that rank."""
        before = bisect_right(self._by_rank, rank, key=itemgetter(0))
        return sum(entry[2].waiting_rows for entry in self._by_rank[:before])

    def oldest_first(self, highest: int) -> Iterator[Request]:
        """Those of no higher priority than `highest`, in the order in which they began to wait.

        The first ones cheaply.
        """
        levels = (level.values() for priority, level in self._levels.items() if priority >= highest)
        return merge(*levels, key=lambda request: request.number)

    def least_first(self, above: int) -> Iterator[Request]:
        """Those of a lower priority than `above`: the lowest first, of one priority the newest."""
        for priority in sorted(self._levels, reverse=True):
            if priority > above:
                yield from reversed(self._levels[priority].values())

    def validate(self) -> None:
        """Assert that all orders hold the same requests; for tests."""
        ranked = [entry[2] for entry in self._by_rank]
        assert self._by_rank == sorted(self._by_rank)
        held = [request for level in self._levels.values() for request in level.values()]
        assert sorted(map(id, held)) == sorted(map(id, ranked))
        assert self.next_expiry_ns <= min((r.expires_ns for r in ranked), default=NEVER_NS)
        assert self.requests == len(ranked)
        assert self.bound == sum(map(_is_bound, ranked))
        assert self.rows == sum(request.waiting_rows for request in ranked)
        assert self.bytes == sum(request.input_bytes for request in ranked)
        assert all(r.todo and r.is_waiting and not r.is_over for r in ranked)


def _is_bound(request: Request) -> bool:
    return request.deadline_ns < NEVER_NS or request.is_alone or request.shape != 0
