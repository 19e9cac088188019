"""Conversion between named arrays and record batches, for models that use Arrow.

    array (rows,)          a column of its type
    array (rows, a, b)     fixed_size_list<fixed_size_list<TYPE>[b]>[a]
    array of str           utf8

Numbers are not copied on the way in, nor on the way out if their column has no gaps.

Runs on: worker main, of a model with workers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from iskander.errors import ExecutionFailed
from iskander_worker.backends import Arrays


def to_batch(arrays: Arrays) -> pa.RecordBatch:
    """Return a record batch with a column for each array, under its name."""
    return pa.record_batch({name: _to_column(array) for name, array in arrays.items()})


def from_batch(batch: object, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of the named columns.

    Raises `ExecutionFailed` if a column is missing, or its type is no tensor.
    """
    if not isinstance(batch, pa.RecordBatch):
        raise ExecutionFailed(
            f"predict returned a {type(batch).__name__}, expected a pyarrow.RecordBatch"
        )
    found = batch.schema.names
    missing = [name for name in names if found.count(name) != 1]
    if missing:
        raise ExecutionFailed(
            f"predict returned the columns {', '.join(found)[:300]}, expected {missing[0]} once"
        )
    return {name: _to_array(name, batch.column(name)) for name in names}


def _to_column(array: np.ndarray) -> pa.Array:
    if array.dtype == object:
        column = pa.array(array.reshape(-1), pa.utf8())
    elif array.dtype == np.bool_:
        column = pa.array(array.reshape(-1))
    else:
        values = np.ascontiguousarray(array).reshape(-1)
        kind = pa.from_numpy_dtype(values.dtype)
        column = pa.Array.from_buffers(kind, values.size, [None, pa.py_buffer(values)])
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _to_array(name: str, column: pa.Array) -> np.ndarray:
    shape, axes = [len(column)], [0]
    if isinstance(column, pa.FixedShapeTensorArray):
        shape += column.type.shape
        permutation = column.type.permutation or []
        if any(permutation[axis] != place for place, axis in enumerate(permutation)):
            # pyarrow 26 writes the inverse of what the format defines, and cannot read either.
            text = f"column `{name}` has permutation {permutation}, which is not its own inverse"
            raise ExecutionFailed(f"{text}; make the array contiguous first")
        axes += [1 + axis for axis in permutation]
        column = _without_nulls(name, column.storage).flatten()
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = _without_nulls(name, column).flatten()
    column, kind = _without_nulls(name, column), column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        strings = np.empty(len(column), np.object_)
        strings[:] = column.to_pylist()
        return strings.reshape(shape)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise ExecutionFailed(f"column `{name}` has type {kind}, which is no tensor")
    array: np.ndarray = column.to_numpy(zero_copy_only=False).reshape(shape)
    return array.transpose(axes) if len(axes) > 1 else array


def _without_nulls(name: str, column: pa.Array) -> pa.Array:
    if column.null_count:
        raise ExecutionFailed(f"column `{name}` has nulls, which a tensor cannot hold")
    return column
