"""Memory of large messages: charge until freed, and page size."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from iskander.gateway.transport.limits.allocator import MMAP_THRESHOLD_BYTES
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget, TrackedArray

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 5 * MIB, MMAP_THRESHOLD_BYTES])
def test_memory_is_charged_until_its_last_view_is_freed(size: int) -> None:
    budget = ReceiveBudget(1 << 30)
    array = budget.charged_array(size)
    assert array is not None
    view = array.data
    view[:] = bytes([7]) * size
    del array
    assert budget.used_bytes == size
    assert view[0] == view[-1] == 7
    del view
    assert budget.used_bytes == 0


class Message:
    """A large message that waits for its memory."""

    is_reserved = False

    def on_reserved(self) -> None:
        self.is_reserved = True


def test_higher_limit_admits_a_waiting_message_at_once() -> None:
    async def run() -> None:
        budget, message = ReceiveBudget(8 * MIB), Message()
        assert budget.reserve("first", Message(), 6 * MIB)
        assert not budget.reserve("second", message, 6 * MIB)
        budget.set_limit(16 * MIB)
        assert message.is_reserved and budget.used_bytes == 12 * MIB
        if budget._timer is not None:
            budget._timer.cancel()

    asyncio.run(run())


def test_lower_limit_rejects_the_next_bytes_and_keeps_those_received() -> None:
    budget = ReceiveBudget(8 * MIB)
    array = budget.charged_array(6 * MIB)
    budget.set_limit(4 * MIB)
    assert array is not None and budget.used_bytes == 6 * MIB
    assert not budget.try_charge(1)
    del array
    assert budget.try_charge(4 * MIB) and not budget.try_charge(1)


def test_newly_mapped_memory_has_small_pages() -> None:
    """Clearing a huge page blocks the event loop."""
    array = ReceiveBudget(1 << 30).array(2 * MMAP_THRESHOLD_BYTES)
    array[:] = 1
    assert huge_bytes(array) == 0


def huge_bytes(array: TrackedArray) -> int:
    """Returns the huge-page bytes of the array's mapping. Source: proc(5), `smaps`."""
    address = array.ctypes.data
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, stop = (int(part, 16) for part in first.split("-"))
            is_inside = start <= address < stop
        elif is_inside and first == "AnonHugePages:":
            return int(rest.split()[0]) * 1024
    raise AssertionError("the array is in no mapping")


def test_free_memory_is_noticed_after_a_high_peak_and_after_much_work() -> None:
    """A second look at an idle server finds nothing, so its heap is trimmed once."""
    budget = ReceiveBudget(1 << 30)
    assert not budget.has_excess()
    budget.charge(64 << 20)
    assert not budget.has_excess()
    budget.release(64 << 20)
    # The peak of the last interval is that of its begin.
    assert [budget.has_excess() for _ in range(4)] == [True, True, False, False]
    for _ in range(100):  # Small messages, one after the other.
        budget.charge(1 << 20)
        budget.release(1 << 20)
    assert [budget.has_excess() for _ in range(3)] == [False, True, False]
    for _ in range(100):
        budget.charge(1 << 10)
        budget.release(1 << 10)
    assert [budget.has_excess() for _ in range(3)] == [False] * 3
