"""Arrow schema of a request batch, derived from a model's contract.

An input that accepts several types gets the type with the least conversion: for numbers the
tensor's own type, for times microseconds.

Pure. Runs on: gateway loop.
"""

from __future__ import annotations

import re
from collections.abc import Container
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


def request_schema(contract: Contract) -> pa.Schema:
    """Return a schema with the columns of all inputs; dotted names become fields of structs."""
    dtypes = {spec.tensor: spec.type.dtype_name for spec in contract.inputs}
    entries = entries_of(contract)
    names = {name for entry in entries for name in columns_of(entry)}
    tree: dict[str, Any] = {}
    for entry in entries:
        sent = parse_sent_type(entry.type)
        for name in columns_of(entry):
            *heads, last = _path(name, names) if contract.sources else [name]
            inner = tree
            for head in heads:
                inner = inner.setdefault(head, {})
            inner[last] = _arrow_type(sent, dtypes[entry.tensor])
    return pa.schema(_fields(tree))


def _path(name: str, names: Container[str]) -> list[str]:
    """Split a dotted name, unless a column has the name of one of its structs."""
    parts = name.split(".")
    structs = (".".join(parts[:count]) for count in range(1, len(parts)))
    return [name] if any(struct in names for struct in structs) else parts


def _fields(tree: dict[str, Any]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(_fields(item)) if isinstance(item, dict) else item)
        for name, item in tree.items()
    ]


def _arrow_type(sent: SentType, dtype_name: str) -> pa.DataType:
    if sent.family:
        arrow = _temporal_or_decimal(sent)
        for size in reversed(sent.shape):
            arrow = pa.list_(arrow, size)
    else:
        element = dtype_name if sent.element == NUMBER else sent.element
        arrow = to_arrow(ColumnType(element, sent.shape, sent.is_tensor))
    return pa.list_(arrow) if sent.is_ragged else arrow


def _temporal_or_decimal(sent: SentType) -> pa.DataType:
    if sent.element == sent.family:
        return _OF_FAMILY[sent.family]
    if sent.family == "decimal":
        bits, *digits = re.findall(r"-?\d+", sent.element)
        return getattr(pa, f"decimal{bits}")(*map(int, digits))
    word, _, unit = sent.element.removesuffix("]").partition("[")
    return getattr(pa, word)(unit) if unit else getattr(pa, word)()
