"""Input arena: leases shared memory to requests and copies their tensors into it once.

Large requests are copied in pieces, so that the event loop serves other connections meanwhile.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from iskander.gateway.auth.shares import leaves_enough
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.admission import reserve_of
from iskander.gateway.scheduling.request import Request
from iskander.interprocess.memory.arena import GRAIN_BYTES, Arena, Lease
from iskander.interprocess.memory.backing import ANY_MEMORY, BackingOptions
from iskander.interprocess.memory.chunked_copy import WHOLE_BYTES, copy, copy_in_pieces
from iskander.interprocess.memory.client_segment import SegmentRange
from iskander.interprocess.memory.segment import Segment

SMALL_SHARE: Final = 64
"""Requests up to 1 / `SMALL_SHARE` of the arena do not wait behind larger ones of other sources."""


class InputArena:
    """The gateway's input arena and the requests that wait for memory in it.

    Waiting sources get leases in turn. The last ninth of the arena is reserved for sources that
    hold at most eight times the memory that stays free, as in the queue of a lane.

    Attributes:
        reclaimers: Each gives back a lease of a finished request, and returns False if it has none.
    """

    def __init__(self, capacity_bytes: int, options: BackingOptions = ANY_MEMORY) -> None:
        self.segment = Segment.create("iskander-input", capacity_bytes, options, is_read_only=True)
        self.arena = Arena(capacity_bytes)
        self._reserve_bytes = reserve_of(self.arena.capacity_bytes // GRAIN_BYTES) * GRAIN_BYTES
        self.reclaimers: list[Callable[[], bool]] = []
        self._leased: dict[Source, int] = {}
        # By source, in round-robin order.
        self._waiting: dict[Source, deque[tuple[int, asyncio.Future[Lease]]]] = {}

    def place(self, request: Request) -> bool:
        """Lease memory for a request and copy its tensors, if that is possible at once.

        Returns:
            False if it is large, or there is no memory for its source.

        Raises:
            LimitExceeded: It exceeds the arena.
        """
        # Step 4
        input_bytes, source = request.input_bytes, request.terms.source
        self.arena.require_fits(input_bytes)
        if input_bytes > WHOLE_BYTES:
            return False
        if self._waiting and (source in self._waiting or not self._is_small(input_bytes)):
            return False
        lease = self._lease(source, input_bytes)
        if lease is None:
            return False
        request.lease = lease
        try:
            for target, part in self._targets(request, lease):
                copy(target, part)
        except BaseException:
            self.give_back(request)
            raise
        return True

    async def place_later(self, request: Request) -> None:
        """Copy a request into its lease in pieces, between which the event loop runs."""
        assert request.lease is not None
        for target, part in self._targets(request, request.lease):
            for _ in copy_in_pieces(target, part):
                await asyncio.sleep(0)

    def give_back(self, request: Request) -> None:
        """Release the lease of a request that no worker reads any more."""
        assert request.lease is not None
        self._return(request.terms.source, request.lease)
        request.lease = None
        request.leave_quota()

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait for memory; then no lease is held."""
        return bool(self._waiting)

    def hold(self, request: Request) -> Lease:
        """Keep the lease of a finished request for its observer, charged to no source.

        The observer returns it to `arena`, and calls `grant_waiting` unless it reclaims.
        """
        lease = request.lease
        assert lease is not None
        request.lease = None
        self._discharge(request.terms.source, lease)
        request.leave_quota()
        return lease

    def share(self, request: Request) -> Lease:
        """Return the lease of a request to another holder, charged to no source after its end.

        It is returned as that of `hold`.
        """
        assert request.lease is not None
        request.lease.holders += 1
        return request.lease

    def grant_waiting(self) -> None:
        """Grant leases to waiting requests after held leases were given back."""
        self._grant_leases()

    def close(self) -> None:
        """Unmap the arena."""
        self.segment.close()

    def _targets(
        self, request: Request, lease: Lease
    ) -> list[tuple[memoryview, memoryview | SegmentRange]]:
        """Write the header of a request, and return its tensors with their targets."""
        view, layout = self.segment.view, request.layout
        body = lease.offset + len(layout.header)
        request.body_offset = body
        assert len(request.tensors) == len(layout.offsets), "tensors of another contract"
        view[lease.offset : body] = layout.header
        targets: list[tuple[memoryview, memoryview | SegmentRange]] = []
        for index, tensor in enumerate(request.tensors):
            start = body + layout.offsets[index]
            targets.append((view[start : start + len(tensor)], tensor))
        request.tensors = []
        return targets

    async def wait_for_lease(self, request: Request, seconds: float) -> None:
        """Wait until there is memory for a request, and lease it.

        Raises:
            TimeoutError: There was none in time.
        """
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        source, entry = request.terms.source, (request.input_bytes, future)
        self._waiting.setdefault(source, deque()).append(entry)
        self._grant_leases()
        try:
            async with asyncio.timeout(seconds):
                request.lease = await future
        except BaseException:
            if future.done() and not future.cancelled():
                self._return(source, future.result())  # Granted in the iteration of the timeout.
            else:
                self._stop_waiting(source, entry)
                self._grant_leases()
            raise

    def _stop_waiting(self, source: Source, entry: tuple[int, asyncio.Future[Lease]]) -> None:
        entries = self._waiting.get(source)
        if entries is not None and entry in entries:
            entries.remove(entry)
            if not entries:
                del self._waiting[source]

    def _is_small(self, input_bytes: int) -> bool:
        return input_bytes <= self.arena.capacity_bytes // SMALL_SHARE

    def _lease(self, source: Source, input_bytes: int) -> Lease | None:
        if not self._may_lease(source, input_bytes):
            return None
        lease = self.arena.lease(input_bytes)
        while lease is None and self._reclaim():
            lease = self.arena.lease(input_bytes)
        if lease is not None:
            self._leased[source] = self._leased.get(source, 0) + lease.length_bytes
        return lease

    def _may_lease(self, source: Source, input_bytes: int) -> bool:
        """Whether another lease of a source leaves enough memory to other sources.

        Held leases are given back before the answer is no.
        """
        while not self._leaves_enough(source, input_bytes):
            if not self._reclaim():
                return False
        return True

    def _reclaim(self) -> bool:
        return any(reclaim() for reclaim in self.reclaimers)

    def _leaves_enough(self, source: Source, input_bytes: int) -> bool:
        arena = self.arena
        free = arena.capacity_bytes - arena.leased_bytes - input_bytes
        if not arena.leased_bytes or free >= self._reserve_bytes:
            return True
        return leaves_enough(self._leased.get(source, 0) + input_bytes, free)

    def _return(self, source: Source, lease: Lease) -> None:
        """Release a lease, and grant leases to waiting sources."""
        self.arena.give_back(lease)
        self._discharge(source, lease)
        self._grant_leases()

    def _discharge(self, source: Source, lease: Lease) -> None:
        left = self._leased[source] - lease.length_bytes
        if left:
            self._leased[source] = left
        else:
            del self._leased[source]

    def _grant_leases(self) -> None:
        """Grant leases to waiting sources round-robin, to each in order of arrival.

        A large request whose source holds nothing blocks those of other sources; otherwise it would
        starve. A source that holds leases need not block others: its own leases come back to it.
        """
        is_large_blocked = False
        is_progress = bool(self._waiting)
        while is_progress:
            is_progress = False
            for source, entries in list(self._waiting.items()):
                input_bytes, future = entries[0]
                is_large = not self._is_small(input_bytes)
                if not future.cancelled():
                    if is_large and is_large_blocked:
                        continue
                    lease = self._lease(source, input_bytes)
                    if lease is None:
                        is_large_blocked |= is_large and source not in self._leased
                        continue
                    future.set_result(lease)
                is_progress = True
                entries.popleft()
                del self._waiting[source]
                if entries:
                    self._waiting[source] = entries  # To the end of the round.
