"""Rank of each row within its group.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def can_group(arrow: pa.DataType) -> bool:
    """Return whether values of this type can be group keys."""
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    is_text = pa.types.is_string(arrow) or pa.types.is_large_string(arrow)
    is_bytes = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
    # pyarrow has no dictionary of float16 values.
    is_number = pa.types.is_primitive(arrow) and not pa.types.is_float16(arrow)
    return bool(is_text or is_bytes or is_number)


def ranks_in_groups(values: np.ndarray, groups: pa.Array | None, order: str) -> np.ndarray:
    """Return the int32 rank of each row in its group, from 1; ties in row order, NaN last.

    `groups` has a key per row, and null is a key too; None for a single group. `order` is
    `descending` or `ascending`.
    """
    rows = len(values)
    _, keys = np.unique(values, return_inverse=True)
    if order == "descending":
        keys = np.where(np.isnan(values), rows, -keys)
    if groups is None:
        codes = np.zeros(rows, np.int64)
    else:
        if pa.types.is_dictionary(groups.type):
            # Compare the codes of the entries in use: entries can be long, and unused ones many.
            used = groups.indices.unique().drop_null()
            codes_used = groups.dictionary.take(used).dictionary_encode().indices
            groups = codes_used.take(pc.index_in(groups.indices, value_set=used))
        codes = groups.dictionary_encode(null_encoding="encode").indices.to_numpy()
    sorted_rows = np.lexsort((keys, codes))
    starts = np.flatnonzero(np.diff(codes[sorted_rows], prepend=-1))
    sizes = np.diff(starts, append=rows)
    result = np.empty(rows, np.int32)
    result[sorted_rows] = np.arange(1, rows + 1) - np.repeat(starts, sizes)
    return result
