"""Memory limit for received bytes over all connections and protocols of this process.

The charge covers partial messages, unread messages, messages in decompression, and responses that
the client does not read. Large messages stay charged until their memory is freed. Above the limit,
connections with the largest product of bytes and age reject messages with a retryable error. A
message larger than a flow-control window first waits until its whole length is reserved. A share of
the limit is exempt from reservations, so small requests are always received.

Runs on: gateway loop; `TrackedArray` is freed by any thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.gateway.transport.limits.allocator import MMAP_THRESHOLD_BYTES
from iskander.interprocess.memory.segment import private_pages

RESERVE_SHARE: Final = 8
"""1/8 of the limit is exempt from reservations."""
HOLDER_SHARE: Final = 2
"""One holder reserves at most 1/2 of the limit, or one message."""
LOW_WATER_SHARE: Final = 16
"""Above the limit, memory is freed until 1/16 of it is free."""
EVICT_RETRY_NS: Final = 10 * NS_PER_MS
"""Pause after an eviction that freed too little."""
STALL_NS_UNDER_PRESSURE: Final = 2 * NS_PER_S
"""Maximum lag of a message behind the minimum rate while others wait for memory."""
MESSAGE_RATE_MIN: Final = 500
"""Bytes/s. The default of Apache's mod_reqtimeout for request bodies."""
EXCESS_BYTES: Final = 16 << 20
"""Fall of the peak after which the heap is trimmed."""
QUIET_SHARE: Final = 16
"""Fall of the bytes charged in an interval after which the heap is trimmed."""
TICK_S: Final = 0.01
"""Interval of the retries of waiting reservations."""
TRACKED_BYTES_MIN: Final = 65_536
"""Smaller messages are charged until they are read; larger ones until they are freed."""


class Holder(Protocol):
    """An owner of charged bytes, such as a connection."""

    def evictable(self, now_ns: int) -> float:
        """Return the sum of bytes times age in ns that `evict` can free."""

    def evict(self) -> bool:
        """Reject messages or end a connection to free charged bytes; return whether it did."""

    def evict_stalled(self, now_ns: int, stall_ns: int) -> None:
        """Reject partial messages `stall_ns` behind the minimum rate."""


class Reservation(Protocol):
    """A message that waits until its memory is reserved."""

    def on_reserved(self) -> None:
        """Continue the message: its memory is reserved."""


class TrackedArray(np.ndarray):
    """Byte array that stays charged until its last view is freed."""

    freed: deque[int] | None = None  # Receives `charged_bytes`; None in a view.
    charged_bytes = 0

    def __del__(self) -> None:
        """Queue the release for the loop."""
        if self.freed is not None:
            self.freed.append(self.charged_bytes)


class ReceiveBudget:
    """The receive budget of one process; `refused` counts calls of `evict`."""

    def __init__(self, limit_bytes: int) -> None:
        self.holders: set[Holder] = set()
        self.evictions = 0
        self._used = self._peak = self._recent_peak = 0
        self._turnover = self._turnover_peak = 0
        self._freed: deque[int] = deque()
        self._reserved: dict[object, int] = {}
        self._waiting: dict[Reservation, tuple[object, int]] = {}
        self._evict_again_ns = self._evict_stalled_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self.set_limit(limit_bytes)

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit; received bytes above a lower one stay until more are received."""
        self.limit_bytes = limit_bytes
        self._reservable = limit_bytes - limit_bytes // RESERVE_SHARE
        self._reserve_waiting()

    @property
    def used_bytes(self) -> int:
        """Bytes charged."""
        self._apply_freed()
        return self._used

    def charge(self, size: int) -> None:
        """Charge bytes; above the limit, make holders free memory."""
        self._used += size
        self._turnover += size
        self._recent_peak = max(self._recent_peak, self._used)
        if self._used > self.limit_bytes:
            self._free_excess()

    def release(self, size: int) -> None:
        """Release charged bytes."""
        self._used -= size
        if self._waiting:
            self._reserve_waiting()

    def try_charge(self, size: int) -> bool:
        """Charge bytes if that stays within the limit; return whether it did."""
        if self.used_bytes + size > self.limit_bytes:
            return False
        self.charge(size)
        return True

    def reserve(self, holder: object, message: Reservation, size: int) -> bool:
        """Reserve the rest of a large message; return whether it was possible at once.

        If not, `message.on_reserved` is called later.
        """
        if not self._waiting and self._can_reserve(holder, size):
            self._reserve(holder, size)
            return True
        self._waiting[message] = (holder, size)
        self._start_timer()
        return False

    def end_reservation(self, holder: object, message: Reservation, size: int) -> None:
        """End the reservation of `size` bytes for a complete or abandoned message, or its wait.

        Received bytes stay charged; the caller releases the rest.
        """
        self._waiting.pop(message, None)
        left = self._reserved.get(holder, 0) - size
        if left > 0:
            self._reserved[holder] = left
        else:
            self._reserved.pop(holder, None)
        self._reserve_waiting()

    def array(self, size: int) -> TrackedArray:
        """Allocate a message buffer that releases its `charged_bytes` when freed.

        Not cleared: unwritten pages use no memory.
        """
        array: TrackedArray = message_memory(size).view(TrackedArray)
        array.freed = self._freed
        return array

    def charged_array(self, size: int) -> TrackedArray | None:
        """Allocate and charge a buffer; return None if that exceeds the limit."""
        if not self.try_charge(size):
            return None
        array = self.array(size)
        array.charged_bytes = size
        return array

    def shrink(self, array: TrackedArray, size: int) -> None:
        """Reduce the charge of an array to its written bytes."""
        excess, array.charged_bytes = array.charged_bytes - size, size
        self.release(excess)

    def has_excess(self) -> bool:
        """Return whether memory has become free since the last call, which is made in intervals.

        Either the peak is `EXCESS_BYTES` below the previous peak. Or much less is charged than in
        an earlier interval: small messages need little at a time, and work on them leaves gaps.
        """
        self._peak = max(self._peak, self._recent_peak)
        is_lower = self._peak - self._recent_peak >= EXCESS_BYTES
        if is_lower:
            self._peak = self._recent_peak
        self._recent_peak = self.used_bytes
        self._turnover_peak = max(self._turnover_peak, self._turnover)
        is_quiet = self._turnover * QUIET_SHARE < self._turnover_peak >= EXCESS_BYTES
        if is_quiet:
            self._turnover_peak = self._turnover
        self._turnover = 0
        return is_lower or is_quiet

    def _can_reserve(self, holder: object, size: int) -> bool:
        reserved = self._reserved.get(holder, 0)
        if reserved and reserved + size > self.limit_bytes // HOLDER_SHARE:
            return False
        return self.used_bytes + size <= self._reservable

    def _reserve(self, holder: object, size: int) -> None:
        self._reserved[holder] = self._reserved.get(holder, 0) + size
        self.charge(size)

    def _reserve_waiting(self) -> None:
        """Reserve memory for waiting messages; the holder with the fewest reserved bytes first."""
        while self._waiting:
            reserved = self._reserved
            message = min(self._waiting, key=lambda each: reserved.get(self._waiting[each][0], 0))
            holder, size = self._waiting[message]
            if not self._can_reserve(holder, size):
                return
            del self._waiting[message]
            self._reserve(holder, size)
            message.on_reserved()

    def _free_excess(self) -> None:
        """Above the limit, let holders free memory to the low-water mark, the largest first."""
        self._apply_freed()
        now = now_ns()
        if self._used <= self.limit_bytes or now < self._evict_again_ns:
            return
        target = self.limit_bytes - self.limit_bytes // LOW_WATER_SHARE
        holders = sorted(self.holders, key=lambda holder: holder.evictable(now), reverse=True)
        for holder in holders:
            while self._used > target and holder.evict():
                self.evictions += 1
                self._apply_freed()
            if self._used <= target:
                return
        self._evict_again_ns = now + EVICT_RETRY_NS

    def _tick(self) -> None:
        """While messages wait: reserve freed memory and evict stalled messages."""
        self._timer = None
        now = now_ns()
        self._apply_freed()
        if now >= self._evict_stalled_ns:
            self._evict_stalled_ns = now + NS_PER_S
            for holder in list(self.holders):
                holder.evict_stalled(now, STALL_NS_UNDER_PRESSURE)
        self._reserve_waiting()
        if self._waiting:
            self._start_timer()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _apply_freed(self) -> None:
        """Release the charges of freed arrays."""
        freed = self._freed
        for _ in range(len(freed)):
            self._used -= freed.popleft()


def progress_ns(last_ns: int, now_ns: int, count: int) -> int:
    """Advance `last_ns` by the time that `count` bytes take at the minimum rate, at most to now."""
    return min(now_ns, last_ns + count * (NS_PER_S // MESSAGE_RATE_MIN))


def message_memory(size: int) -> npt.NDArray[np.uint8]:
    """Allocate memory for a message, not cleared and not charged.

    Large blocks get small pages: NumPy requests huge pages, and clearing them blocks the loop.
    """
    if size < MMAP_THRESHOLD_BYTES:
        return np.empty(size, np.uint8)
    return np.frombuffer(private_pages(size), np.uint8)
