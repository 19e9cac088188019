"""The memory that received bytes may take, over all connections and protocols of this process.

Every byte that was received and not yet processed is charged here: half-received messages, messages
that no handler has read, messages being decompressed, and responses that a client does not read.
Above the limit, the half-received or unread messages that took most memory for the longest time are
refused, with an error that may be retried. Messages larger than a flow-control window reserve their
whole length first and wait for it; a share of the limit is kept for all others, so small requests
are received whatever is reserved.

The memory of a large message is charged until it is freed, wherever it went.

Runs on: gateway loop; `TrackedArray` is freed by any thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from iskander.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.memory.segment import private_pages
from iskander.transport.allocator import MMAP_THRESHOLD_BYTES

RESERVE_SHARE: Final = 8
"""One part in so many of the limit is not for reservations."""
HOLDER_SHARE: Final = 2
"""One holder may reserve one part in so many of the limit; one message, always."""
LOW_WATER_SHARE: Final = 16
"""Above the limit, memory is freed until one part in so many of it is free."""
SHED_AGAIN_NS: Final = 10 * NS_PER_MS
"""After nothing could be freed."""
STALL_WAITED_NS: Final = 2 * NS_PER_S
"""A message that falls so far behind its slowest rate is refused while others wait for memory."""
MESSAGE_RATE_MIN: Final = 500
"""Bytes/s. The default of Apache's mod_reqtimeout for request bodies."""
EXCESS_BYTES: Final = 16 << 20
TICK_S: Final = 0.01
TRACKED_BYTES_MIN: Final = 65_536
"""Smaller messages are charged until they are read; larger ones until they are freed."""


class Holder(Protocol):
    """A connection that holds received bytes."""

    def held(self, now_ns: int) -> float:
        """What it holds and could free, in bytes times nanoseconds."""

    def shed(self) -> bool:
        """Refuse one call's messages and free their memory; return whether there were any."""

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Refuse the half-received messages that made no progress for so long."""


class Reservation(Protocol):
    """A message that waits until its memory is reserved."""

    def on_reserved(self) -> None:
        """The memory is reserved."""


class TrackedArray(np.ndarray):
    """Bytes whose charge ends when the last view of them is gone."""

    freed: deque[int] | None = None
    charged_bytes = 0

    def __del__(self) -> None:
        """Note the end; the budget reads the notes on the loop."""
        if self.freed is not None:
            self.freed.append(self.charged_bytes)


class ReceiveBudget:
    """The budget of one process.

    Args:
        limit_bytes: Of everything that is charged.

    Attributes:
        holders: The connections that are asked to free memory.
        refused: Messages that were refused for want of memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.holders: set[Holder] = set()
        self.refused = 0
        self._used = self._peak = self._recent_peak = 0
        self._freed: deque[int] = deque()
        self._reservable = limit_bytes - limit_bytes // RESERVE_SHARE
        self._reserved: dict[object, int] = {}
        self._waiting: dict[Reservation, tuple[object, int]] = {}
        self._shed_again_ns = self._evict_ns = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def used_bytes(self) -> int:
        """What is charged now."""
        self._read_freed()
        return self._used

    @property
    def is_waited_for(self) -> bool:
        """Whether a message waits for memory."""
        return bool(self._waiting)

    def charge(self, size: int) -> None:
        """Count received bytes; where they are over the limit, have the largest holders free some.

        Args:
            size: Bytes.
        """
        self._used += size
        self._recent_peak = max(self._recent_peak, self._used)
        if self._used > self.limit_bytes:
            self._shed()

    def release(self, size: int) -> None:
        """Count bytes no longer."""
        self._used -= size
        if self._waiting:
            self._grant()

    def take(self, size: int) -> bool:
        """Charge bytes where that stays within the limit; return whether it did."""
        if self.used_bytes + size > self.limit_bytes:
            return False
        self.charge(size)
        return True

    def give_back(self, size: int) -> None:
        """Count bytes no longer that `take` has counted."""
        self.release(size)

    def reserve(self, holder: object, message: Reservation, size: int) -> bool:
        """Charge the rest of a large message before it comes.

        Args:
            holder: Whose message it is.
            message: Told when the memory is there, where it is not at once.
            size: Bytes that have not come.

        Returns:
            Whether the memory is reserved.
        """
        if not self._waiting and self._fits(holder, size):
            self._reserve(holder, size)
            return True
        self._waiting[message] = (holder, size)
        self._wait()
        return False

    def end_reservation(self, holder: object, message: Reservation, size: int) -> None:
        """A large message has come, or will not: `size` of what was reserved is not held any more.

        The charge of what did come goes on; the rest is released by the caller.
        """
        self._waiting.pop(message, None)
        left = self._reserved.get(holder, 0) - size
        if left > 0:
            self._reserved[holder] = left
        else:
            self._reserved.pop(holder, None)
        self._grant()

    def array(self, size: int) -> TrackedArray:
        """Memory for a message, of which `charged_bytes` are released when it is freed.

        Not cleared: pages that nothing was written to take no memory.
        """
        array: TrackedArray = message_memory(size).view(TrackedArray)
        array.freed = self._freed
        return array

    def charged_array(self, size: int) -> TrackedArray | None:
        """Memory that is charged at once; None where that is over the limit."""
        if not self.take(size):
            return None
        array = self.array(size)
        array.charged_bytes = size
        return array

    def shrink(self, array: TrackedArray, size: int) -> None:
        """Charge an array for so many bytes only, since no more were written to."""
        excess, array.charged_bytes = array.charged_bytes - size, size
        self.release(excess)

    def has_excess(self) -> bool:
        """Whether the heap keeps memory that is not needed any more; begins a new period.

        That is so where much less was charged since the last call than at the highest point since
        it was last said. Steady traffic keeps its blocks.
        """
        self._peak = max(self._peak, self._recent_peak)
        has_excess = self._peak - self._recent_peak >= EXCESS_BYTES
        if has_excess:
            self._peak = self._recent_peak
        self._recent_peak = self.used_bytes
        return has_excess

    def _fits(self, holder: object, size: int) -> bool:
        held = self._reserved.get(holder, 0)
        if held and held + size > self.limit_bytes // HOLDER_SHARE:
            return False
        return self.used_bytes + size <= self._reservable

    def _reserve(self, holder: object, size: int) -> None:
        self._reserved[holder] = self._reserved.get(holder, 0) + size
        self.charge(size)

    def _grant(self) -> None:
        """Reserve for those that wait: those of the holder first that has reserved least."""
        while self._waiting:
            reserved = self._reserved
            message = min(self._waiting, key=lambda each: reserved.get(self._waiting[each][0], 0))
            holder, size = self._waiting[message]
            if not self._fits(holder, size):
                return
            del self._waiting[message]
            self._reserve(holder, size)
            message.on_reserved()

    def _shed(self) -> None:
        """Have holders free memory, down to a mark below the limit; not again at once in vain."""
        self._read_freed()
        now = now_ns()
        if self._used <= self.limit_bytes or now < self._shed_again_ns:
            return
        target = self.limit_bytes - self.limit_bytes // LOW_WATER_SHARE
        holders = sorted(self.holders, key=lambda holder: holder.held(now), reverse=True)
        for holder in holders:
            while self._used > target and holder.shed():
                self.refused += 1
                self._read_freed()
            if self._used <= target:
                return
        self._shed_again_ns = now + SHED_AGAIN_NS

    def _tick(self) -> None:
        """While messages wait for memory: reserve what was freed, and end those that stall."""
        self._timer = None
        now = now_ns()
        self._read_freed()
        if now >= self._evict_ns:
            self._evict_ns = now + NS_PER_S
            for holder in list(self.holders):
                holder.evict_stalled(now, STALL_WAITED_NS)
        self._grant()
        if self._waiting:
            self._wait()

    def _wait(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _read_freed(self) -> None:
        freed = self._freed
        count = len(freed)
        for _ in range(count):
            self._used -= freed.popleft()


def progress_ns(last_ns: int, now_ns: int, count: int) -> int:
    """The time up to which a message has come at its slowest rate, once more bytes of it came.

    A client that sends one byte at a time, to hold a call open, falls behind.

    Args:
        last_ns: The time before these bytes.
        now_ns: The upper bound.
        count: Bytes.
    """
    return min(now_ns, last_ns + count * (NS_PER_S // MESSAGE_RATE_MIN))


def message_memory(size: int) -> npt.NDArray[np.uint8]:
    """Memory for a message, not cleared and not charged.

    A block that malloc would map anew has small pages: NumPy asks for huge ones, and a read on the
    loop would wait while they are cleared.
    """
    if size < MMAP_THRESHOLD_BYTES:
        return np.empty(size, np.uint8)
    return np.frombuffer(private_pages(size), np.uint8)
