"""The way into shared memory: a lease, and the one copy of a request's tensors.

A large request is copied in pieces, so that others are read meanwhile.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from iskander.auth.source import Source
from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import LimitsConfig
from iskander.errors import ArenaFull, IskanderError, LimitExceeded
from iskander.memory.arena import GRAIN_BYTES, Arena, Lease
from iskander.memory.backing import ANY_MEMORY, BackingOptions
from iskander.memory.chunked_copy import WHOLE_BYTES, copied, copy
from iskander.memory.client_segment import SegmentRange
from iskander.memory.segment import Segment
from iskander.scheduling.admission import FREE_SHARE, MISSED, expired_error, reserve_of
from iskander.scheduling.request import Request

SMALL_SHARE: Final = 64
"""A request of at most this part of the arena does not wait behind larger ones of other sources."""


class InputArena:
    """The gateway's input arena, and who waits for room in it.

    Sources that wait are granted room in turn. The last ninth of the arena is for sources that hold
    at most eight times what then stays free, as in a lane's queue.

    Args:
        capacity_bytes: Of the arena.
        limits: How long a request waits for room, and what its results may take.
        options: What memory the arena is to be.
    """

    def __init__(
        self, capacity_bytes: int, limits: LimitsConfig, options: BackingOptions = ANY_MEMORY
    ) -> None:
        self.segment = Segment.create("iskander-input", capacity_bytes, options, is_read_only=True)
        self.arena = Arena(capacity_bytes)
        self._reserve_bytes = reserve_of(self.arena.capacity_bytes // GRAIN_BYTES) * GRAIN_BYTES
        self._wait_ms = limits.arena_wait_ms
        self._result_bytes = limits.result_bytes
        self._held: dict[Source, int] = {}
        # By source, in the order of their turns.
        self._waiting: dict[Source, deque[tuple[int, asyncio.Future[Lease]]]] = {}

    def admit(self, request: Request) -> bool:
        """Write a request into the arena, or refuse it now; then it can be submitted at once.

        Returns:
            Whether it is there. Where there was no room, or it is large, `admit_later` goes on:
            the stream is not read on meanwhile, and so its client feels it.

        Raises:
            IskanderError: As `Lane.require_open`.
            LimitExceeded: Its results would be too large.
            SegmentError: It would not fit the empty arena.
        """
        # Step 2
        lane = request.lane
        request.input_bytes = input_bytes = request.layout.input_bytes
        lane.hear(request)
        lane.require_open(request, now_ns())
        self._require_results(request)
        self.arena.require_fits(input_bytes)
        if input_bytes > WHOLE_BYTES:
            return False
        source = request.terms.source
        if self._waiting and (source in self._waiting or not self._is_small(input_bytes)):
            return False
        if not self._may_hold(source, input_bytes):
            return False
        lease = self._lease(source, input_bytes)
        if lease is None:
            return False
        try:
            for target, part in self._lent(request, lease):
                copy(target, part)
        except BaseException:
            self.give_back(request)
            raise
        return True

    async def admit_later(self, request: Request) -> None:
        """Wait for room, and write a request into it.

        Raises:
            IskanderError: As `Lane.require_open`.
            ArenaFull: There was no room in time.
        """
        lane = request.lane
        lane.entering += 1
        try:
            await self._enter(request)
        finally:
            lane.entering -= 1

    def give_back(self, request: Request) -> None:
        """Return a request's lease, once no worker holds it, and let the next one in."""
        assert request.lease is not None
        self._return(request.terms.source, request.lease)
        request.lease = None

    def close(self) -> None:
        """Unmap the arena."""
        self.segment.close()

    def _require_results(self, request: Request) -> None:
        result_bytes = request.layout.output_bytes
        if result_bytes > self._result_bytes:
            raise LimitExceeded(
                f"{request.rows} rows make {result_bytes} bytes of results and a request may have "
                f"{self._result_bytes} (limits.result_bytes): send fewer rows",
                wanted=self._result_bytes,
            )

    async def _enter(self, request: Request) -> None:
        lease = await self._room(request)
        try:
            request.lane.require_open(request, now_ns())
            await self._write(request, lease)
            # Others had their turn meanwhile, and may have taken the place.
            request.lane.require_open(request, now_ns())
        except BaseException:
            request.lease = None
            self._return(request.terms.source, lease)
            raise

    async def _write(self, request: Request, lease: Lease) -> None:
        for target, source in self._lent(request, lease):
            for _ in copied(target, source):
                await asyncio.sleep(0)

    def _lent(
        self, request: Request, lease: Lease
    ) -> list[tuple[memoryview, memoryview | SegmentRange]]:
        """Where in a lease each part of a request is to be copied, and the part."""
        view, layout = self.segment.view, request.layout
        body = lease.offset + len(layout.header)
        request.lease = lease
        request.body_offset = body
        assert len(request.tensors) == len(layout.offsets), "of another contract"
        view[lease.offset : body] = layout.header
        lent: list[tuple[memoryview, memoryview | SegmentRange]] = []
        for index, tensor in enumerate(request.tensors):
            start = body + layout.offsets[index]
            lent.append((view[start : start + len(tensor)], tensor))
        request.tensors = []
        return lent

    async def _room(self, request: Request) -> Lease:
        room: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        source, entry = request.terms.source, (request.input_bytes, room)
        self._waiting.setdefault(source, deque()).append(entry)
        self._let_in()
        left_s = (request.expires_ns - now_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(max(min(self._wait_ms / 1000, left_s), 0)):
                return await room
        except BaseException as error:
            if room.done() and not room.cancelled():
                self._return(source, room.result())  # Granted in the turn that gave it up.
            else:
                self._forget(source, entry)
                self._let_in()
            if not isinstance(error, TimeoutError):
                raise
            refusal = self._refusal(request, now_ns())
            request.lane.counts[f"refused.{refusal.code}"] += 1
            if refusal.code in MISSED:
                request.lane.count_missed(request)
            raise refusal from None

    def _refusal(self, request: Request, now: int) -> IskanderError:
        if now >= request.expires_ns:
            return expired_error(request, now)
        return ArenaFull(
            f"the input arena was full for {self._wait_ms} ms: "
            f"{self.arena.leased_bytes} of {self.arena.capacity_bytes} bytes are leased",
            retry_after_ms=request.lane.retry_after_ms(now),
        )

    def _forget(self, source: Source, entry: tuple[int, asyncio.Future[Lease]]) -> None:
        entries = self._waiting.get(source)
        if entries is not None and entry in entries:
            entries.remove(entry)
            if not entries:
                del self._waiting[source]

    def _is_small(self, input_bytes: int) -> bool:
        return input_bytes <= self.arena.capacity_bytes // SMALL_SHARE

    def _may_hold(self, source: Source, input_bytes: int) -> bool:
        """Whether a source leaves enough of the arena to others with a request more."""
        arena = self.arena
        free = arena.capacity_bytes - arena.leased_bytes - input_bytes
        if not arena.leased_bytes or free >= self._reserve_bytes:
            return True
        return self._held.get(source, 0) + input_bytes <= FREE_SHARE * free

    def _lease(self, source: Source, input_bytes: int) -> Lease | None:
        lease = self.arena.lease(input_bytes)
        if lease is not None:
            self._held[source] = self._held.get(source, 0) + lease.length_bytes
        return lease

    def _return(self, source: Source, lease: Lease) -> None:
        self.arena.give_back(lease)
        left = self._held[source] - lease.length_bytes
        if left:
            self._held[source] = left
        else:
            del self._held[source]
        self._let_in()

    def _let_in(self) -> None:
        """Grant room to the sources in turn, to each in the order of its asking.

        A large request that finds no room holds back the large ones of others, or it would never
        find any.
        """
        is_large_blocked = False
        is_progress = bool(self._waiting)
        while is_progress:
            is_progress = False
            for source, entries in list(self._waiting.items()):
                input_bytes, room = entries[0]
                is_large = not self._is_small(input_bytes)
                if not room.cancelled():
                    if (is_large and is_large_blocked) or not self._may_hold(source, input_bytes):
                        continue
                    lease = self._lease(source, input_bytes)
                    if lease is None:
                        is_large_blocked |= is_large
                        continue
                    room.set_result(lease)
                is_progress = True
                entries.popleft()
                del self._waiting[source]
                if entries:
                    self._waiting[source] = entries  # Behind the others.
