"""Allocates ranges of a segment: leases of any size, first fit, each with a generation.

    offset 0                                                        capacity
    | lease g7 | free | lease g9        | free                            |

First fit from the low end gives a lightly loaded server the same few addresses, so that a worker
reuses its I/O bindings for them. A returned lease is merged with its free neighbours at once. Pure:
counts bytes and accesses none.

Runs on: gateway loop, which leases memory for the inputs that it writes and for results.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from iskander.errors import SegmentError

GRAIN_BYTES: Final = 4096
"""Lease sizes are multiples of this, so that requests of similar size share addresses."""


def usable_bytes(segment_bytes: int) -> int:
    """Return the capacity of an arena in a segment: whole grains."""
    return segment_bytes // GRAIN_BYTES * GRAIN_BYTES


class Lease:
    """Right to a range of a segment; the generation is never used twice.

    Attributes:
        holders: Number of calls of `give_back` after which the range is free.
    """

    __slots__ = ("generation", "holders", "length_bytes", "offset")

    def __init__(self, offset: int, length_bytes: int, generation: int) -> None:
        self.offset = offset
        self.length_bytes = length_bytes
        self.generation = generation
        self.holders = 1


class Arena:
    """Leases of one segment of fixed length."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = usable_bytes(capacity_bytes)
        self.leased_bytes = 0
        self._generation = 0
        self._live: dict[int, Lease] = {}
        # Free ranges in parallel lists, sorted by start and never adjacent.
        self._free_starts = [0]
        self._free_lengths = [self.capacity_bytes]

    def __repr__(self) -> str:
        return (
            f"<Arena {self.leased_bytes}/{self.capacity_bytes} bytes in {len(self._live)} leases, "
            f"{len(self._free_starts)} free ranges>"
        )

    def __len__(self) -> int:
        return len(self._live)

    def lease(self, length_bytes: int) -> Lease | None:
        """Allocate a range; return None while no free range is long enough."""
        self.require_fits(length_bytes)
        length = max(length_bytes + GRAIN_BYTES - 1, GRAIN_BYTES) // GRAIN_BYTES * GRAIN_BYTES
        for index, free in enumerate(self._free_lengths):  # noqa: B007 - it is used below
            if free >= length:
                break
        else:
            return None
        start = self._free_starts[index]
        if free == length:
            del self._free_starts[index], self._free_lengths[index]
        else:
            self._free_starts[index] = start + length
            self._free_lengths[index] = free - length
        self._generation += 1
        lease = self._live[start] = Lease(start, length, self._generation)
        self.leased_bytes += length
        return lease

    def require_fits(self, length_bytes: int) -> None:
        """Raise `SegmentError` for a length above the capacity; waiting for it would never end."""
        if not length_bytes <= self.capacity_bytes or not self.capacity_bytes:
            raise SegmentError(
                f"{length_bytes} bytes can never fit an arena of {self.capacity_bytes} bytes"
            )

    def is_live(self, lease: Lease) -> bool:
        """Return whether a lease has not been given back."""
        return self._live.get(lease.offset) is lease

    def give_back(self, lease: Lease) -> None:
        """Release a range for one of its holders; a stale lease is an error.

        After the last holder, the range is free and is merged with its free neighbours.
        """
        if self._live.get(lease.offset) is not lease:
            raise SegmentError(f"lease {lease.generation} is stale: it was given back before")
        lease.holders -= 1
        if lease.holders:
            return
        del self._live[lease.offset]
        self.leased_bytes -= lease.length_bytes
        start, length = lease.offset, lease.length_bytes
        starts, lengths = self._free_starts, self._free_lengths
        index = bisect_left(starts, start)
        is_before_free = index < len(starts) and starts[index] == start + length
        is_behind_free = index > 0 and starts[index - 1] + lengths[index - 1] == start
        if is_before_free and is_behind_free:
            lengths[index - 1] += length + lengths[index]
            del starts[index], lengths[index]
        elif is_before_free:
            starts[index] = start
            lengths[index] += length
        elif is_behind_free:
            lengths[index - 1] += length
        else:
            starts.insert(index, start)
            lengths.insert(index, length)

    def validate(self) -> None:
        """Assert that leases and free ranges tile the arena without overlap; for tests."""
        free = zip(self._free_starts, self._free_lengths, strict=True)
        ranges = [(start, length, False) for start, length in free]
        ranges += [(lease.offset, lease.length_bytes, True) for lease in self._live.values()]
        end, was_free = 0, False
        for start, length, is_lease in sorted(ranges):
            assert start == end, f"gap or overlap at {start}"
            assert length > 0 and start % GRAIN_BYTES == 0
            assert is_lease or not was_free, f"free ranges touch at {start}"
            end, was_free = start + length, not is_lease
        assert end == self.capacity_bytes
        assert self.leased_bytes == sum(lease.length_bytes for lease in self._live.values())
