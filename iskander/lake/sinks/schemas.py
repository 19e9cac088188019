"""Types of outputs: plain columns for files, and the types of table formats.

Pure. Runs in: the operator's tool.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow as pa

from iskander.errors import ConfigError, ContractError, Unsupported

GROUP_BYTES: Final = 64 << 20
"""Approximate bytes of a row group before encoding."""
GROUP_ROWS_MAX: Final = 65_536
GROUP_ROWS_MIN: Final = 256
_VARIABLE_BYTES: Final = 32
"""Assumed bytes of a value without a fixed width."""


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return columns as files have them: no dictionaries, views or metadata; all nullable.

    Raises:
        ContractError: Two columns have the same name.
    """
    return _convert_types(schema, _without_view)


def table_schema(schema: pa.Schema, *, format: str) -> pa.Schema:
    """Return columns as a Delta or Iceberg table has them.

    Unsigned integers become the next wider signed ones, half floats become floats, large and view
    types their plain forms, fixed-size lists become lists, and timestamps have microseconds.

    Raises:
        ContractError: Two columns have one name.
        Unsupported: The format has no type for a column.
    """
    return _convert_types(schema, lambda kind: _table_type(kind, format))


def _convert_types(schema: pa.Schema, convert: Callable[[Any], Any]) -> pa.Schema:
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        name = sorted(twice)[0]
        raise ContractError(
            f"output has two columns with the name {name!r}; leave one out with --keep", column=name
        )
    fields = []
    for field in schema:
        kind = field.type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        try:
            fields.append(pa.field(field.name, convert(kind)))
        except Unsupported as error:
            raise Unsupported(f"output column {field.name!r}: {error.message}") from None
    return pa.schema(fields)


def _without_view(kind: Any) -> Any:  # noqa: ANN401
    """Return a type without a view: pyarrow cannot select rows of a view."""
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def _table_type(kind: Any, format: str) -> Any:  # noqa: ANN401, PLR0911
    types = pa.types
    if types.is_boolean(kind) or types.is_date32(kind) or types.is_decimal128(kind):
        return kind
    if types.is_integer(kind):
        return _table_integer(kind, format)
    if types.is_float16(kind):
        return pa.float32()
    if types.is_floating(kind):
        return kind
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_date64(kind):
        return pa.date32()
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz is not None else None)
    if types.is_time(kind) and format == "iceberg":
        return pa.time64("us")
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(pa.field("element", _table_type(kind.value_type, format)))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _table_type(field.type, format)) for field in kind])
    raise Unsupported(f"{format} tables have no type for {kind}; leave the column out with --keep")


def _table_integer(kind: Any, format: str) -> Any:  # noqa: ANN401
    if pa.types.is_uint64(kind):
        raise Unsupported(f"{format} tables have no type for uint64; leave the column out")
    if pa.types.is_uint32(kind) or pa.types.is_int64(kind):
        return pa.int64()
    if format == "iceberg":
        return pa.int32()
    return {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
    }.get(kind, kind)


def conform(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch to the schema that is written, without loss.

    Raises:
        ContractError: The columns differ, or a value does not fit its type.
    """
    if batch.schema.names != schema.names:
        raise ContractError(
            f"results have the columns {batch.schema.names}, the output has {schema.names}"
        )
    arrays = []
    for field, array in zip(schema, batch.columns, strict=True):
        if array.type != field.type:
            try:
                array = array.cast(field.type)  # noqa: PLW2901
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ContractError(
                    f"output column {field.name!r} has the type {array.type} and cannot be written "
                    f"as {field.type}: {error}",
                    column=field.name,
                ) from error
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def group_rows(schema: pa.Schema) -> int:
    """Return the rows of a row group; types alone decide, so that equal rows give equal files."""
    width = sum(_value_bytes(field.type) for field in schema) or 1
    rows = min(GROUP_BYTES // width, GROUP_ROWS_MAX)
    return max(rows, GROUP_ROWS_MIN)


def _value_bytes(kind: Any) -> int:  # noqa: ANN401
    if isinstance(kind, pa.BaseExtensionType):
        return _value_bytes(kind.storage_type)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _value_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return sum(_value_bytes(field.type) for field in kind)
    try:
        return int(max(kind.bit_width // 8, 1))
    except ValueError:
        return _VARIABLE_BYTES


def check_columns(option: str, names: Sequence[str], schema: pa.Schema) -> None:
    """Check that the columns of an option are in the output, and that none is given twice.

    Raises:
        ConfigError: A column is missing or given twice.
    """
    if len(set(names)) != len(names):
        raise ConfigError(f"{option} has a column twice: {', '.join(names)}")
    for name in names:
        if name not in schema.names:
            near = difflib.get_close_matches(name, schema.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {schema.names}"
            raise ConfigError(f"{option} has {name!r}, but the output has no such column{hint}")


def check_partitions(names: Sequence[str], schema: pa.Schema) -> None:
    """Check the columns of `partition_by`.

    Raises:
        ConfigError: A column is missing, has a type that is not exact as text, or no column remains
            for the files.
    """
    check_columns("partition_by", names, schema)
    for name in names:
        kind = schema.field(name).type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not (
            is_text
            or pa.types.is_integer(kind)
            or pa.types.is_boolean(kind)
            or pa.types.is_date32(kind)
        ):
            raise ConfigError(
                f"partition_by has {name!r} with the type {kind}; expected strings, integers, "
                "booleans or dates"
            )
    if names and len(names) == len(schema):
        raise ConfigError("partition_by has all columns; one column must remain for the files")
