"""Layout of strings in a body, and conversion of string columns.

    body    values and offsets of every column (`body_layout`) | bytes of one column | bytes ...

A column of strings has a buffer of int32 offsets among the other columns; its bytes follow all
columns. The last offset is the number of bytes, so messages do not repeat this number. Offsets are
as in Arrow: string i is the bytes from offset i to offset i + 1; the first may be above 0.

Pure. Runs on: gateway and workers.

Source: Arrow columnar format 1.5, "Variable-size Binary Layout".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.tensors import ALIGNMENT, TensorSpec
from iskander.errors import LimitExceeded

COLUMN_BYTES_MAX: Final = (1 << 31) - 1
"""Maximum bytes of the strings of one column, from their int32 offsets."""

Body = bytes | bytearray | memoryview

_OFFSET = struct.Struct("<i")


def string_lengths(
    specs: tuple[TensorSpec, ...], rows: int, body: Body, layout: list[int]
) -> list[int]:
    """Return the bytes of each column of strings, from its last offset.

    `rows` is at least 1, and `body` reaches at least to the end of the offsets in `layout`.
    """
    return [
        _OFFSET.unpack_from(body, offset + rows * spec.elements * OFFSET_BYTES)[0]
        for spec, offset in zip(specs, layout, strict=True)
        if spec.is_string
    ]


def string_ranges(
    specs: tuple[TensorSpec, ...], rows: int, lengths: list[int], layout: list[int]
) -> tuple[list[tuple[int, int]], int]:
    """Return the bounds in a body of each string column with these lengths, and the body's end.

    Layout:
        Columns in the contract's order after all of `layout`, each on a 64-byte boundary.
    """
    end = _align_up(layout[-1] + specs[-1].buffer_bytes(rows))
    ranges = []
    for length in lengths:
        assert length >= 0, "negative length of strings"
        ranges.append((end, end + length))
        end = _align_up(end + length)
    return ranges, end


def strings_to_body(strings: Sequence[bytes | memoryview]) -> bytes:
    """Convert a column of strings to one buffer: offsets, then bytes.

    Raises:
        LimitExceeded: The strings have more bytes than `COLUMN_BYTES_MAX`.
    """
    offsets = list(accumulate(map(len, strings), initial=0))
    if offsets[-1] > COLUMN_BYTES_MAX:
        problem = f"the strings of a tensor have {offsets[-1]} bytes, limit {COLUMN_BYTES_MAX}"
        raise LimitExceeded(problem)
    return b"".join((struct.pack(f"<{len(offsets)}i", *offsets), *strings))


def body_to_strings(body: bytes | memoryview, count: int) -> list[bytes]:
    """Convert a buffer from `strings_to_body` to its strings."""
    begin = (count + 1) * OFFSET_BYTES
    return split_strings(body[:begin], body[begin:], count)


def split_strings(
    offsets: bytes | memoryview, joined: bytes | memoryview, count: int
) -> list[bytes]:
    """Return the strings of a column; `offsets` may be empty if `count` is 0."""
    if not count:
        return []
    whole = bytes(joined)
    ends = struct.unpack_from(f"<{count + 1}i", offsets)
    return [whole[start:stop] for start, stop in pairwise(ends)]


def _align_up(length: int) -> int:
    return (length + ALIGNMENT - 1) & -ALIGNMENT
