"""Finds unions without fields: pyarrow ends the process when it makes or takes their values.

Needs pyarrow only, as the readers of files do. Pure.
"""

from __future__ import annotations

import pyarrow as pa


def column_with_empty_union(schema: pa.Schema) -> str:
    """Return the name of a column whose type has a union without fields; empty if none has."""
    return next((field.name for field in schema if _has_empty_union(field.type)), "")


def _has_empty_union(arrow: pa.DataType) -> bool:
    types = pa.types
    if isinstance(arrow, pa.BaseExtensionType):
        return _has_empty_union(arrow.storage_type)
    if types.is_dictionary(arrow) or types.is_run_end_encoded(arrow):
        return _has_empty_union(arrow.value_type)
    if types.is_map(arrow):
        return _has_empty_union(arrow.key_type) or _has_empty_union(arrow.item_type)
    if types.is_union(arrow) and not arrow.num_fields:
        return True
    return any(_has_empty_union(arrow.field(index).type) for index in range(arrow.num_fields))
