"""Input arena: leases shared memory for requests and copies their tensors into it once.

Large requests are copied in pieces, so that the event loop serves other connections meanwhile.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final

from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, IskanderError, LimitExceeded
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.auth.quota import Quota
from iskander.gateway.auth.shares import leaves_enough
from iskander.gateway.auth.source import Source
from iskander.gateway.scheduling.lanes.admission import expired_error, reserve_of
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
        quotas: Limits of grants, by the name of the grant; empty for none.
        reclaimers: Each gives back a lease of a finished request, and returns False if it has none.
    """

    def __init__(
        self, capacity_bytes: int, limits: LimitsConfig, options: BackingOptions = ANY_MEMORY
    ) -> None:
        self.segment = Segment.create("iskander-input", capacity_bytes, options, is_read_only=True)
        self.arena = Arena(capacity_bytes)
        self._reserve_bytes = reserve_of(self.arena.capacity_bytes // GRAIN_BYTES) * GRAIN_BYTES
        self.configure(limits)
        self.reclaimers: list[Callable[[], bool]] = []
        self.quotas: Mapping[str, Quota] = {}
        self._leased: dict[Source, int] = {}
        # By source, in round-robin order.
        self._waiting: dict[Source, deque[tuple[int, asyncio.Future[Lease]]]] = {}

    def configure(self, limits: LimitsConfig) -> None:
        """Apply the limits to later requests."""
        self._wait_ms = limits.arena_wait_ms
        self._result_bytes = limits.result_bytes

    def admit(self, request: Request) -> bool:
        """Check a request and copy it into the arena, if that is possible at once.

        Returns:
            False if it is large or there is no memory: continue with `admit_later`, and read no
            more from the stream meanwhile (backpressure).

        Raises:
            IskanderError: As `Lane.require_open`, or a size limit is exceeded.
        """
        # Step 2
        lane = request.lane
        request.input_bytes = input_bytes = request.layout.input_bytes
        lane.observe_arrival(request)
        lane.require_open(request, now_ns())
        result_bytes = request.layout.output_bytes
        if result_bytes > self._result_bytes:
            raise LimitExceeded(
                f"{request.rows} rows make {result_bytes} bytes of results, "
                f"limit {self._result_bytes} (`limits.result_bytes`); send fewer rows",
                wanted=self._result_bytes,
            )
        self.arena.require_fits(input_bytes)
        if self.quotas:
            self._require_quota(request)
        if input_bytes > WHOLE_BYTES:
            return False
        source = request.terms.source
        if self._waiting and (source in self._waiting or not self._is_small(input_bytes)):
            return False
        lease = self._lease(source, input_bytes)
        if lease is None:
            return False
        if self.quotas:
            self._enter_quota(request)
        try:
            for target, part in self._place(request, lease):
                copy(target, part)
        except BaseException:
            self.give_back(request)
            raise
        return True

    async def admit_later(self, request: Request) -> None:
        """Wait for memory, and copy a request into it.

        Raises:
            IskanderError: As `Lane.require_open`.
            ArenaFull: No memory became free in time.
        """
        lane = request.lane
        lane.entering += 1
        try:
            if self.quotas:
                self._require_quota_capacity(request)
                self._enter_quota(request)
            lease = await self._wait_for_lease(request)
            try:
                lane.require_open(request, now_ns())
                for target, source in self._place(request, lease):
                    for _ in copy_in_pieces(target, source):
                        await asyncio.sleep(0)
                # Other requests may have filled the queue during the copy.
                lane.require_open(request, now_ns())
            except BaseException:
                request.lease = None
                self._return(request.terms.source, lease)
                raise
        except BaseException:
            _leave_quota(request)
            self._give_back_rate(request)
            raise
        finally:
            lane.entering -= 1

    def give_back(self, request: Request) -> None:
        """Release the lease of a request that no worker reads any more."""
        assert request.lease is not None
        self._return(request.terms.source, request.lease)
        request.lease = None
        if request.quota is not None:
            _leave_quota(request)

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
        if request.quota is not None:
            _leave_quota(request)
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

    def _require_quota(self, request: Request) -> None:
        """Require that the limits of the grant permit a request, and count it; once for each."""
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is None or request.is_part:
            return
        sizes = request.whole or (request.rows, sum(map(len, request.tensors)))
        now = now_ns()
        try:
            quota.require_size(sizes[0], sizes[1])
            quota.require_capacity(sizes[0])
            quota.take_rate(sizes[0], now)
        except IskanderError as error:
            request.lane.add_retry_hint(error, now)
            request.lane.count_rejected(request, error)
            raise

    def _give_back_rate(self, request: Request) -> None:
        """Undo what `_require_quota` took from the rates of the grant."""
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None and not request.is_part:
            quota.give_back_rate(request.whole[0] if request.whole else request.rows)

    def _require_quota_capacity(self, request: Request) -> None:
        """Check the outstanding rows again: others may have entered since `admit`."""
        quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None and not request.is_part:
            try:
                quota.require_capacity(request.rows)
            except IskanderError as error:
                request.lane.add_retry_hint(error, now_ns())
                request.lane.count_rejected(request, error)
                raise

    def _enter_quota(self, request: Request) -> None:
        """Count the rows of a request as outstanding until `_leave_quota`."""
        request.quota = quota = self.quotas.get(request.terms.source.tenant)
        if quota is not None:
            quota.outstanding_rows += request.rows

    def _place(
        self, request: Request, lease: Lease
    ) -> list[tuple[memoryview, memoryview | SegmentRange]]:
        """Assign a lease to a request, write its header, return its tensors with their targets."""
        view, layout = self.segment.view, request.layout
        body = lease.offset + len(layout.header)
        request.lease = lease
        request.body_offset = body
        assert len(request.tensors) == len(layout.offsets), "tensors of another contract"
        view[lease.offset : body] = layout.header
        targets: list[tuple[memoryview, memoryview | SegmentRange]] = []
        for index, tensor in enumerate(request.tensors):
            start = body + layout.offsets[index]
            targets.append((view[start : start + len(tensor)], tensor))
        request.tensors = []
        return targets

    async def _wait_for_lease(self, request: Request) -> Lease:
        """Wait until memory is free, `limits.arena_wait_ms` has passed or the request expires."""
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        source, entry = request.terms.source, (request.input_bytes, future)
        self._waiting.setdefault(source, deque()).append(entry)
        self._grant_leases()
        left_s = (request.expires_ns - now_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(max(min(self._wait_ms / 1000, left_s), 0)):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled():
                self._return(source, future.result())  # Granted in the iteration of the timeout.
            else:
                self._stop_waiting(source, entry)
                self._grant_leases()
            if not isinstance(error, TimeoutError):
                raise
            rejection = self._timeout_error(request, now_ns())
            request.lane.count_rejected(request, rejection)
            raise rejection from None

    def _timeout_error(self, request: Request, now: int) -> IskanderError:
        if now >= request.expires_ns:
            return expired_error(request, now)
        return ArenaFull(
            f"input arena full for {self._wait_ms} ms (`limits.arena_wait_ms`): "
            f"{self.arena.leased_bytes} of {self.arena.capacity_bytes} bytes leased",
            retry_after_ms=request.lane.retry_after_ms(now),
        )

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
        starve. A source that holds leases gets memory back without that.
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


def _leave_quota(request: Request) -> None:
    """Stop to count the rows of a request, which its grant may have no limits for any more."""
    quota, request.quota = request.quota, None
    if quota is not None:
        quota.outstanding_rows -= request.rows
