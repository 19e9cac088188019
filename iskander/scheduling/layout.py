"""How the rows of a request lie in the arenas.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Final

from iskander.arrow import ipc
from iskander.arrow.types import columns_without_nulls, input_schema
from iskander.contract.rows import RowCopier
from iskander.contract.strings import COLUMN_BYTES_MAX, string_ranges
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import LimitExceeded

LAYOUTS_MAX: Final = 64
"""Layouts kept by number of rows; clients send few different numbers."""


class Layout:
    """Of some number of rows.

    Attributes:
        header: Framing and metadata of the input's IPC message, up to its body.
        offsets: Of each of a request's buffers, from the body's start: of each input, then of the
            bytes of each that is strings.
        input_bytes: Of the whole message.
        output_bytes: That the results' body may have.
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
        """Lay a request out.

        Args:
            contract: Of the model version.
            template: Of the inputs' header.
            rows: Of the request.
            lengths: Bytes of each input that is strings.
            output_bytes: As the attribute.
        """
        offsets = body_layout(contract.inputs, rows)[0]
        strings, body_bytes = string_ranges(contract.inputs, rows, lengths, offsets)
        nodes, buffers = columns_without_nulls(contract.inputs, rows, offsets, strings)
        self.header = ipc.encapsulate(template.render(rows, nodes, buffers, body_bytes))
        self.offsets = offsets + [start for start, _ in strings]
        self.input_bytes = len(self.header) + body_bytes
        self.output_bytes = output_bytes


class Layouts:
    """Layouts of one contract, made when they are first asked for.

    Attributes:
        outputs: Copies results.
        has_strings: Inputs are strings, so that each request lies in its own way.
    """

    def __init__(self, contract: Contract) -> None:
        self.has_strings = any(spec.is_string for spec in contract.inputs)
        self.outputs = RowCopier(contract.outputs)
        self._contract = contract
        self._template = ipc.BatchTemplate(input_schema(contract))
        self._made: dict[int, Layout] = {}

    def of(self, rows: int) -> Layout:
        """How so many rows lie, with strings of no bytes.

        Raises:
            LimitExceeded: Their results could have more strings than offsets can say.
        """
        layout = self._made.get(rows)
        if layout is None:
            if len(self._made) >= LAYOUTS_MAX:
                self._made.clear()
            _require_offsets(self._contract, rows)
            output_bytes = body_layout(self._contract.outputs, rows)[1]
            none = [0 for spec in self._contract.inputs if spec.is_string]
            layout = Layout(self._contract, self._template, rows, none, output_bytes)
            self._made[rows] = layout
        return layout

    def around(self, rows: int, buffers: Sequence[Sized]) -> Layout:
        """How a request of these buffers lies, where some of them are strings."""
        lengths = [len(strings) for strings in buffers[len(self._contract.inputs) :]]
        output_bytes = self.of(rows).output_bytes
        return Layout(self._contract, self._template, rows, lengths, output_bytes)


def _require_offsets(contract: Contract, rows: int) -> None:
    for spec in contract.outputs:
        values = rows * spec.elements
        if values * spec.string_bytes > COLUMN_BYTES_MAX:
            raise LimitExceeded(
                f"{rows} rows may make {values} strings of {spec.string_bytes} bytes as "
                f"`{spec.column}`, more than one batch can return: send fewer rows"
            )
        if contract.columns and values > COLUMN_BYTES_MAX:
            raise LimitExceeded(
                f"{rows} rows make {values} values of `{spec.column}`, more than the lists of one "
                "batch can have: send fewer rows"
            )
