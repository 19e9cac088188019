"""A row's place among the rows of its group: what only a whole request can tell.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def can_group(arrow: pa.DataType) -> bool:
    """Whether a column of this type can say which rows belong together."""
    if pa.types.is_dictionary(arrow):
        arrow = arrow.value_type
    is_text = pa.types.is_string(arrow) or pa.types.is_large_string(arrow)
    is_bytes = pa.types.is_binary(arrow) or pa.types.is_large_binary(arrow)
    return bool(is_text or is_bytes or pa.types.is_primitive(arrow))


def ranks(values: np.ndarray, groups: pa.Array | None, order: str) -> np.ndarray:
    """Each row's place in its group, from 1 on; equal ones in the order of the rows, NaN last.

    Args:
        values: What is ranked by, a number a row.
        groups: A value a row, those with the same being a group; a null is one, too. None for one
            group of all.
        order: `descending` or `ascending`.

    Returns:
        An int32 a row.
    """
    rows = len(values)
    _, keys = np.unique(values, return_inverse=True)
    if order == "descending":
        keys = np.where(np.isnan(values), rows, -keys)
    if groups is None:
        codes = np.zeros(rows, np.int64)
    else:
        if pa.types.is_dictionary(groups.type):
            # The numbers of its entries say the same, however long the entries are.
            groups = groups.dictionary.dictionary_encode().indices.take(groups.indices)
        codes = groups.dictionary_encode(null_encoding="encode").indices.to_numpy()
    places = np.lexsort((keys, codes))
    starts = np.flatnonzero(np.diff(codes[places], prepend=-1))
    sizes = np.diff(starts, append=rows)
    result = np.empty(rows, np.int32)
    result[places] = np.arange(1, rows + 1) - np.repeat(starts, sizes)
    return result
