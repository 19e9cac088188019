"""The contract of a model version: which column is which tensor, and how they lie in an arena.

Pure; known to the gateway and to workers.
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
from iskander.errors import ManifestError

STRING_BYTES = 256
"""The most bytes of one string in a result, where a model's settings say nothing else."""
ALIGNMENT: Final = 64
"""Bytes. Every buffer in an arena begins on such a boundary (Arrow's recommendation, AVX-512)."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One column and the tensor that it is.

    Attributes:
        column: Name in the record batch.
        tensor: Name in the graph.
        type: The column's Arrow type.
        shape: The tensor's shape without the batch axis.
        is_bound: For outputs: the shape is known before the run, so that the runtime can write
            straight to where the result belongs.
        string_bytes: For outputs that are strings: the most bytes that one of them may have.
    """

    column: str
    tensor: str
    type: ColumnType
    shape: tuple[int, ...]
    is_bound: bool = True
    string_bytes: int = 0

    @property
    def is_string(self) -> bool:
        """Whether its elements have a length of their own."""
        return not self.type.dtype.arrow_bits

    @cached_property
    def elements(self) -> int:
        """Elements of one row."""
        return prod(self.shape)

    def buffer_bytes(self, rows: int) -> int:
        """Bytes of the Arrow buffer for `rows` rows: of values, or of the strings' offsets."""
        return self.type.dtype.buffer_bytes(rows * self.elements)


class ResultColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of a record batch of results.

    Attributes:
        column: Its name.
        type: As manifests spell it.
        outputs: Which of the contract's outputs it is put together from, in its type's order; of a
            rank, the one that it ranks by.
        made: What of, in words for people.
        rank: It is a rank, and counted by the gateway.
    """

    column: str
    type: str
    outputs: tuple[int, ...]
    made: str
    rank: Rank | None = None

    @property
    def is_assembled(self) -> bool:
        """Whether it is more than one of the outputs as it is."""
        return self.rank is not None or parse_result_type(self.type) is not None


class Contract(msgspec.Struct, frozen=True, array_like=True):
    """What a model version takes and returns.

    Attributes:
        outputs: Tensors as they are when all steps are done.
        passthrough: Columns that come back untouched: `all` is every column that is no input.
        rows_fixed: The only number of rows that the graph takes, if its batch axis is fixed.
        columns: Of a record batch of results; empty where each output is a column.
        column_order: Of those and the columns passed through.
        sources: How inputs are made of columns that are not tensors as they come; the others are
            those of their specs.
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
        """What of its results only a whole request can tell."""
        return [column.rank for column in self.columns if column.rank is not None]


def body_layout(specs: tuple[TensorSpec, ...], rows: int) -> tuple[list[int], int]:
    """Where each column's values lie in the body of a batch in an arena.

    The one rule that gateway and worker share, so that a message need not say it.

    Returns:
        The offset of each column from the body's start, and the body's length; in bytes. The length
        counts what results may have of strings, and not the strings of inputs.

    Layout:
        Columns in the contract's order, each on a 64-byte boundary: values, or the offsets of
        strings. Behind all of them the bytes of the strings, as `strings.string_ranges` says.
    """
    offsets, end, room = [], 0, 0
    for spec in specs:
        offsets.append(end)
        end += (spec.buffer_bytes(rows) + ALIGNMENT - 1) & -ALIGNMENT
        if spec.string_bytes:
            room += (rows * spec.elements * spec.string_bytes + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end + room


def require_room(contract: Contract, rows_max: int, output_bytes: int) -> None:
    """Refuse a model whose largest batch makes more results than a worker's arena holds.

    Raises:
        ManifestError: Says what to change.
    """
    rows = contract.rows_fixed or rows_max
    _, wanted = body_layout(contract.outputs, rows)
    if wanted > output_bytes:
        raise ManifestError(
            f"{rows} rows make {wanted} bytes of results and arena.output_bytes is {output_bytes}: "
            f"lower max_batch_rows{_or_strings(contract)} or raise the arena"
        )


def _or_strings(contract: Contract) -> str:
    return " or result_string_bytes" if any(s.is_string for s in contract.outputs) else ""
