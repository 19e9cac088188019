"""Spark types as Arrow types, and result types as the nearest Spark types.

Spark types are in Spark's JSON form: a name, or a dict for arrays, maps and structs.

    uint8, uint16, uint32, uint64   ->  short, integer, long, decimal(20,0)
    float16                         ->  float
    fixed_size_list                 ->  array; a tensor becomes one array in row-major order
    date64, timestamps              ->  date; microseconds

Runs in: drivers and Python workers of Spark. Pure. Source: Spark 4.3, `pyspark.sql.types` and
`ArrowColumnVector`, which has no unsigned integers, float16 or fixed-size lists.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from iskander.errors import ContractError

_ARROW_OF: Final = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.utf8(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "interval day to second": pa.duration("us"),
    "void": pa.null(),
}
_SPARK_OF: Final = {
    **{arrow: name for name, arrow in _ARROW_OF.items()},
    pa.uint8(): "short",
    pa.uint16(): "integer",
    pa.uint32(): "long",
    pa.uint64(): "decimal(20,0)",
    pa.float16(): "float",
    pa.large_utf8(): "string",
    pa.string_view(): "string",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
    pa.date64(): "date",
    pa.bool8(): "boolean",
}
_PARTS: Final = {"array": ("elementType",), "map": ("keyType", "valueType")}
_DECIMAL: Final = re.compile(r"decimal\((\d+),\s*(-?\d+)\)")
_SIZED_TEXT: Final = re.compile(r"(?:var)?char\(\d+\)")
_DECIMAL_DIGITS_MAX: Final = 38
_EXTENSION: Final = b"ARROW:extension:name"


def arrow_type(kind: Any) -> pa.DataType | None:  # noqa: ANN401
    """Return the Arrow type in which Spark sends a Spark type; None for an unknown type."""
    if isinstance(kind, str):
        return _named_type(kind)
    fields = kind.get("fields", [])
    keys = _PARTS.get(kind["type"], ())
    items = [arrow_type(field["type"]) for field in fields] or [
        arrow_type(kind[key]) for key in keys
    ]
    if not items or None in items:
        return None
    if kind["type"] == "array":
        return pa.list_(pa.field("element", items[0]))
    if kind["type"] == "map":
        return pa.map_(*items)
    return pa.struct([(entry["name"], item) for entry, item in zip(fields, items, strict=True)])


def spark_type(field: pa.Field) -> Any:  # noqa: ANN401
    """Return the Spark type of a result.

    Raises:
        ContractError: Spark has no type for it.
    """
    kind = field.type
    # A type that Arrow does not know arrives as its storage, with the extension's name as metadata.
    if _EXTENSION in (field.metadata or {}):
        found = None
    else:
        found = _SPARK_OF.get(kind) or _parametric_type(field)
    if found is None:
        text = f"result `{field.name}` has the type {kind}, for which Spark has none"
        raise ContractError(f"{text}; convert it in the model's manifest", column=field.name)
    return found


def spark_fields(fields: Sequence[pa.Field]) -> list[dict[str, Any]]:
    """Return result fields in Spark's form, nullable.

    Raises:
        ContractError: Spark has no type for one of them.
    """
    return [
        {"name": field.name, "type": spark_type(field), "nullable": True, "metadata": {}}
        for field in fields
    ]


def spark_results(results: pa.Schema) -> pa.Schema:
    """Return the Arrow schema in which Spark reads results.

    Raises:
        ContractError: Spark has no type for one of them.
    """
    return pa.schema([(field.name, arrow_type(spark_type(field))) for field in results])


def as_batches(table: pa.Table, results: pa.Schema) -> list[pa.RecordBatch]:
    """Return a table as batches for Spark: its last columns are cast to `results`."""
    kept = table.num_columns - len(results)
    for index, field in enumerate(results, kept):
        column = table.column(index)
        if isinstance(column.type, pa.BaseExtensionType):
            chunks = [chunk.storage for chunk in column.chunks]
            column = pa.chunked_array(chunks, column.type.storage_type)
        if column.type != field.type:
            # Spark has no finer units than microseconds.
            column = column.cast(field.type, safe=not pa.types.is_temporal(field.type))
        table = table.set_column(index, field, column)
    batches: list[pa.RecordBatch] = table.combine_chunks().to_batches()
    return batches


def _named_type(name: str) -> pa.DataType | None:
    decimal = _DECIMAL.fullmatch(name)
    if decimal is not None:
        return pa.decimal128(int(decimal[1]), int(decimal[2]))
    return _ARROW_OF.get("string" if _SIZED_TEXT.fullmatch(name) else name)


def _parametric_type(field: pa.Field) -> Any:  # noqa: ANN401
    """Return the Spark type of a result whose Arrow type has parameters; None if there is none."""
    kind = field.type
    found: Any = None
    if isinstance(kind, pa.FixedShapeTensorType):
        found = _array_type(pa.field(field.name, kind.value_type))
    elif (
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or (pa.types.is_fixed_size_list(kind))
    ):
        found = _array_type(kind.value_field)
    elif pa.types.is_struct(kind):
        found = {"type": "struct", "fields": spark_fields(list(kind))}
    elif pa.types.is_decimal(kind) and kind.precision <= _DECIMAL_DIGITS_MAX:
        found = f"decimal({kind.precision},{kind.scale})"
    elif pa.types.is_timestamp(kind):
        found = "timestamp_ntz" if kind.tz is None else "timestamp"
    elif pa.types.is_duration(kind):
        found = "interval day to second"
    return found


def _array_type(item: pa.Field) -> dict[str, Any]:
    return {"type": "array", "elementType": spark_type(item), "containsNull": True}
