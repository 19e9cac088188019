"""How the rows of a request lie in the arenas.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.contract.rows import RowCopier
from iskander.contract.tensors import Contract, body_layout
from iskander.gateway import ipc
from iskander.gateway.arrow_types import columns_without_nulls, input_schema

LAYOUTS_MAX = 64
"""Layouts kept by number of rows; clients send few different numbers."""


class Layout:
    """Of some number of rows.

    Attributes:
        header: Framing and metadata of the input's IPC message, up to its body.
        offsets: Of each input, from the body's start.
        input_bytes: Of the whole message.
        output_bytes: Of the results' body.
    """

    __slots__ = ("header", "input_bytes", "offsets", "output_bytes")

    def __init__(self, contract: Contract, template: ipc.BatchTemplate, rows: int) -> None:
        self.offsets, body_bytes = body_layout(contract.inputs, rows)
        nodes, buffers = columns_without_nulls(contract.inputs, rows, self.offsets)
        self.header = ipc.encapsulate(template.render(rows, nodes, buffers, body_bytes))
        self.input_bytes = len(self.header) + body_bytes
        self.output_bytes = body_layout(contract.outputs, rows)[1]


class Layouts:
    """Layouts of one contract, made when they are first asked for."""

    def __init__(self, contract: Contract) -> None:
        self.outputs = RowCopier(contract.outputs)
        self._contract = contract
        self._template = ipc.BatchTemplate(input_schema(contract))
        self._made: dict[int, Layout] = {}

    def of(self, rows: int) -> Layout:
        """How so many rows lie."""
        layout = self._made.get(rows)
        if layout is None:
            if len(self._made) >= LAYOUTS_MAX:
                self._made.clear()
            layout = self._made[rows] = Layout(self._contract, self._template, rows)
        return layout
