"""Columns and struct fields by their dotted names; lists of variable length.

Needs pyarrow only, because the client uses it too. Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc


class ColumnPath(NamedTuple):
    """Position of a column: its index in the batch, then in each struct; and its field."""

    indices: tuple[int, ...]
    field: pa.Field

    @property
    def type(self) -> pa.DataType:
        return self.field.type


def find_column(fields: pa.Schema | pa.StructType, name: str) -> ColumnPath | None:
    """Look up a column by its dotted name; the longest matching field name wins.

    Duplicate field names do not match.
    """
    indices: list[int] = []
    parent, rest = fields, name
    while True:
        head, index = rest, parent.get_field_index(rest)
        while index < 0 and "." in head:
            head = head.rpartition(".")[0]
            index = parent.get_field_index(head)
        if index < 0:
            return None
        field = parent.field(index)
        indices.append(index)
        rest = rest[len(head) + 1 :]
        if not rest:
            return ColumnPath(tuple(indices), field)
        if not pa.types.is_struct(field.type):
            return None
        parent = field.type


def column_at(batch: pa.RecordBatch, indices: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return the column at a path; a value is null where an enclosing struct is null."""
    array = batch.column(indices[0])
    for index in indices[1:]:
        array = pc.struct_field(array, [index])
    return array


def is_list(kind: pa.DataType) -> bool:
    """Return whether rows of this type are lists of variable length."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or is_list_view(kind))


def is_list_view(kind: pa.DataType) -> bool:
    """Return whether a type has views of lists."""
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))
