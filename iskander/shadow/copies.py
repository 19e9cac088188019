"""Finished requests that wait for shadow batches, with their shared input leases.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from iskander.clock import NS_PER_S
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.request import NEVER_NS, Request

if TYPE_CHECKING:
    from iskander.memory.arena import Lease

COPIES_MAX: Final = 8
"""Their leases keep addresses of the arena from being used again, and bindings of a model to other
addresses cost time."""
COPIES_NS: Final = 5 * NS_PER_S
"""Time in the queue."""
PARTS_MAX: Final = COPIES_MAX


class Copy:
    """A finished request, with rows for a candidate.

    Attributes:
        lease: Its input lease, shared.
        results: Results of the served version.
        bucket: Index of its bucket.
        hops: Gateways that it passed before.
        next_row: First row that no batch has had.
        running: Batches with rows of it.
        is_waiting: It is in the queue.
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


class CopyPart(NamedTuple):
    """Rows of a copy for one batch."""

    copy: Copy
    first: int
    rows: int


class CopyQueue:
    """Copies for one candidate in order of arrival; the leases are those of `arena`.

    Attributes:
        usage: Number and bytes of the copies of all queues, until their leases are released.
    """

    def __init__(self, arena: InputArena, usage: Usage) -> None:
        self._arena = arena
        self._usage = usage
        self._waiting: deque[Copy] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def first_rows(self) -> int:
        """Rows of the first request."""
        return self._waiting[0].rows

    @property
    def expires_ns(self) -> int:
        """Time at which the first copy expires."""
        return self._waiting[0].added_ns + COPIES_NS if self._waiting else NEVER_NS

    def put(self, request: Request, results: bytes | memoryview, now_ns: int) -> None:
        """Add a request, which must have its lease."""
        copy = Copy(request, self._arena.share(request), results, now_ns)
        self._usage.add(1, copy.size_bytes)
        self._waiting.append(copy)

    def peek(self, rows_max: int) -> list[CopyPart]:
        """Return the next rows with the bucket of the first; nothing is changed."""
        parts: list[CopyPart] = []
        for copy in self._waiting:
            if not rows_max or copy.bucket != self._waiting[0].bucket:
                break
            rows = min(copy.rows - copy.next_row, rows_max)
            parts.append(CopyPart(copy, copy.next_row, rows))
            rows_max -= rows
        return parts

    def take(self, parts: Sequence[CopyPart]) -> None:
        """Remove the rows that `peek` returned; they run now."""
        for copy, _, rows in parts:
            copy.next_row += rows
            copy.running += 1
            if copy.next_row == copy.rows:
                self._waiting.popleft()
                copy.is_waiting = False

    def finish(self, parts: Sequence[CopyPart]) -> None:
        """Release what a batch needed that does not run any more."""
        for part in parts:
            part.copy.running -= 1
            self._release(part.copy)
        self._arena.grant_waiting()

    def drop_first(self) -> int:
        """Remove the first copy; return the number of its rows that did not run."""
        rows = self._drop(self._waiting[0])
        self._arena.grant_waiting()
        return rows

    def reclaim(self) -> int:
        """Remove the last copy that no batch reads, and free its lease; return its rows, or 0."""
        idle = next((copy for copy in reversed(self._waiting) if not copy.running), None)
        return 0 if idle is None else self._drop(idle)

    def _drop(self, copy: Copy) -> int:
        self._waiting.remove(copy)
        copy.is_waiting = False
        self._release(copy)
        return copy.rows - copy.next_row

    def _release(self, copy: Copy) -> None:
        if not copy.running and not copy.is_waiting:
            self._arena.arena.give_back(copy.lease)
            self._usage.add(-1, -copy.size_bytes)


class Usage:
    """Number and bytes of copies."""

    def __init__(self) -> None:
        self.copies = self.bytes = 0

    def add(self, copies: int, size_bytes: int) -> None:
        """Add copies, or subtract them."""
        self.copies += copies
        self.bytes += size_bytes

    def fits(self, size_bytes: int, bytes_max: int) -> bool:
        """Whether another copy is within the limits."""
        return self.copies < COPIES_MAX and self.bytes + size_bytes <= bytes_max
