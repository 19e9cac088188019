"""Contract of a model version: its columns, their tensors, and their layout in an arena.

Pure. Runs on: gateway and workers.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Final

import msgspec

from iskander.contract.column_types import ColumnType
from iskander.contract.manifest import InputColumn, Passthrough
from iskander.contract.outputs import ColumnOrder, Rank
from iskander.contract.result_types import parse_result_type
from iskander.contract.validation import require

STRING_BYTES = 256
"""Default of the maximum bytes of one string in a result."""
ALIGNMENT: Final = 64
"""Alignment in bytes of every buffer in an arena (Arrow's recommendation, AVX-512)."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One column and its tensor.

    Attributes:
        column: Name of the column in the record batch.
        tensor: Name of the tensor in the graph.
        type: The column's Arrow type.
        shape: The tensor's shape without the batch axis.
        is_bound: Whether an output's shape is known before the run, so that the runtime can write
            directly into the output arena.
        string_bytes: For string outputs: the maximum bytes of one string.
    """

    column: str
    tensor: str
    type: ColumnType
    shape: tuple[int, ...]
    is_bound: bool = True
    string_bytes: int = 0

    @property
    def is_string(self) -> bool:
        """Whether the elements are strings or bytes."""
        return not self.type.dtype.arrow_bits

    @cached_property
    def elements(self) -> int:
        """Number of elements of one row."""
        return prod(self.shape)

    def buffer_bytes(self, rows: int) -> int:
        """Return the bytes of the Arrow buffer for `rows` rows: values, or offsets of strings."""
        return self.type.dtype.buffer_bytes(rows * self.elements)


class ResultColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of a result record batch.

    Attributes:
        column: Name of the column.
        type: Arrow type of the column, as spelled in a manifest.
        outputs: Indices of the contract's outputs in the column, in the order of its type; for a
            rank (the place of a row in the order of an output), that output.
        source: Description of the column's tensors and steps, for people.
        rank: Options of a rank, which the gateway computes; None for any other column.
    """

    column: str
    type: str
    outputs: tuple[int, ...]
    source: str
    rank: Rank | None = None

    @property
    def is_assembled(self) -> bool:
        """Whether the gateway assembles the column: a rank, a list or a struct."""
        return self.rank is not None or parse_result_type(self.type) is not None


class Contract(msgspec.Struct, frozen=True, array_like=True):
    """Inputs and outputs of a model version.

    Attributes:
        outputs: Tensors after all steps.
        passthrough: Columns that the response returns unchanged; `all`: every column that is not
            an input.
        rows_fixed: Number of rows of every batch, if the graph's batch axis is fixed.
        columns: Columns of a result record batch; empty if each output is a column.
        column_order: Order of the result columns and the passed-through columns.
        sources: Entries of the manifest for inputs that are converted; an input without an entry is
            read from the column of its spec unchanged.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    passthrough: Passthrough = "none"
    rows_fixed: int | None = None
    columns: tuple[ResultColumn, ...] = ()
    column_order: ColumnOrder = "passthrough_first"
    sources: tuple[InputColumn, ...] = ()

    @property
    def ranks(self) -> list[Rank]:
        """Options of the result columns that are ranks, which need all rows of a request."""
        return [column.rank for column in self.columns if column.rank is not None]


def body_layout(specs: tuple[TensorSpec, ...], rows: int) -> tuple[list[int], int]:
    """Compute the layout of a batch's body in an arena; gateway and worker get the same layout.

    Returns:
        The offset of each column from the body's start, and the body's length; in bytes. The length
        includes the maximum string bytes of results, and not the strings of inputs.

    Layout:
        Columns in the contract's order, each on a 64-byte boundary: values, or the offsets of
        strings. The bytes of the strings follow all columns (`strings.string_ranges`).
    """
    offsets, end, string_bytes = [], 0, 0
    for spec in specs:
        offsets.append(end)
        end += (spec.buffer_bytes(rows) + ALIGNMENT - 1) & -ALIGNMENT
        if spec.string_bytes:
            string_bytes += (rows * spec.elements * spec.string_bytes + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end + string_bytes


def require_output_space(contract: Contract, rows_max: int, output_bytes: int) -> None:
    """Reject a model whose largest batch produces more results than a worker's arena holds."""
    rows = contract.rows_fixed or rows_max
    _, needed = body_layout(contract.outputs, rows)
    has_strings = any(spec.is_string for spec in contract.outputs)
    lower = "max_batch_rows or result_string_bytes" if has_strings else "max_batch_rows"
    problem = f"{rows} rows make {needed} bytes of results and arena.output_bytes is {output_bytes}"
    require(needed <= output_bytes, f"{problem}: lower {lower}, or raise arena.output_bytes")
