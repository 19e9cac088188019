"""The columns that a model is sent, as an Arrow schema: what a client may build its batches by.

Where several types are taken, the one that needs the least work: the tensor's own of numbers, and
microseconds of times.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from iskander.arrow.types import to_arrow
from iskander.contract.column_types import NUMBER, ColumnType, SentType, parse_sent_type
from iskander.contract.inputs import columns_of, entries_of
from iskander.contract.tensors import Contract

_OF_FAMILY = {
    "date": pa.date32(),
    "time": pa.time64("us"),
    "timestamp": pa.timestamp("us"),
    "duration": pa.duration("us"),
    "decimal": pa.decimal128(38, 9),
}
_DECIMALS = {
    "32": pa.decimal32,
    "64": pa.decimal64,
    "128": pa.decimal128,
    "256": pa.decimal256,
}


def request_schema(contract: Contract) -> pa.Schema:
    """The columns of all inputs, each once; fields that are named by a path in their structs."""
    dtypes = {spec.tensor: spec.type.dtype_name for spec in contract.inputs}
    tree: dict[str, Any] = {}
    for entry in entries_of(contract):
        sent = parse_sent_type(entry.type)
        for name in columns_of(entry):
            made = bool(contract.sources)
            path = name.split(".") if made else [name]
            inner = tree
            for head in path[:-1]:
                found = inner.setdefault(head, {})
                inner = found if isinstance(found, dict) else tree
            inner[path[-1]] = _arrow(sent, dtypes[entry.tensor])
    return pa.schema(_fields(tree))


def _fields(tree: dict[str, Any]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_fields(each)) if isinstance(each, dict) else each)
        for name, each in tree.items()
    ]


def _arrow(sent: SentType, tensor: str) -> pa.DataType:
    if sent.family:
        arrow = _converted(sent)
        for size in reversed(sent.shape):
            arrow = pa.list_(arrow, size)
    else:
        element = tensor if sent.element == NUMBER else sent.element
        arrow = to_arrow(ColumnType(element, sent.shape, sent.is_tensor))
    return pa.list_(arrow) if sent.is_ragged else arrow


def _converted(sent: SentType) -> pa.DataType:
    """The type of dates, times and decimals."""
    if sent.element == sent.family:
        return _OF_FAMILY[sent.family]
    numbers = re.findall(r"-?\d+", sent.element)
    if sent.family == "decimal":
        return _DECIMALS[numbers[0]](*map(int, numbers[1:]))
    word, _, unit = sent.element.removesuffix("]").partition("[")
    return getattr(pa, word)(unit) if unit else getattr(pa, word)()
