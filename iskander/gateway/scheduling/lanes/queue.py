"""Queue of a lane: requests in the order in which they run, and by priority for eviction.

The order is by rank; in a fair queue by round (`fair_share`), and by rank within a round.

Each source has a sorted list instead of a heap: removing a request from the middle (cancelled or
expired) is as cheap as taking the first, and leaves no stale entry. At the few thousand entries of
a queue, moving the tail of a list is faster than any tree in Python.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from operator import itemgetter

from iskander.gateway.auth.source import UNKNOWN_SOURCE, Source
from iskander.gateway.scheduling.lanes.fair_share import FairShare, Flow
from iskander.gateway.scheduling.request import NEVER_NS, Request


class WaitingQueue:
    """Requests with rows that no worker has.

    Args:
        is_fair: Share the queue fairly between sources; otherwise only ranks count.

    Attributes:
        requests: Number of queued requests.
        bytes: Input bytes of the queued requests.
        constrained: Number of requests with a deadline or shape, or that must run alone.
        next_expiry_ns: No request expires before this time.
    """

    def __init__(self, *, is_fair: bool = False) -> None:
        self.is_fair = is_fair
        self.shares = FairShare()
        self.requests = self.rows = self.bytes = self.constrained = 0
        self.next_expiry_ns = NEVER_NS
        self._flows: dict[Source, Flow] = {}
        self._levels: dict[int, dict[int, Request]] = {}

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        """Iterate in the order in which the requests run."""
        return self._in_fair_order() if len(self._flows) > 1 else self.unordered()

    def unordered(self) -> Iterator[Request]:
        """All requests; those of one source in the order of their ranks."""
        return (entry[2] for flow in self._flows.values() for entry in flow.ranked)

    def usage_of(self, source: Source) -> tuple[int, int, int]:
        """Queued requests, rows and input bytes of a source."""
        flow = self._flows.get(source)
        return (len(flow.ranked), flow.rows, flow.bytes) if flow else (0, 0, 0)

    def put(self, request: Request) -> None:
        """Add a request; its rank, number and todo are set."""
        assert not request.is_waiting
        request.is_waiting = True
        source = self._source(request)
        flow = self._flows.get(source)
        if flow is None:
            flow = self._flows[source] = self.shares.enter(source)
        insort(flow.ranked, (request.rank, request.number, request))
        self.next_expiry_ns = min(self.next_expiry_ns, request.expires_ns)
        self._levels.setdefault(request.terms.priority, {})[request.number] = request
        self._count(flow, request, 1)

    def remove(self, request: Request) -> None:
        """Remove a queued request."""
        self._remove(self._flows[self._source(request)], request)

    def take(self, request: Request, rows: int) -> tuple[int, int]:
        """Take rows of a request for a batch: returns the first and the number of rows."""
        flow = self._flows[self._source(request)]
        first, left = request.todo[0]
        count = min(rows, left)
        self.shares.serve(flow, count)
        if count < left:
            request.todo[0] = (first + count, left - count)
        elif len(request.todo) == 1:
            self._remove(flow, request)
            del request.todo[0]
            return first, count
        else:
            del request.todo[0]
        self.rows -= count
        flow.rows -= count
        return first, count

    def expired(self, now_ns: int) -> list[Request]:
        """Expired requests; they stay in the queue."""
        if now_ns < self.next_expiry_ns:
            return []
        expired = [request for request in self.unordered() if request.expires_ns <= now_ns]
        later = (request.expires_ns for request in self.unordered() if request.expires_ns > now_ns)
        self.next_expiry_ns = min(later, default=NEVER_NS)
        return expired

    def rows_before(self, request: Request) -> int:
        """Rows that would run before a new request if no more requests arrived."""
        shares, rank, source = self.shares, request.rank, self._source(request)
        own = self._flows.get(source)
        if own is None:
            before = 0
            round_number, _ = shares.entry_of(source)
        else:
            before = _rows_up_to(own, rank)
            round_number, _ = shares.after(own.round, own.credit, before * shares.cost(own))
        # Each other source runs the rows for which it has credit up to the request's round.
        for flow in self._flows.values():
            if flow is own or flow.round > round_number:
                continue
            rows = flow.rows if flow.round < round_number else _rows_up_to(flow, rank)
            if rows:
                credit = flow.credit + (round_number - flow.round) * shares.quantum_rows
                # The request that exhausts the credit is served completely.
                last = flow.ranked[0][2].waiting_rows
                before += min(rows, credit // shares.cost(flow) + last)
        return before

    def oldest_first(self, highest: int) -> Iterator[Request]:
        """Requests of priority `highest` or lower, in order of admission; lazily merged."""
        levels = (level.values() for priority, level in self._levels.items() if priority >= highest)
        return merge(*levels, key=lambda request: request.number)

    def least_first(self, above: int) -> Iterator[Request]:
        """Requests of lower priority than `above`: lowest priority first, newest first in each."""
        for priority in sorted(self._levels, reverse=True):
            if priority > above:
                yield from reversed(self._levels[priority].values())

    def validate(self) -> None:
        """Assert that all indexes hold the same requests; for tests."""
        waiting = list(self.unordered())
        indexed = [request for level in self._levels.values() for request in level.values()]
        assert sorted(map(id, indexed)) == sorted(map(id, waiting))
        assert sorted(map(id, self)) == sorted(map(id, waiting))
        assert self.next_expiry_ns <= min((r.expires_ns for r in waiting), default=NEVER_NS)
        assert self.requests == len(waiting)
        assert self.constrained == sum(map(_is_constrained, waiting))
        assert self.rows == sum(request.waiting_rows for request in waiting)
        assert self.bytes == sum(request.input_bytes for request in waiting)
        assert all(r.todo and r.is_waiting and not r.is_over for r in waiting)
        for source, flow in self._flows.items():
            requests = [entry[2] for entry in flow.ranked]
            assert requests
            assert flow.ranked == sorted(flow.ranked)
            assert all(self._source(request) == source == flow.source for request in requests)
            assert flow.rows == sum(request.waiting_rows for request in requests)
            assert flow.bytes == sum(request.input_bytes for request in requests)

    def _source(self, request: Request) -> Source:
        return request.terms.source if self.is_fair else UNKNOWN_SOURCE

    def _count(self, flow: Flow, request: Request, sign: int) -> None:
        """Add a request to the totals, or subtract it with `sign` -1."""
        rows, input_bytes = sign * request.waiting_rows, sign * request.input_bytes
        self.requests += sign
        self.rows += rows
        self.bytes += input_bytes
        self.constrained += sign * _is_constrained(request)
        flow.rows += rows
        flow.bytes += input_bytes

    def _remove(self, flow: Flow, request: Request) -> None:
        index = bisect_left(flow.ranked, (request.rank, request.number))
        assert flow.ranked[index][2] is request, "the request is not in this queue"
        del flow.ranked[index]
        del self._levels[request.terms.priority][request.number]
        request.is_waiting = False
        self._count(flow, request, -1)
        if not flow.ranked:
            del self._flows[flow.source]
            self.shares.leave(flow)
            if not self._flows:
                self.next_expiry_ns = NEVER_NS

    def _in_fair_order(self) -> Iterator[Request]:
        """Requests by round, and by rank within a round."""
        shares = self.shares
        # (round, rank, number, credit, index in the flow, flow); numbers are unique.
        heads: list[tuple[int, float, int, int, int, Flow]] = []
        for flow in self._flows.values():
            rank, number, _ = flow.ranked[0]
            heads.append((flow.round, rank, number, flow.credit, 0, flow))
        heapify(heads)
        while heads:
            round_number, _, _, credit, index, flow = heappop(heads)
            request = flow.ranked[index][2]
            yield request
            index += 1
            if index < len(flow.ranked):
                rows = request.waiting_rows * shares.cost(flow)
                round_number, credit = shares.after(round_number, credit, rows)
                rank, number, _ = flow.ranked[index]
                heappush(heads, (round_number, rank, number, credit, index, flow))


def _rows_up_to(flow: Flow, rank: float) -> int:
    """Rows of a source with at most this rank."""
    before = bisect_right(flow.ranked, rank, key=itemgetter(0))
    if before == len(flow.ranked):
        return flow.rows
    return sum(entry[2].waiting_rows for entry in flow.ranked[:before])


def _is_constrained(request: Request) -> bool:
    return request.deadline_ns < NEVER_NS or request.is_alone or request.shape != 0
