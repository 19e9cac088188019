"""The way into shared memory: a lease, and the one copy of a request's tensors.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import deque

from iskander.errors import Overloaded
from iskander.gateway.lanes import Lane, Layout, Request
from iskander.memory.arena import Arena, Lease
from iskander.memory.segment import Segment


class Intake:
    """The gateway's input arena, and who waits for room in it.

    Args:
        capacity_bytes: Of the arena.
        wait_ms: How long a request waits for room before it is refused.
    """

    def __init__(self, capacity_bytes: int, wait_ms: int) -> None:
        self.segment = Segment.create("iskander-input", capacity_bytes, is_read_only=True)
        self.arena = Arena(capacity_bytes)
        self._wait_ms = wait_ms
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()

    async def admit(self, lane: Lane, request: Request) -> None:
        """Write a request into the arena and queue it, or refuse it now.

        Waits for room where the arena is full: the stream is not read on meanwhile, and so its
        client feels it.

        Raises:
            NotReady: The model has no worker.
            Overloaded: The queue is full, or there was no room in time.
            SegmentError: It would not fit the empty arena.
        """
        # Step 2
        lane.require_open()
        layout = lane.layout(request.rows)
        self.arena.require_fits(layout.input_bytes)
        lease = None if self._waiting else self.arena.lease(layout.input_bytes)
        if lease is None:
            lease = await self._room(layout.input_bytes)
        try:
            lane.require_open()  # Again: the wait may have been long.
            self._write(request, layout, lease)
        except BaseException:
            self.arena.give_back(lease)
            self._let_in()
            raise
        lane.put(request)

    def give_back(self, request: Request) -> None:
        """Return a request's lease, once no worker holds it, and let the next one in."""
        assert request.lease is not None
        self.arena.give_back(request.lease)
        request.lease = None
        self._let_in()

    def close(self) -> None:
        """Unmap the arena."""
        self.segment.close()

    def _write(self, request: Request, layout: Layout, lease: Lease) -> None:
        view, header = self.segment.view, layout.header
        body = lease.offset + len(header)
        view[lease.offset : body] = header
        for tensor, offset in zip(request.tensors, layout.offsets, strict=True):
            start = body + offset
            view[start : start + len(tensor)] = tensor
        request.lease = lease
        request.body_offset = body
        request.tensors = []

    async def _room(self, length_bytes: int) -> Lease:
        room: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = (length_bytes, room)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(self._wait_ms / 1000):
                return await room
        except BaseException as error:
            if room.done() and not room.cancelled():
                self.arena.give_back(room.result())  # Granted in the turn that gave it up.
            elif entry in self._waiting:
                self._waiting.remove(entry)
            self._let_in()
            if not isinstance(error, TimeoutError):
                raise
            raise Overloaded(
                f"the input arena was full for {self._wait_ms} ms: "
                f"{self.arena.leased_bytes} of {self.arena.capacity_bytes} bytes are leased",
                retry_after_ms=self._wait_ms,
            ) from None

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
