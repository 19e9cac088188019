"""Results as Arrow's arrays: over a body as it lies, put together to lists and structs, and ranked.

What the usual response does not need, where the results' body is sent as the worker left it.

Runs on: gateway loop. Source: Arrow columnar format 1.5, the layouts of lists and structs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from iskander.arrow.rank import ranks
from iskander.arrow.types import leaf_of, to_arrow
from iskander.contract.result_types import ListOf, ResultType, Value, leaves_of, parse_result_type
from iskander.contract.strings import string_lengths, string_ranges
from iskander.contract.tensors import Contract, body_layout


def result_columns(
    contract: Contract,
    rows: int,
    results: bytes | memoryview,
    groups: Mapping[str, pa.Array],
) -> list[pa.Array]:
    """Every column of results, in the contract's order.

    Args:
        contract: Of the model version.
        rows: Of the batch.
        results: A body as `body_layout` says; looked at only where there are rows.
        groups: Columns of the request within which rows are ranked.
    """
    values = _values(contract, rows, results)
    if not contract.columns:
        return [_nest(*value) for value in values]
    columns = []
    for column in contract.columns:
        kind = parse_result_type(column.type)
        if column.rank is not None:
            ranked = values[column.outputs[0]][0].to_numpy(zero_copy_only=False)
            group = groups[column.rank.within] if column.rank.within else None
            columns.append(pa.array(ranks(ranked, group, column.rank.order)))
        elif kind is None:
            columns.append(_nest(*values[column.outputs[0]]))
        else:
            shapes = (contract.outputs[index].shape for index in column.outputs)
            parts = [values[index][0] for index in column.outputs]
            leaves = deque(zip(parts, shapes, strict=True))
            if isinstance(kind, ListOf) and len(parts) > len(leaves_of(kind)):
                columns.append(_put_lists(kind, leaves, rows))
            else:
                columns.append(_put(kind, leaves, rows, 0))
    return columns


def _values(
    contract: Contract, rows: int, results: bytes | memoryview
) -> list[tuple[pa.Array, pa.DataType]]:
    """The innermost values of each output, and the type that is made of them."""
    outputs = contract.outputs
    offsets, end = body_layout(outputs, rows)
    results = results if rows else bytes(end)
    lengths = string_lengths(outputs, rows, results, offsets)
    strings = iter(string_ranges(outputs, rows, lengths, offsets)[0])
    body, values = pa.py_buffer(results), []
    for spec, offset in zip(outputs, offsets, strict=True):
        arrow = to_arrow(spec.type)
        buffers = [None, body.slice(offset, spec.buffer_bytes(rows))]
        if spec.is_string:
            start, stop = next(strings)
            buffers.append(body.slice(start, stop - start))
        array = pa.Array.from_buffers(leaf_of(arrow), rows * spec.elements, buffers)
        values.append((array, arrow))
    return values


def _nest(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if isinstance(arrow, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow, _nest(values, arrow.storage_type))
    if not pa.types.is_fixed_size_list(arrow):
        return values
    return pa.FixedSizeListArray.from_arrays(_nest(values, arrow.value_type), type=arrow)


def _put_lists(kind: ListOf, parts: deque[tuple[pa.Array, tuple[int, ...]]], rows: int) -> pa.Array:
    """Lists of lengths of their own, which are the last of the parts."""
    lengths = parts.pop()[0].to_numpy()
    most = parts[0][1][0]
    items = _put(kind.item, parts, rows * most, 1)
    is_meant = np.arange(most) < lengths[:, None]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), items.filter(pa.array(is_meant.reshape(-1))))


def _put(
    kind: ResultType, parts: deque[tuple[pa.Array, tuple[int, ...]]], count: int, depth: int
) -> pa.Array:
    """An array of a type with lists and structs.

    Args:
        kind: What to make.
        parts: The values of each leaf that is left, and the shape of a row of it.
        count: How many values of this type there are.
        depth: Lists around it.
    """
    if isinstance(kind, Value):
        return parts.popleft()[0]
    if isinstance(kind, ListOf):
        width = parts[0][1][depth]
        items = _put(kind.item, parts, count * width, depth + 1)
        if kind.size is not None:
            return pa.FixedSizeListArray.from_arrays(items, width)
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        return pa.ListArray.from_arrays(pa.array(ends), items)
    names = [name for name, _ in kind.fields]
    fields = [_put(field, parts, count, depth) for _, field in kind.fields]
    return pa.StructArray.from_arrays(fields, names)
