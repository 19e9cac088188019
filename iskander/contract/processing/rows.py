"""Copying of rows between bodies: from requests to a batch, from a batch to its requests.

    body of request A   a0 a1 a2            body of the batch   a0 a1 a2 b0 b1
    body of request B   b0 b1       <---->

A body contains the columns one after the other, each with all rows (`body_layout`), so the rows of
one request are a range of every column. Booleans are bits, so a range may begin within a byte.
Strings follow all columns (`contract.strings`), so a body with strings is built from all of its
rows at once.
"""

from __future__ import annotations

from builtins import memoryview  # mypyc needs this for the types of fields.
from collections.abc import Generator
from typing import Final

import numpy as np

from iskander.contract.dtypes import OFFSET_BYTES
from iskander.contract.processing.strings import COLUMN_BYTES_MAX, string_lengths, string_ranges
from iskander.contract.tensors import ALIGNMENT, TensorSpec, body_layout
from iskander.errors import ExecutionFailed

LAYOUTS_MAX: Final = 256
ALL_BITS: Final = 255


class Rows:
    """Position of rows in a body.

    Args:
        body: The whole body; writable if it is the target of a copy.
        layout_rows: Number of rows in the body's layout.
        first: Index of the first row.
    """

    __slots__ = ("body", "first", "layout_rows")

    def __init__(self, body: memoryview, layout_rows: int, first: int) -> None:
        self.body = body
        self.layout_rows = layout_rows
        self.first = first


class RowCopier:
    """Copies rows between bodies with the columns of one side of a contract.

    Attributes:
        has_strings: The end of a body depends on its strings, not only on `layout`.
    """

    def __init__(self, specs: tuple[TensorSpec, ...]) -> None:
        self.specs = specs
        self.has_strings = any(spec.is_string for spec in specs)
        self._bits = [spec.elements * spec.type.dtype.arrow_bits for spec in specs]
        self._layouts: dict[int, tuple[list[int], int]] = {}
        self._paddings: dict[int, list[tuple[int, int, bytes]]] = {}

    def layout(self, rows: int) -> tuple[list[int], int]:
        """Return `body_layout` of these columns, from a cache if possible."""
        layout = self._layouts.get(rows)
        if layout is None:
            if len(self._layouts) >= LAYOUTS_MAX:
                self._layouts.clear()
            layout = self._layouts[rows] = body_layout(self.specs, rows)
        return layout

    def copy(self, rows: int, source: Rows, target: Rows) -> None:
        """Copy rows of every column except strings, whose `_bits` are 0."""
        source_body, first, target_body, at = source.body, source.first, target.body, target.first
        from_offsets = self.layout(source.layout_rows)[0]
        to_offsets = self.layout(target.layout_rows)[0]
        for index, bits in enumerate(self._bits):
            from_offset, to_offset = from_offsets[index], to_offsets[index]
            if bits % 8:
                from_bits, to_bits = source_body[from_offset:], target_body[to_offset:]
                _copy_bits(rows * bits, from_bits, first * bits, to_bits, at * bits)
                continue
            width = bits // 8
            start, stop = from_offset + first * width, from_offset + (first + rows) * width
            begin = to_offset + at * width
            target_body[begin : begin + stop - start] = source_body[start:stop]

    def repeat_last(self, body: memoryview, rows: int, body_rows: int) -> None:
        """Pad a body: copy its last row, at `rows - 1`, to the rows up to `body_rows`."""
        for row in range(rows, body_rows):
            self.copy(1, Rows(body, body_rows, rows - 1), Rows(body, body_rows, row))

    def clear_padding(self, body: memoryview, rows: int) -> None:
        """Set every bit of a body that belongs to no value to zero; the body has at least one row.

        An arena's memory between the values still has results of other requests.
        """
        padding = self._paddings.get(rows)
        if padding is None:
            if len(self._paddings) >= LAYOUTS_MAX:
                self._paddings.clear()
            padding = self._paddings[rows] = self._padding_masks(rows)
        for end, last_bits, zeros in padding:
            if last_bits != ALL_BITS:
                body[end - 1] &= last_bits
            body[end : end + len(zeros)] = zeros
        if self.has_strings:
            for _, end in self.string_ranges(body, rows)[0]:
                zeros = bytes(-end % ALIGNMENT)
                body[end : end + len(zeros)] = zeros

    def _padding_masks(self, rows: int) -> list[tuple[int, int, bytes]]:
        """Return each padded column's end, the mask of its last byte, and the zeros that follow."""
        found: list[tuple[int, int, bytes]] = []
        for spec, bits, offset in zip(self.specs, self._bits, self.layout(rows)[0], strict=True):
            end = offset + spec.buffer_bytes(rows)
            over = rows * bits % 8
            last_bits = (1 << over) - 1 if over else ALL_BITS
            zeros = bytes(-end % ALIGNMENT)
            if zeros or last_bits != ALL_BITS:
                found.append((end, last_bits, zeros))
        return found

    def string_ranges(self, body: memoryview, rows: int) -> tuple[list[tuple[int, int]], int]:
        """Return `strings.string_ranges` of a body with at least one row, from its offsets."""
        layout = self.layout(rows)[0]
        lengths = string_lengths(self.specs, rows, body, layout)
        ranges, end = string_ranges(self.specs, rows, lengths, layout)
        assert end <= len(body), "strings beyond their body"
        return ranges, end

    def join(self, parts: list[tuple[int, Rows]]) -> Generator[None, None, memoryview]:
        """Build a body with strings from rows of other bodies; yield after each part.

        Args:
            parts: For each part, the number of its rows (at least 1) and their position in another
                body.

        Raises:
            ExecutionFailed: The strings of a column exceed the range of int32 offsets.
        """
        rows = sum(count for count, _ in parts)
        layout = self.layout(rows)[0]
        texts = [self._string_buffers(count, source) for count, source in parts]
        lengths = [sum(len(text) for _, text in column) for column in zip(*texts, strict=True)]
        longest = max(lengths, default=0)
        if longest > COLUMN_BYTES_MAX:
            problem = f"a string column of the batch has {longest} bytes, limit {COLUMN_BYTES_MAX}"
            raise ExecutionFailed(f"{problem}; lower max_batch_rows")
        ranges, end = string_ranges(self.specs, rows, lengths, layout)
        body = np.zeros(end, np.uint8).data
        offsets = [
            np.frombuffer(body, np.int32, rows * spec.elements + 1, offset)
            for spec, offset in zip(self.specs, layout, strict=True)
            if spec.is_string
        ]
        begins, at = [start for start, _ in ranges], 0
        for (count, source), columns in zip(parts, texts, strict=True):
            self.copy(count, source, Rows(body, rows, at))
            for column, (ends, text) in enumerate(columns):
                begin = begins[column]
                first = at * ((len(offsets[column]) - 1) // rows)
                shift = begin - ranges[column][0] - int(ends[0])
                np.add(ends, shift, out=offsets[column][first : first + len(ends)])
                body[begin : begin + len(text)] = text
                begins[column] = begin + len(text)
            at += count
            yield
        return body

    def _string_buffers(self, rows: int, source: Rows) -> list[tuple[np.ndarray, memoryview]]:
        """Return the offsets and bytes of these rows, for each column of strings."""
        body = source.body
        ranges = self.string_ranges(body, source.layout_rows)[0]
        found: list[tuple[np.ndarray, memoryview]] = []
        for spec, offset in zip(self.specs, self.layout(source.layout_rows)[0], strict=True):
            if spec.is_string:
                begin, end = ranges[len(found)]
                start = offset + source.first * spec.elements * OFFSET_BYTES
                ends = np.frombuffer(body, np.int32, rows * spec.elements + 1, start)
                low, high = int(ends[0]), int(ends[-1])
                assert 0 <= low <= high <= end - begin, "strings beyond their column"
                found.append((ends, body[begin + low : begin + high]))
        return found


def _copy_bits(count: int, source: memoryview, first: int, target: memoryview, at: int) -> None:
    """Copy bits between positions within bytes; other bits of the target stay unchanged."""
    source_bytes = np.frombuffer(source[first // 8 : (first + count + 7) // 8], np.uint8)
    moved = np.unpackbits(source_bytes, bitorder="little")[first % 8 :][:count]
    target_bytes = np.frombuffer(target[at // 8 : (at + count + 7) // 8], np.uint8)
    changed = np.unpackbits(target_bytes, bitorder="little")
    changed[at % 8 :][:count] = moved
    target_bytes[:] = np.packbits(changed, bitorder="little")
