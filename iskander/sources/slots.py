"""Slots of reader processes, shared fairly by the callers.

The last free slot is for a caller without any, so a caller with many open reads delays its own
further ones. Waiting callers take turns, and the last eighth of the waiting places is for callers
with less than an eighth of them.

Runs on: gateway loop. Does no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator
from typing import Final

from iskander.auth.source import Source

SHARE: Final = 8


class SlotsFull(Exception):
    """No place to wait for a slot is free, or no slot was free in time.

    Attributes:
        waiting: Number of waiting calls.
        is_late: Whether the call waited.
    """

    def __init__(self, waiting: int, *, is_late: bool) -> None:
        super().__init__()
        self.waiting = waiting
        self.is_late = is_late


class FairSlots:
    """A number of slots, and of places to wait for them.

    Attributes:
        waiting: Number of waiting calls.
    """

    def __init__(self, count: int, waiting_max: int) -> None:
        self._count = self._free = count
        self._waiting_max = waiting_max
        self._held: Counter[str | int] = Counter()
        # By caller; the first one has its turn.
        self._queues: dict[str | int, deque[asyncio.Future[None]]] = {}
        self.waiting = 0

    def resize(self, count: int) -> None:
        """Change the number of slots; calls that hold one above a lower number keep it."""
        self._free += count - self._count
        self._count = count
        self._serve()

    @contextlib.asynccontextmanager
    async def hold(self, source: Source, wait_s: float) -> AsyncIterator[None]:
        """Hold a slot; wait for it in turn.

        Raises:
            SlotsFull: There is no place to wait, or no slot within `wait_s`.
        """
        caller = source.tenant or source.connection
        if self._queues or not self._is_free_for(caller):
            await self._wait(caller, wait_s)
        else:
            self._take(caller)
        try:
            yield
        finally:
            self._release(caller)

    async def _wait(self, caller: str | int, wait_s: float) -> None:
        share = self._waiting_max // SHARE
        queue = self._queues.get(caller, deque())
        limit = self._waiting_max - (share if len(queue) >= share else 0)
        if self.waiting >= limit:
            raise SlotsFull(self.waiting, is_late=False)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._queues[caller] = queue
        self.waiting += 1
        try:
            # A new caller may have a slot that the earlier ones must not take.
            self._serve()
            async with asyncio.timeout(wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release(caller)
            else:
                self._leave(caller, turn)
            if isinstance(error, TimeoutError):
                raise SlotsFull(self.waiting, is_late=True) from None
            raise

    def _serve(self) -> None:
        """Give free slots to waiting callers, in turn."""
        while (caller := next(filter(self._is_free_for, self._queues), None)) is not None:
            queue = self._queues.pop(caller)
            turn = queue.popleft()
            self.waiting -= 1
            if queue:
                self._queues[caller] = queue
            if not turn.cancelled():  # Its call was cancelled, but has not run since.
                self._take(caller)
                turn.set_result(None)

    def _leave(self, caller: str | int, turn: asyncio.Future[None]) -> None:
        queue = self._queues.get(caller, deque())
        if turn in queue:
            queue.remove(turn)
            self.waiting -= 1
            if not queue:
                del self._queues[caller]

    def _is_free_for(self, caller: str | int) -> bool:
        reserved = 1 if self._held[caller] and self._count > 1 else 0
        return self._free > reserved

    def _take(self, caller: str | int) -> None:
        self._free -= 1
        self._held[caller] += 1

    def _release(self, caller: str | int) -> None:
        self._free += 1
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        self._serve()
