"""A lane's waiting requests in the order in which they run; and by priority, for who gives way.

The order is that of their ranks; in a fair queue that of rounds (`fair_share`), and within a round
that of ranks.

A sorted list for each source, not a heap: removing from the middle (a caller that left, a request
that expired) is as exact and as cheap as taking the first, and nothing stale stays behind. With the
few thousand entries that a queue may have, moving a list's tail is quicker than anything a tree
does in Python.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, merge
from operator import itemgetter
from typing import NamedTuple

from iskander.auth.source import UNKNOWN_SOURCE, Source
from iskander.scheduling.fair_share import FairShare, Flow
from iskander.scheduling.request import NEVER_NS, Request


class SourceUsage(NamedTuple):
    """What a queue holds, or what a source holds of it."""

    requests: int
    rows: int
    bytes: int


class WaitingQueue:
    """Requests with rows that no worker has.

    Args:
        is_fair: Whether sources share it fairly, or only ranks count.

    Attributes:
        is_fair: As given.
        shares: Rounds of its sources.
        requests: How many wait.
        rows: That wait, over all requests.
        bytes: Of the inputs of the requests that wait.
        bound: Requests with a deadline, of a shape of their own, or that have to run alone.
        next_expiry_ns: Nothing expires before this moment; then `expired` looks.
    """

    def __init__(self, *, is_fair: bool = False) -> None:
        self.is_fair = is_fair
        self.shares = FairShare()
        self.requests = 0
        self.rows = 0
        self.bytes = 0
        self.bound = 0
        self.next_expiry_ns = NEVER_NS
        self._flows: dict[Source, Flow] = {}
        self._levels: dict[int, dict[int, Request]] = {}

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they are to run."""
        if len(self._flows) > 1:
            return self._in_fair_order()
        return self.unordered()

    @property
    def first(self) -> Request:
        """Whose turn it is."""
        return next(iter(self))

    def unordered(self) -> Iterator[Request]:
        """All of them, those of one source in the order of their ranks."""
        return (entry[2] for flow in self._flows.values() for entry in flow.ranked)

    def held_by(self, source: Source) -> SourceUsage:
        """What waits of a source."""
        flow = self._flows.get(source)
        return (
            SourceUsage(len(flow.ranked), flow.rows, flow.bytes) if flow else SourceUsage(0, 0, 0)
        )

    def put(self, request: Request) -> None:
        """Let a request wait; its rank, number and todo are set."""
        assert not request.is_waiting
        request.is_waiting = True
        source = self._source(request)
        flow = self._flows.get(source)
        if flow is None:
            flow = self._flows[source] = self.shares.enter(source)
        insort(flow.ranked, (request.rank, request.number, request))
        rows = request.waiting_rows
        flow.rows += rows
        flow.bytes += request.input_bytes
        self.next_expiry_ns = min(self.next_expiry_ns, request.expires_ns)
        self._levels.setdefault(request.terms.priority, {})[request.number] = request
        self.requests += 1
        self.rows += rows
        self.bytes += request.input_bytes
        self.bound += _is_bound(request)

    def remove(self, request: Request) -> None:
        """Take a request out; it is there."""
        self._remove(self._flows[self._source(request)], request)

    def take(self, request: Request, rows: int) -> tuple[int, int]:
        """Take rows of a request for a batch; it leaves the queue with its last ones.

        Returns:
            The first of the rows, and how many there are.
        """
        flow = self._flows[self._source(request)]
        first, left = request.todo[0]
        taken = min(rows, left)
        self.shares.serve(flow, taken)
        if taken < left:
            request.todo[0] = (first + taken, left - taken)
        elif len(request.todo) == 1:
            self._remove(flow, request)
            del request.todo[0]
            return first, taken
        else:
            del request.todo[0]
        self.rows -= taken
        flow.rows -= taken
        return first, taken

    def expired(self, now_ns: int) -> list[Request]:
        """Those whose time has passed; they still wait."""
        if now_ns < self.next_expiry_ns:
            return []
        expired = [request for request in self.unordered() if request.expires_ns <= now_ns]
        later = (request.expires_ns for request in self.unordered() if request.expires_ns > now_ns)
        self.next_expiry_ns = min(later, default=NEVER_NS)
        return expired

    def rows_before(self, newcomer: Request) -> int:
        """Rows that go before a newcomer with this rank and source, without what comes meanwhile.

        Of each other source, those that it may have until the round of the newcomer.
        """
        shares, rank, source = self.shares, newcomer.rank, self._source(newcomer)
        own = self._flows.get(source)
        if own is None:
            before = 0
            round_number, _ = shares.entry_of(source)
        else:
            before = _rows_up_to(own, rank)
            round_number, _ = shares.after(own.round, own.credit, before * shares.cost(own))
        for flow in self._flows.values():
            if flow is own or flow.round > round_number:
                continue
            rows = flow.rows if flow.round < round_number else _rows_up_to(flow, rank)
            if rows:
                credit = flow.credit + (round_number - flow.round) * shares.quantum_rows
                # The request that uses up the credit is served to its end.
                last = flow.ranked[0][2].waiting_rows
                before += min(rows, credit // shares.cost(flow) + last)
        return before

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
        waiting = list(self.unordered())
        held = [request for level in self._levels.values() for request in level.values()]
        assert sorted(map(id, held)) == sorted(map(id, waiting))
        assert sorted(map(id, self)) == sorted(map(id, waiting))
        assert self.next_expiry_ns <= min((r.expires_ns for r in waiting), default=NEVER_NS)
        assert self.requests == len(waiting)
        assert self.bound == sum(map(_is_bound, waiting))
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

    def _remove(self, flow: Flow, request: Request) -> None:
        index = bisect_left(flow.ranked, (request.rank, request.number))
        assert flow.ranked[index][2] is request, "the request does not wait here"
        del flow.ranked[index]
        del self._levels[request.terms.priority][request.number]
        request.is_waiting = False
        rows = request.waiting_rows
        self.requests -= 1
        self.rows -= rows
        self.bytes -= request.input_bytes
        self.bound -= _is_bound(request)
        flow.rows -= rows
        flow.bytes -= request.input_bytes
        if not flow.ranked:
            del self._flows[flow.source]
            self.shares.leave(flow)
            if not self._flows:
                self.next_expiry_ns = NEVER_NS

    def _in_fair_order(self) -> Iterator[Request]:
        """By round, and within one by rank."""
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
    """Rows of a source whose rank is at most this."""
    before = bisect_right(flow.ranked, rank, key=itemgetter(0))
    if before == len(flow.ranked):
        return flow.rows
    return sum(entry[2].waiting_rows for entry in flow.ranked[:before])


def _is_bound(request: Request) -> bool:
    return request.deadline_ns < NEVER_NS or request.is_alone or request.shape != 0
