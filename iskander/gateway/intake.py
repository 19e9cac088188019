"""The way into shared memory: a lease, and the one copy of a request's tensors.

A large request is copied in pieces, so that others are read meanwhile.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

from iskander.clock import NS_PER_S, now_ns
from iskander.config import LimitsConfig
from iskander.errors import ArenaFull, IskanderError, LimitExceeded
from iskander.gateway.lanes.admission import MISSED, expired_error
from iskander.gateway.lanes.request import Request
from iskander.memory.arena import Arena, Lease
from iskander.memory.backing import ANY_MEMORY, BackingOptions
from iskander.memory.loan import Range
from iskander.memory.pieces import WHOLE_BYTES, copied, copy
from iskander.memory.segment import Segment


class Intake:
    """The gateway's input arena, and who waits for room in it.

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
        self._wait_ms = limits.arena_wait_ms
        self._result_bytes = limits.result_bytes
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()

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
        if self._waiting or input_bytes > WHOLE_BYTES:
            return False
        lease = self.arena.lease(input_bytes)
        if lease is None:
            return False
        try:
            for target, source in self._lent(request, lease):
                copy(target, source)
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
        self.arena.give_back(request.lease)
        request.lease = None
        self._let_in()

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
            self.arena.give_back(lease)
            self._let_in()
            raise

    async def _write(self, request: Request, lease: Lease) -> None:
        for target, source in self._lent(request, lease):
            for _ in copied(target, source):
                await asyncio.sleep(0)

    def _lent(self, request: Request, lease: Lease) -> list[tuple[memoryview, memoryview | Range]]:
        """Where in a lease each part of a request is to be copied, and the part."""
        view, layout = self.segment.view, request.layout
        body = lease.offset + len(layout.header)
        request.lease = lease
        request.body_offset = body
        assert len(request.tensors) == len(layout.offsets), "of another contract"
        view[lease.offset : body] = layout.header
        lent: list[tuple[memoryview, memoryview | Range]] = []
        for index, tensor in enumerate(request.tensors):
            start = body + layout.offsets[index]
            lent.append((view[start : start + len(tensor)], tensor))
        request.tensors = []
        return lent

    async def _room(self, request: Request) -> Lease:
        room: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = (request.input_bytes, room)
        self._waiting.append(entry)
        self._let_in()
        left_s = (request.expires_ns - now_ns()) / NS_PER_S
        try:
            async with asyncio.timeout(max(min(self._wait_ms / 1000, left_s), 0)):
                return await room
        except BaseException as error:
            if room.done() and not room.cancelled():
                self.arena.give_back(room.result())  # Granted in the turn that gave it up.
            elif entry in self._waiting:
                self._waiting.remove(entry)
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

    def _let_in(self) -> None:
        """Grant room in the order of asking; one that is too large yet holds the others back."""
        waiting = self._waiting
        while waiting:
            length_bytes, room = waiting[0]
            if not room.cancelled():
                lease = self.arena.lease(length_bytes)
                if lease is None:
                    return
                room.set_result(lease)
            waiting.popleft()
