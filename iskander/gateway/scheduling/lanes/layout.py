"""Layout of a request's rows in the input arena and of its results in the output arena.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final

from iskander.arrow import ipc
from iskander.arrow.types import columns_without_nulls, input_schema
from iskander.contract.processing.rows import RowCopier
from iskander.contract.processing.strings import COLUMN_BYTES_MAX, string_ranges
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import LimitExceeded

LAYOUTS_MAX: Final = 64
"""Cached layouts by number of rows; clients send few different numbers."""


class Layout:
    """Layout of a number of rows, with the `lengths` of each string input in bytes.

    Attributes:
        header: Framing and metadata of the input's IPC message, up to its body.
        offsets: Offsets in the body of each input, then of the bytes of each string input.
        input_bytes: Size of the whole message.
        output_bytes: Maximum size of the body of the results.
    """

    __slots__ = ("header", "input_bytes", "offsets", "output_bytes")

    def __init__(
        self,
        contract: Contract,
        template: ipc.BatchTemplate,
        rows: int,
        lengths: list[int],
        output_bytes: int,
    ) -> None:
        offsets = body_layout(contract.inputs, rows)[0]
        strings, body_bytes = string_ranges(contract.inputs, rows, lengths, offsets)
        nodes, buffers = columns_without_nulls(contract.inputs, rows, offsets, strings)
        self.header = ipc.encapsulate(template.render(rows, nodes, buffers, body_bytes))
        self.offsets = offsets + [start for start, _ in strings]
        self.input_bytes = len(self.header) + body_bytes
        self.output_bytes = output_bytes


class LayoutCache:
    """Cache of the layouts of one contract.

    Attributes:
        outputs: Copies results.
        has_strings: Some inputs are strings, so that each request has its own layout.
    """

    def __init__(self, contract: Contract) -> None:
        self.has_strings = any(spec.is_string for spec in contract.inputs)
        self.outputs = RowCopier(contract.outputs)
        self._contract = contract
        self._template = ipc.BatchTemplate(input_schema(contract))
        self._cache: dict[int, Layout] = {}

    def for_rows(self, rows: int) -> Layout:
        """Layout of a number of rows, with empty strings."""
        layout = self._cache.get(rows)
        if layout is None:
            if len(self._cache) >= LAYOUTS_MAX:
                self._cache.clear()
            _require_offsets(self._contract, rows)
            output_bytes = body_layout(self._contract.outputs, rows)[1]
            lengths = [0 for spec in self._contract.inputs if spec.is_string]
            layout = Layout(self._contract, self._template, rows, lengths, output_bytes)
            self._cache[rows] = layout
        return layout

    def for_strings(self, rows: int, buffers: Sequence[Sized]) -> Layout:
        """Layout of a request with string inputs, from the lengths of its buffers."""
        lengths = [len(strings) for strings in buffers[len(self._contract.inputs) :]]
        output_bytes = self.for_rows(rows).output_bytes
        return Layout(self._contract, self._template, rows, lengths, output_bytes)


def _require_offsets(contract: Contract, rows: int) -> None:
    """Raise `LimitExceeded` if the results could exceed the 32-bit offsets of a column."""
    for spec in contract.outputs:
        values = rows * spec.elements
        if values * spec.string_bytes > COLUMN_BYTES_MAX:
            raise LimitExceeded(
                f"{rows} rows may make {values} strings of {spec.string_bytes} bytes in column "
                f"`{spec.column}`, limit {COLUMN_BYTES_MAX} bytes; send fewer rows"
            )
        if contract.columns and values > COLUMN_BYTES_MAX:
            raise LimitExceeded(
                f"{rows} rows make {values} values in column `{spec.column}`, "
                f"limit {COLUMN_BYTES_MAX}; send fewer rows"
            )
