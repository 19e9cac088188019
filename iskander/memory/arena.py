"""Which range of a segment is whose: leases of any size, first fit, each with a generation.

    offset 0                                                        capacity
    | lease g7 | free | lease g9        | free                            |

First fit from the low end keeps a quiet server on the same few addresses, so that a worker finds
the I/O bindings that it has made for them. A lease given back is joined with its free neighbours
at once. Pure: it counts bytes and touches none of them.

Runs on: gateway loop, which leases both the inputs that it writes and the room for results.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from iskander.errors import SegmentError

GRAIN_BYTES: Final = 4096
"""Leases are multiples of this: requests of nearly one size meet at one address."""


def usable_bytes(segment_bytes: int) -> int:
    """What an arena makes of a segment: whole grains."""
    return segment_bytes // GRAIN_BYTES * GRAIN_BYTES


class Lease:
    """The right to one range until it is given back.

    Args:
        offset: Where the range begins, in bytes from the segment's start.
        length_bytes: Its length, a multiple of the grain.
        generation: Never used twice, so that one can be told from another of the same range.
    """

    __slots__ = ("generation", "length_bytes", "offset")

    def __init__(self, offset: int, length_bytes: int, generation: int) -> None:
        self.offset = offset
        self.length_bytes = length_bytes
        self.generation = generation


class Arena:
    """The leases over one segment.

    Args:
        capacity_bytes: Length of the segment; a ceiling for good.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = usable_bytes(capacity_bytes)
        self.leased_bytes = 0
        self._generation = 0
        self._live: dict[int, Lease] = {}
        # Parallel lists, sorted by start: the free ranges. Never two that touch.
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
        """Take a range, or None where no free range is long enough now.

        Raises:
            SegmentError: No empty arena of this capacity could hold it.
        """
        self.require_fits(length_bytes)
        wanted = max(length_bytes + GRAIN_BYTES - 1, GRAIN_BYTES) // GRAIN_BYTES * GRAIN_BYTES
        for index, free in enumerate(self._free_lengths):  # noqa: B007 - it is used below
            if free >= wanted:
                break
        else:
            return None
        start = self._free_starts[index]
        if free == wanted:
            del self._free_starts[index], self._free_lengths[index]
        else:
            self._free_starts[index] = start + wanted
            self._free_lengths[index] = free - wanted
        self._generation += 1
        lease = Lease(start, wanted, self._generation)
        self._live[start] = lease
        self.leased_bytes += wanted
        return lease

    def require_fits(self, length_bytes: int) -> None:
        """Refuse what could wait for ever.

        Raises:
            SegmentError: No empty arena of this capacity could hold it.
        """
        if not length_bytes <= self.capacity_bytes or not self.capacity_bytes:
            raise SegmentError(
                f"{length_bytes} bytes can never fit an arena of {self.capacity_bytes}"
            )

    def is_live(self, lease: Lease) -> bool:
        """Whether the lease has not been given back."""
        return self._live.get(lease.offset) is lease

    def give_back(self, lease: Lease) -> None:
        """Return a range, and join it with its free neighbours.

        Raises:
            SegmentError: The lease is stale: its range is free or somebody else's by now.
        """
        if self._live.get(lease.offset) is not lease:
            raise SegmentError(f"lease {lease.generation} was given back before")
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
        ranges = sorted(
            [(lease.offset, lease.length_bytes, True) for lease in self._live.values()]
            + [
                (start, length, False)
                for start, length in zip(self._free_starts, self._free_lengths, strict=True)
            ]
        )
        end, was_free = 0, False
        for start, length, is_lease in ranges:
            assert start == end, f"gap or overlap at {start}"
            assert length > 0 and start % GRAIN_BYTES == 0
            assert is_lease or not was_free, f"free ranges touch at {start}"
            end, was_free = start + length, not is_lease
        assert end == self.capacity_bytes
        assert self.leased_bytes == sum(lease.length_bytes for lease in self._live.values())
