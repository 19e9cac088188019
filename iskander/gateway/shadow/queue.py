"""Finished requests that wait for shadow batches, with their shared input leases.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from iskander.foundation.clock import NS_PER_S
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.request import NEVER_NS, Request

if TYPE_CHECKING:
    from iskander.interprocess.memory.arena import Lease

REQUESTS_MAX: Final = 8
"""Their leases keep addresses of the arena from being used again, and bindings of a model to other
addresses cost time."""
QUEUED_NS: Final = 5 * NS_PER_S
"""Time in the queue."""


class ShadowRequest:
    """A finished request, with rows for a candidate.

    Attributes:
        lease: Its input lease, shared.
        results: Results of the served version.
        bucket: Index of its bucket.
        hops: Gateways that it passed before.
        next_row: First row that no batch has had.
        running: Batches with rows of it.
        is_waiting: The shadow request is in the queue.
    """

    __slots__ = (
        "added_ns", "body_offset", "bucket", "hops", "is_waiting", "lease", "next_row", "results",
        "rows", "running", "size_bytes",
    )  # fmt: skip

    def __init__(
        self, request: Request, lease: Lease, results: bytes | memoryview, now_ns: int
    ) -> None:
        self.lease, self.results = lease, results
        self.rows, self.bucket, self.hops = request.rows, request.shape, request.terms.hops
        self.body_offset = request.body_offset
        self.size_bytes = request.input_bytes + len(results)
        self.next_row = self.running = 0
        self.is_waiting = True
        self.added_ns = now_ns


class ShadowPart(NamedTuple):
    """Rows of a request for one batch."""

    request: ShadowRequest
    first: int
    rows: int


class ShadowQueue:
    """Requests for one candidate in order of arrival; the leases are those of `arena`.

    Attributes:
        usage: Number and bytes of the requests of all queues, until their leases are released.
    """

    def __init__(self, arena: InputArena, usage: Usage) -> None:
        self._arena = arena
        self._usage = usage
        self._waiting: deque[ShadowRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first_rows(self) -> int:
        """Rows of the first request."""
        return self._waiting[0].rows

    @property
    def expires_ns(self) -> int:
        """Time at which the first request expires."""
        return self._waiting[0].added_ns + QUEUED_NS if self._waiting else NEVER_NS

    def put(self, request: Request, results: bytes | memoryview, now_ns: int) -> None:
        """Add a request, which must have its lease."""
        entry = ShadowRequest(request, self._arena.share(request), results, now_ns)
        self._usage.add(1, entry.size_bytes)
        self._waiting.append(entry)

    @property
    def is_first_cut(self) -> bool:
        """Whether rows of the first request have run."""
        return self._waiting[0].next_row > 0

    def peek_whole(self) -> list[ShadowPart]:
        """Return all rows of the first request; nothing is changed."""
        return [ShadowPart(self._waiting[0], 0, self._waiting[0].rows)]

    def peek(self, rows_max: int) -> list[ShadowPart]:
        """Return the next rows with the bucket of the first; nothing is changed."""
        parts: list[ShadowPart] = []
        for entry in self._waiting:
            if not rows_max or entry.bucket != self._waiting[0].bucket:
                break
            rows = min(entry.rows - entry.next_row, rows_max)
            parts.append(ShadowPart(entry, entry.next_row, rows))
            rows_max -= rows
        return parts

    def take(self, parts: Sequence[ShadowPart]) -> None:
        """Remove the rows that `peek` returned; they run now."""
        for entry, _, rows in parts:
            entry.next_row += rows
            entry.running += 1
            if entry.next_row == entry.rows:
                self._waiting.popleft()
                entry.is_waiting = False

    def finish(self, parts: Sequence[ShadowPart]) -> None:
        """Release what a batch needed that does not run any more."""
        for part in parts:
            part.request.running -= 1
            self._release(part.request)
        self._arena.grant_waiting()

    def drop_first(self) -> int:
        """Remove the first request; return the number of its rows that did not run."""
        rows = self._drop(self._waiting[0])
        self._arena.grant_waiting()
        return rows

    def reclaim(self) -> int:
        """Remove the last request that no batch reads; return its rows, or 0."""
        idle = next((entry for entry in reversed(self._waiting) if not entry.running), None)
        return 0 if idle is None else self._drop(idle)

    def _drop(self, entry: ShadowRequest) -> int:
        self._waiting.remove(entry)
        entry.is_waiting = False
        self._release(entry)
        return entry.rows - entry.next_row

    def _release(self, entry: ShadowRequest) -> None:
        if not entry.running and not entry.is_waiting:
            self._arena.arena.give_back(entry.lease)
            self._usage.add(-1, -entry.size_bytes)


class Usage:
    """Number and bytes of the requests for candidates."""

    def __init__(self) -> None:
        self.requests = self.bytes = 0

    def add(self, requests: int, size_bytes: int) -> None:
        """Add requests, or subtract them."""
        self.requests += requests
        self.bytes += size_bytes

    def fits(self, size_bytes: int, bytes_max: int) -> bool:
        """Whether another request is within the limits."""
        return self.requests < REQUESTS_MAX and self.bytes + size_bytes <= bytes_max
