"""Slots of reader processes, shared fairly by the callers.

A caller leaves a share of the slots to others, so one with many open reads delays its own further
ones. Waiting callers take turns, and a slot that makes no progress is taken from a caller with more
slots. A share of the waiting places is for callers with few of them.

Runs on: gateway loop. Does no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Protocol

from iskander.foundation.clock import now_ns
from iskander.gateway.auth.shares import Shares, may_take
from iskander.gateway.auth.source import Source

CHECK_S: Final = 0.25
"""Interval of the search for a slot without progress, while calls wait."""


class Held(Protocol):
    """What holds a slot."""

    @property
    def stalled_since_ns(self) -> int:
        """Start of the time without progress; 0 while there is progress."""

    def give_way(self) -> None:
        """End, because its slot was taken back."""


class _Slot:
    """A slot in use."""

    __slots__ = ("held",)

    def __init__(self, held: Held | None) -> None:
        self.held = held


def _stalled_since(slot: _Slot) -> int:
    return 0 if slot.held is None else slot.held.stalled_since_ns


def _give_way(slot: _Slot) -> None:
    assert slot.held is not None, "a slot without an owner never stalls"
    slot.held.give_way()


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
        self._count = count
        self._waiting_max = waiting_max
        self._shares: Shares[_Slot] = Shares(_stalled_since, _give_way)
        # Waiting reads by caller, with the holder of each slot to come; the first caller is next.
        self._queues: dict[str | int, deque[tuple[asyncio.Future[_Slot], Held | None]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.waiting = 0

    def resize(self, count: int) -> None:
        """Change the number of slots; calls that hold one above a lower number keep it."""
        self._count = count
        self._serve()

    @contextlib.asynccontextmanager
    async def hold(
        self, source: Source, wait_s: float, held: Held | None = None
    ) -> AsyncIterator[None]:
        """Hold a slot; wait for it in turn.

        Args:
            source: Source of the call.
            wait_s: Limit of the wait.
            held: Ends if the slot is taken back; None: it is not.

        Raises:
            SlotsFull: There is no place to wait, or no slot within `wait_s`.
        """
        caller = source.tenant or source.connection
        if self._queues or not self._is_free_for(caller):
            slot = await self._wait(caller, wait_s, held)
        else:
            slot = self._take(caller, held)
        try:
            yield
        finally:
            self._release(slot)

    async def _wait(self, caller: str | int, wait_s: float, held: Held | None) -> _Slot:
        queue = self._queues.get(caller, deque())
        if not may_take(self._waiting_max, self.waiting, len(queue)):
            raise SlotsFull(self.waiting, is_late=False)
        turn: asyncio.Future[_Slot] = asyncio.get_running_loop().create_future()
        queue.append((turn, held))
        self._queues[caller] = queue
        self.waiting += 1
        try:
            # A new caller may have a slot that the earlier ones must not take.
            self._serve()
            self._take_back()
            async with asyncio.timeout(wait_s):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._leave(caller, turn)
            if isinstance(error, TimeoutError):
                raise SlotsFull(self.waiting, is_late=True) from None
            raise

    def _serve(self) -> None:
        """Give free slots to waiting callers, in turn."""
        while (caller := next(filter(self._is_free_for, self._queues), None)) is not None:
            queue = self._queues.pop(caller)
            turn, held = queue.popleft()
            self.waiting -= 1
            if queue:
                self._queues[caller] = queue
            if not turn.cancelled():  # Its call was cancelled, but has not run since.
                turn.set_result(self._take(caller, held))

    def _take_back(self) -> None:
        """While calls wait, take slots without progress from callers with more of them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._queues:
            return
        fewest = min(map(self._shares.count, self._queues))
        if len(self._shares) <= self._count and self._shares.take_back(now_ns(), above=fewest):
            self._serve()
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._take_back)

    def _leave(self, caller: str | int, turn: asyncio.Future[_Slot]) -> None:
        queue = self._queues.get(caller, deque())
        for entry in queue:
            if entry[0] is turn:
                queue.remove(entry)
                self.waiting -= 1
                break
        if not queue:
            self._queues.pop(caller, None)

    def _is_free_for(self, caller: str | int) -> bool:
        used, own = len(self._shares), self._shares.count(caller)
        return may_take(self._count, used, own, shared_from=0)

    def _take(self, caller: str | int, held: Held | None) -> _Slot:
        slot = _Slot(held)
        self._shares.add(caller, slot)
        return slot

    def _release(self, slot: _Slot) -> None:
        self._shares.remove(slot)
        self._serve()
