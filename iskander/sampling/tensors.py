"""Copies of bodies in the arenas, and record batches of the model's tensors in them.

An input lease has a whole IPC message, whose copy is read as it is. Results are a body without a
header; their copy has space for one. Copies are read only after the gateway has confirmed them.

Runs on: the observer process. Source: Arrow columnar format 1.5, encapsulated messages.
"""

from __future__ import annotations

from typing import Final

import msgspec
import pyarrow as pa

from iskander.arrow.ipc import BatchTemplate, encapsulate
from iskander.arrow.types import columns_without_nulls, input_schema, output_schema
from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import body_layout
from iskander.gateway.observation.messages import Model, OutputPart

DAMAGE_ERRORS: Final = (pa.ArrowException, OSError, EOFError, AssertionError)
"""Exceptions for memory without valid tensors."""


class Tensors:
    """Copies and reads the inputs and outputs of one model and bucket."""

    def __init__(self, model: Model) -> None:
        self.model = model
        contract = model.contract
        self._inputs = input_schema(contract)
        # The result columns are left out: the gateway assembles them from these tensors.
        self._outputs = output_schema(msgspec.structs.replace(contract, columns=()))
        self._template = BatchTemplate(self._outputs)
        self._header_bytes = len(encapsulate(self._template.render(0, *self._positions(0, []), 0)))
        self._copier = RowCopier(contract.outputs)
        self._has_strings = any(s.is_string for s in (*contract.inputs, *contract.outputs))

    def copy_inputs(self, view: memoryview) -> pa.Buffer:
        """Copy an input lease."""
        return _copy(view, 0)

    def copy_outputs(self, view: memoryview) -> pa.Buffer:
        """Copy the results of some rows."""
        return _copy(view, self._header_bytes)

    def read_inputs(self, copy: pa.Buffer) -> pa.RecordBatch:
        """Read the copy of an input lease; raises one of `DAMAGE_ERRORS` if it is damaged."""
        return self._checked(pa.ipc.read_record_batch(pa.ipc.read_message(copy), self._inputs))

    def read_outputs(
        self, parts: tuple[OutputPart, ...], copies: list[pa.Buffer]
    ) -> pa.RecordBatch:
        """Read the copies of results, in the order of the rows; raises as `read_inputs`."""
        batches = [
            self._read_part(part.rows, copy) for part, copy in zip(parts, copies, strict=True)
        ]
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _read_part(self, rows: int, copy: pa.Buffer) -> pa.RecordBatch:
        memory = memoryview(copy).cast("B")
        body = memory[self._header_bytes :]
        strings: list[tuple[int, int]] = []
        if self._copier.has_strings:
            strings = self._copier.string_ranges(body, rows)[0]
        header = self._template.render(rows, *self._positions(rows, strings), len(body))
        memory[: self._header_bytes] = encapsulate(header)
        return self._checked(pa.ipc.read_record_batch(pa.ipc.read_message(copy), self._outputs))

    def _positions(self, rows: int, strings: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        specs = self.model.contract.outputs
        offsets = body_layout(specs, rows)[0]
        if not strings:
            strings = [(0, 0) for spec in specs if spec.is_string]
        return columns_without_nulls(specs, rows, offsets, strings)

    def _checked(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        batch.validate(full=self._has_strings)
        return batch


def _copy(view: memoryview, space: int) -> pa.Buffer:
    """Copy memory into a new, aligned buffer, behind some space."""
    buffer = pa.allocate_buffer(space + len(view))
    memoryview(buffer).cast("B")[space:] = view
    return buffer
