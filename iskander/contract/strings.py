"""Strings in a body: where their bytes lie, and a column of them in one piece.

    body    values and offsets of every column (`body_layout`) | bytes of one column | bytes ...

A column of strings has a buffer of int32 offsets among the other columns, and its bytes behind all
of them. How many bytes there are is the last of the offsets, so no message has to say it. Offsets
are as in Arrow: string i is the bytes from offset i to offset i + 1; the first may be beyond 0.

Pure; runs in the gateway and in workers.

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
"""Of the strings of one column: what int32 offsets can say."""

Body = bytes | bytearray | memoryview

_OFFSET = struct.Struct("<i")


def string_lengths(
    specs: tuple[TensorSpec, ...], rows: int, body: Body, layout: list[int]
) -> list[int]:
    """Bytes of each column of strings, by its last offset; nothing behind the offsets is read.

    Args:
        specs: Inputs, or outputs.
        rows: Of the body; at least 1.
        body: From its beginning.
        layout: The columns' offsets, as `body_layout` says.
    """
    return [
        _OFFSET.unpack_from(body, offset + rows * spec.elements * OFFSET_BYTES)[0]
        for spec, offset in zip(specs, layout, strict=True)
        if spec.is_string
    ]


def string_ranges(
    specs: tuple[TensorSpec, ...], rows: int, lengths: list[int], layout: list[int]
) -> tuple[list[tuple[int, int]], int]:
    """Where the bytes of each column of strings begin and end in a body, and the body's end.

    Args:
        specs: Inputs, or outputs.
        rows: Of the body.
        lengths: Bytes of each column of strings.
        layout: The columns' offsets, as `body_layout` says.

    Layout:
        Columns in the contract's order behind all that `layout` places, each on a 64-byte boundary.
    """
    end = _aligned(layout[-1] + specs[-1].buffer_bytes(rows))
    ranges = []
    for length in lengths:
        assert length >= 0, "strings of less than nothing"
        ranges.append((end, end + length))
        end = _aligned(end + length)
    return ranges, end


def strings_to_body(strings: Sequence[bytes | memoryview]) -> bytes:
    """A column of strings in one piece: their offsets, and their bytes right behind.

    Raises:
        LimitExceeded: They have more bytes than `COLUMN_BYTES_MAX`.
    """
    offsets = list(accumulate(map(len, strings), initial=0))
    if offsets[-1] > COLUMN_BYTES_MAX:
        raise LimitExceeded(
            f"the strings of a tensor may have {COLUMN_BYTES_MAX} bytes, got {offsets[-1]}"
        )
    return b"".join((struct.pack(f"<{len(offsets)}i", *offsets), *strings))


def body_to_strings(body: bytes | memoryview, count: int) -> list[bytes]:
    """The strings of a column that `strings_to_body` made of so many."""
    begin = (count + 1) * OFFSET_BYTES
    return split_strings(body[:begin], body[begin:], count)


def split_strings(
    offsets: bytes | memoryview, joined: bytes | memoryview, count: int
) -> list[bytes]:
    """Strings by themselves.

    Args:
        offsets: A buffer of `count` + 1 of them; it may be empty where the count is 0.
        joined: The bytes that they are offsets in.
        count: How many strings.
    """
    if not count:
        return []
    whole = bytes(joined)
    ends = struct.unpack_from(f"<{count + 1}i", offsets)
    return [whole[start:stop] for start, stop in pairwise(ends)]


def _aligned(length: int) -> int:
    return (length + ALIGNMENT - 1) & -ALIGNMENT
