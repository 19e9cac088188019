"""Copies of a batch between the arenas and device memory.

A body on the device has the layout of a body in an arena (`body_layout`) for the batch's rows:

    one whole request     one copy each way
    few, or large slices  a copy for each slice and column, directly from and to the arena
    many small slices     rows gathered in page-locked memory, then one copy; results likewise

Pure. Runs on: worker main.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import TensorSpec
from iskander.interprocess.control.messages import Slice

FREE_COPIES: Final = 16
"""Enqueueing a copy costs some 3 us; gathering 16 slices first costs more than that."""
LARGE_BYTES: Final = 1 << 16
"""If copies have this mean size, the bus copies them faster than the processor gathers them."""


class Copy(NamedTuple):
    """A range of an arena, and its place in a body on the device; both in bytes."""

    arena_offset: int
    body_offset: int
    length_bytes: int


class Padding(NamedTuple):
    """The last row of a column in a body, which is to be repeated behind it."""

    body_offset: int
    length_bytes: int
    repeats: int


def row_bytes(spec: TensorSpec) -> int:
    """Return the bytes of one row of a column that has neither strings nor booleans."""
    return spec.elements * spec.type.dtype.arrow_bits // 8


def input_copies(copier: RowCopier, slices: tuple[Slice, ...], rows: int) -> list[Copy]:
    """Return the copies of the slices' rows to the body of a batch with `rows` rows."""
    first = slices[0]
    if first.rows == first.request_rows == rows:
        return [Copy(first.input_offset, 0, copier.layout(rows)[1])]
    targets = copier.layout(rows)[0]
    copies, at = [], 0
    for part in slices:
        sources = copier.layout(part.request_rows)[0]
        for spec, source, target in zip(copier.specs, sources, targets, strict=True):
            width = row_bytes(spec)
            begin = part.input_offset + source + part.first * width
            copies.append(Copy(begin, target + at * width, part.rows * width))
        at += part.rows
    return copies


def paddings(copier: RowCopier, used_rows: int, rows: int) -> list[Padding]:
    """Return the padding of each column behind its last used row, if the batch has more rows."""
    if used_rows == rows:
        return []
    return [
        Padding(offset + (used_rows - 1) * row_bytes(spec), row_bytes(spec), rows - used_rows)
        for spec, offset in zip(copier.specs, copier.layout(rows)[0], strict=True)
    ]


def output_copies(copier: RowCopier, slices: tuple[Slice, ...], rows: int) -> list[list[Copy]]:
    """Return the copies of each column's results; `body_offset` counts from the column's start."""
    columns: list[list[Copy]] = [[] for _ in copier.specs]
    at = 0
    for part in slices:
        targets = copier.layout(part.rows)[0]
        for column, spec, target in zip(columns, copier.specs, targets, strict=True):
            width = row_bytes(spec)
            column.append(Copy(part.output_offset + target, at * width, part.rows * width))
        at += part.rows
    return columns


def is_direct(copies: list[Copy], *, is_page_locked: bool) -> bool:
    """Whether to copy between arena and device without a stage; `copies` is not empty."""
    if not is_page_locked:
        return False
    total_bytes = sum(copy.length_bytes for copy in copies)
    return len(copies) <= FREE_COPIES or total_bytes >= len(copies) * LARGE_BYTES
