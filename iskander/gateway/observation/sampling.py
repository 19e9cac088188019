"""Decision which requests are sampled, from an id that all consumers of a sample know.

An id has 16 bytes: that of the caller's trace, or one that is made here. A consumer with a share
takes the ids whose hash is below its threshold, so a smaller share is a part of a larger one.

Pure. Source: splitmix64, the finalizer of `java.util.SplittableRandom`.
"""

from __future__ import annotations

from typing import Final

BITS: Final = 64
_MASK: Final = (1 << BITS) - 1


def threshold_of(share: float) -> int:
    """Number of hashes below which an id is within a share of 0 to 1."""
    return int(share * (1 << BITS))


def request_id(salt: int, arrived_ns: int, identity: int) -> int:
    """Make an id that stays the same while a request is in memory, also between its batches.

    Args:
        salt: Random number of the process.
        arrived_ns: Arrival of the request.
        identity: Number that no other request in memory has.
    """
    low = mix(salt ^ mix(arrived_ns) ^ identity)
    return mix(low ^ salt) << BITS | low


def is_within(id_number: int, threshold: int) -> bool:
    """Whether an id is within a share."""
    return mix(id_number & _MASK) < threshold


def mix(value: int) -> int:
    """Hash 64 bits to 64 bits; ids of traces need not be random."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
