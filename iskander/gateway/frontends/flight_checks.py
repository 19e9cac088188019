"""A header's numbers are claims; here they are held against a batch's rows and body.

Pure, but for what pyarrow looks into.
"""

from __future__ import annotations

import pyarrow as pa

from iskander.contract.dtypes import OFFSET_BYTES
from iskander.errors import MalformedInput
from iskander.gateway import ipc
from iskander.gateway.arrow_types import leaf_of
from iskander.gateway.frontends.flight_plan import Column
from iskander.gateway.texts import require_strings


def require_apart(total: int, length: int) -> None:
    """Refuse buffers that share bytes: many columns of one small body would be a large batch."""
    if total > length:
        raise MalformedInput(
            f"the batch's buffers overlap: they have {total} bytes in a body of {length}"
        )


def require_lengths(column: Column, rows: int, nodes: tuple[int, ...]) -> None:
    """Refuse a column whose arrays have not as many values as the batch's rows make."""
    for index, level in enumerate(column.levels, column.first_node):
        length, null_count = nodes[2 * index], nodes[2 * index + 1]
        if length != rows * level or not 0 <= null_count <= length:
            raise MalformedInput(
                f"column `{column.name}` says {length} values with {null_count} nulls where the "
                f"batch's {rows} rows make {rows * level}",
                column=column.name,
            )


def strings_range(column: Column, rows: int, batch: ipc.Batch, body: memoryview) -> tuple[int, int]:
    """Start and end of the bytes of an input's strings, each found to be UTF-8."""
    at = 2 * column.values_buffer
    ends, _, start, length = batch.buffers[at : at + 4]
    if start < 0 or length < 0 or start + length > len(body):
        raise MalformedInput(
            f"column `{column.name}` has a buffer of {length} bytes at {start} of a body of "
            f"{len(body)}",
            column=column.name,
        )
    if not rows:
        return start, start
    count = rows * column.levels[-1]
    offsets = body[ends : ends + (count + 1) * OFFSET_BYTES]
    require_strings(f"column `{column.name}`", count, offsets, body[start : start + length])
    return start, start + int.from_bytes(offsets[-OFFSET_BYTES:], "little")


def forwarded_ranges(
    column: Column, rows: int, batch: ipc.Batch, body: memoryview
) -> list[tuple[int, int]]:
    """The ranges of a passed-through column's buffers, each found long enough."""
    ranges = []
    count = len(column.levels) + (1 if column.bits else 2)
    for place in range(count):
        at = 2 * (column.first_buffer + place)
        start, length = batch.buffers[at], batch.buffers[at + 1]
        wanted = 0
        if place < len(column.levels):
            node = 2 * (column.first_node + place)
            wanted = (batch.nodes[node] + 7) // 8 if batch.nodes[node + 1] else 0
        elif column.bits:
            wanted = (rows * column.levels[-1] * column.bits + 7) // 8
        if start < 0 or length < wanted or length < 0 or start + length > len(body):
            raise MalformedInput(
                f"column `{column.name}` has a buffer of {length} bytes at {start} of a body of "
                f"{len(body)}, and needs {wanted}",
                column=column.name,
            )
        ranges.append((start, start + length))
    if not column.bits and rows:
        buffers = [pa.py_buffer(body[start:stop]) for start, stop in ranges[-3:]]
        null_count = batch.nodes[2 * (column.first_node + len(column.levels)) - 1]
        buffers[0] = buffers[0] if null_count else None
        try:
            storage = leaf_of(column.type)
            count = rows * column.levels[-1]
            pa.Array.from_buffers(storage, count, buffers, null_count).validate(full=True)
        except pa.ArrowInvalid as error:
            text = str(error).split("\n", 1)[0]
            raise MalformedInput(f"column `{column.name}`: {text}", column=column.name) from None
    return ranges
