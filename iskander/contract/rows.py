"""Rows moved between bodies: out of requests into a batch, and out of a batch to its callers.

    body of request A   a0 a1 a2            body of the batch   a0 a1 a2 b0 b1
    body of request B   b0 b1       <---->

A body holds each column for all its rows, one column after the other (`body_layout`), so the rows
of one request are a range of every column. Booleans are bits, and their ranges begin anywhere in a
byte.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import NamedTuple

import numpy as np

from iskander.contract.tensors import TensorSpec, body_layout

LAYOUTS_MAX = 256


class Rows(NamedTuple):
    """Rows of a body.

    Attributes:
        body: From its beginning; writable where rows are copied to.
        laid_out: Rows that the body is laid out for.
        first: The first of the rows that are meant.
    """

    body: memoryview
    laid_out: int
    first: int


class RowCopier:
    """Copies rows between bodies with the columns of one side of a contract.

    Args:
        specs: Inputs, or outputs.
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self._specs = specs
        self._bits = [spec.elements * spec.type.dtype.arrow_bits for spec in specs]
        self._layouts: dict[int, tuple[list[int], int]] = {}

    def layout(self, rows: int) -> tuple[list[int], int]:
        """`body_layout` of these columns, remembered."""
        layout = self._layouts.get(rows)
        if layout is None:
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[rows] = body_layout(self._specs, rows)
        return layout

    def copy(self, rows: int, source: Rows, target: Rows) -> None:
        """Copy that many rows of every column."""
        source_body, source_rows, first = source
        target_body, target_rows, at = target
        from_offsets, to_offsets = self.layout(source_rows)[0], self.layout(target_rows)[0]
        for bits, from_offset, to_offset in zip(self._bits, from_offsets, to_offsets, strict=True):
            if bits % 8:
                from_bits, to_bits = source_body[from_offset:], target_body[to_offset:]
                _copy_bits(rows * bits, from_bits, first * bits, to_bits, at * bits)
                continue
            width = bits // 8
            start, stop = from_offset + first * width, from_offset + (first + rows) * width
            begin = to_offset + at * width
            target_body[begin : begin + stop - start] = source_body[start:stop]

    def repeat_last(self, body: memoryview, rows: int, body_rows: int) -> None:
        """Fill a body up: rows from `rows` to `body_rows` become copies of the one before them."""
        for row in range(rows, body_rows):
            self.copy(1, Rows(body, body_rows, rows - 1), Rows(body, body_rows, row))


def _copy_bits(count: int, source: memoryview, first: int, target: memoryview, at: int) -> None:
    """Copy bits that begin anywhere in a byte; the other bits of the target stay."""
    source_bytes = np.frombuffer(source[first // 8 : (first + count + 7) // 8], np.uint8)
    moved = np.unpackbits(source_bytes, bitorder="little")[first % 8 :][:count]
    target_bytes = np.frombuffer(target[at // 8 : (at + count + 7) // 8], np.uint8)
    changed = np.unpackbits(target_bytes, bitorder="little")
    changed[at % 8 :][:count] = moved
    target_bytes[:] = np.packbits(changed, bitorder="little")
