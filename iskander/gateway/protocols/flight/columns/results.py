"""Result columns as Arrow arrays: views of the results' body, lists, structs and ranks.

Only for responses that are not plain; a plain response sends the results' body unchanged.

Runs on: gateway loop. Source: Arrow columnar format 1.5, the layouts of lists and structs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from iskander.arrow.rank import ranks_in_groups
from iskander.arrow.types import innermost_type, to_arrow
from iskander.contract.processing.strings import string_lengths, string_ranges
from iskander.contract.result_types import ListOf, ResultType, Value, leaves_of, parse_result_type
from iskander.contract.tensors import Contract, body_layout
from iskander.errors import ExecutionFailed


def result_columns(
    contract: Contract, rows: int, results: bytes | memoryview, groups: Mapping[str, pa.Array]
) -> list[pa.Array]:
    """All result columns, in the contract's order.

    `results` has the layout of `body_layout`, `groups` the columns that rows are ranked within.
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
            columns.append(pa.array(ranks_in_groups(ranked, group, column.rank.order)))
        elif kind is None:
            columns.append(_nest(*values[column.outputs[0]]))
        else:
            leaves = deque((values[i][0], contract.outputs[i].shape) for i in column.outputs)
            if isinstance(kind, ListOf) and len(leaves) > len(leaves_of(kind)):
                columns.append(_variable_lists(kind, leaves, rows))
            else:
                columns.append(_compose(kind, leaves, rows, 0))
    return columns


def _values(
    contract: Contract, rows: int, results: bytes | memoryview
) -> list[tuple[pa.Array, pa.DataType]]:
    """Innermost values of each output, and its column type."""
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
        array = pa.Array.from_buffers(innermost_type(arrow), rows * spec.elements, buffers)
        values.append((array, arrow))
    return values


def _nest(values: pa.Array, arrow: pa.DataType) -> pa.Array:
    if isinstance(arrow, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(arrow, _nest(values, arrow.storage_type))
    if not pa.types.is_fixed_size_list(arrow):
        return values
    return pa.FixedSizeListArray.from_arrays(_nest(values, arrow.value_type), type=arrow)


def _variable_lists(
    kind: ListOf, leaves: deque[tuple[pa.Array, tuple[int, ...]]], rows: int
) -> pa.Array:
    """Lists whose lengths are the last leaf."""
    lengths = leaves.pop()[0].to_numpy()
    width = leaves[0][1][0]
    if np.any((lengths < 0) | (lengths > width)):  # Clients do not check the lists that they read.
        raise ExecutionFailed(f"the worker returned lists of other lengths than 0 to {width}")
    items = _compose(kind.item, leaves, rows * width, 1)
    is_used = np.arange(width) < lengths[:, None]
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), items.filter(pa.array(is_used.reshape(-1))))


def _compose(
    kind: ResultType, leaves: deque[tuple[pa.Array, tuple[int, ...]]], count: int, depth: int
) -> pa.Array:
    """Compose `count` lists, structs or values, inside `depth` lists.

    `leaves` has the values and row shape of each remaining leaf.
    """
    if isinstance(kind, Value):
        return leaves.popleft()[0]
    if isinstance(kind, ListOf):
        width = leaves[0][1][depth]
        items = _compose(kind.item, leaves, count * width, depth + 1)
        if kind.size is not None:
            return pa.FixedSizeListArray.from_arrays(items, width)
        ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
        return pa.ListArray.from_arrays(pa.array(ends), items)
    fields = [_compose(field, leaves, count, depth) for _, field in kind.fields]
    return pa.StructArray.from_arrays(fields, [name for name, _ in kind.fields])
