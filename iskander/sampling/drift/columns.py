"""Columns of a sample as values for summaries.

The elements of a tensor are columns of their own, up to a limit. Above it, all elements are one
column, and the norm of each row another.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import pyarrow as pa

from iskander.arrow.types import BFloat16, innermost_type
from iskander.sampling.drift.summary import LabelValues, NumberValues, Values

ELEMENTS_MAX: Final = 64
"""Elements of a tensor up to which each is a column."""
VALUES_MAX: Final = 65_536
"""Summarized values of a larger tensor in a sample, those of evenly spaced rows."""
_BFLOAT16_SHIFT: Final = 16


def columns_of(
    batch: pa.RecordBatch, elements: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> Iterator[tuple[str, Values]]:
    """Return the values of each column to summarize, in the order of the batch.

    Names are `column`, `column[3]` or `column[name]` for an element of a tensor, or `column[*]` for
    all elements and `norm(column)` for the Euclidean norm of each row.

    Args:
        batch: Tensors of some rows.
        elements: Names of the elements of tensors that were packed from several columns.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        items = _flattened(column)
        rows = len(column) - column.null_count
        if items is column:
            yield name, values_of(column)
        elif not rows or not _is_fixed(column.type) or len(items) % rows:
            yield f"{name}[*]", values_of(items, column.null_count)
        else:
            yield from _elements(name, elements.get(name, ()), items, rows, column.null_count)


def _flattened(array: pa.Array) -> pa.Array:
    """Return the innermost items of lists and tensors; any other array itself."""
    if isinstance(array, pa.FixedShapeTensorArray):
        return _flattened(array.storage)
    if pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type):
        return _flattened(array.flatten())
    return array


def _is_fixed(kind: pa.DataType) -> bool:
    """Whether each row has the same number of items, which are no text."""
    kind = innermost_type(kind)
    return not (pa.types.is_list(kind) or _is_text(kind))


def _elements(
    name: str, names: Sequence[str], items: pa.Array, rows: int, nulls: int
) -> Iterator[tuple[str, Values]]:
    size = len(items) // rows
    if size > ELEMENTS_MAX:
        chosen = np.arange(0, rows, -(-len(items) // VALUES_MAX))
        rows = len(chosen)
        items = items.take(pa.array((chosen[:, None] * size + np.arange(size)).ravel()))
        yield f"{name}[*]", values_of(items, nulls)
        with np.errstate(over="ignore"):  # As any other infinite value.
            norms = np.linalg.norm(_numbers(items, np.nan).reshape(rows, size), axis=1)
        yield f"norm({name})", NumberValues(norms, nulls)
        return
    for index, element in enumerate(names if len(names) == size else range(size)):
        positions = pa.array(np.arange(index, len(items), size))
        yield f"{name}[{element}]", values_of(items.take(positions), nulls)


def values_of(array: pa.Array, nulls: int = 0) -> Values:
    """Return the values of an array of numbers, booleans, text or bytes; others count as nulls."""
    nulls += array.null_count
    present = array.drop_null() if array.null_count else array
    kind = present.type
    if pa.types.is_dictionary(kind):
        return values_of(present.dictionary_decode(), nulls)
    if pa.types.is_boolean(kind):
        true = int(present.true_count)
        counts = {"true": true, "false": len(present) - true}
        return LabelValues({label: count for label, count in counts.items() if count}, nulls)
    if _is_text(kind):
        return LabelValues(_counts(present), nulls)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or isinstance(kind, BFloat16)):
        return LabelValues({}, nulls + len(present))
    return NumberValues(_numbers(present), nulls, pa.types.is_integer(kind))


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
        )
    )


def _counts(present: pa.Array) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for entry in present.value_counts().to_pylist():
        value = entry["values"]
        label = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
        counts[label] = counts.get(label, 0) + entry["counts"]
    return counts


def _numbers(array: pa.Array, null: float = 0.0) -> np.ndarray:
    """Return numbers as float64; integers above 2**53 are rounded."""
    if isinstance(array.type, BFloat16):
        bits = array.storage.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint32)
        return np.asarray((bits << _BFLOAT16_SHIFT).view(np.float32), np.float64)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    if array.null_count:
        return np.asarray(array.cast(pa.float64()).fill_null(null))
    return np.asarray(array.to_numpy(zero_copy_only=False), np.float64)
