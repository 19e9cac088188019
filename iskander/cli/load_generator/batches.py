"""Batches of a run: generated from a model's input schema, or cut from a file's rows.

Generated values are valid for most models: integers from 0 to 9, floats of a normal distribution,
texts of a given length, no nulls. A model that knows only certain values needs real rows.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
from pyarrow import types

from iskander.errors import ConfigError

BATCHES = 16
"""Batches that the requests repeat, so that responses of equal requests are not all a run has."""
INTEGERS = 10
DAY_MS = 86_400_000
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)

Random = np.random.Generator


def generate(
    schema: pa.Schema, rows: int, *, string_bytes: int, list_length: int, seed: int
) -> list[pa.RecordBatch]:
    """Generate batches with a schema.

    Raises:
        ConfigError: A column has a type for which no data is generated.
    """
    random = np.random.default_rng(seed)

    def column(field: pa.Field) -> pa.Array:
        try:
            return _array(field.type, rows, random, string_bytes, list_length)
        except (_NoData, pa.ArrowException) as error:
            text = f"no data can be generated for column `{field.name}`: {error}; use --data FILE"
            raise ConfigError(text) from None

    return [
        pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)
        for _ in range(BATCHES)
    ]


def cut(rows: pa.RecordBatch, count: int, names: list[str]) -> list[pa.RecordBatch]:
    """Cut batches of `count` rows out of real ones, which are repeated if they are fewer.

    Raises:
        ConfigError: There are no rows.
    """
    if not rows.num_rows:
        raise ConfigError("--data: the file has no rows")
    kept = rows.select([name for name in rows.schema.names if name in names] or rows.schema.names)
    repeats = -(-count // kept.num_rows) + 1
    table = pa.Table.from_batches([kept] * repeats)
    starts = range(0, kept.num_rows, count)
    return [
        table.slice(start, count).combine_chunks().to_batches()[0] for start in starts[:BATCHES]
    ]


class _NoData(Exception):
    """No data is generated for a type."""


def _array(
    kind: pa.DataType, rows: int, random: Random, string_bytes: int, list_length: int
) -> pa.Array:
    """Random values of a type."""
    nested = partial(_array, random=random, string_bytes=string_bytes, list_length=list_length)
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays([nested(f.type, rows) for f in fields], fields=fields)
    if types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(
            nested(kind.value_type, rows * kind.list_size), type=kind
        )
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = np.concatenate([[0], np.cumsum(random.integers(1, list_length + 1, rows))])
        make = pa.ListArray if types.is_list(kind) else pa.LargeListArray
        width = pa.int32() if types.is_list(kind) else pa.int64()
        values = nested(kind.value_type, int(offsets[-1]))
        return make.from_arrays(pa.array(offsets, width), values, type=kind)
    if types.is_dictionary(kind):
        values = nested(kind.value_type, INTEGERS)
        indices = pa.array(random.integers(0, INTEGERS, rows), kind.index_type)
        return pa.DictionaryArray.from_arrays(indices, values)
    for is_kind, make_values in _VALUES:
        if is_kind(kind):
            return make_values(kind, rows, random, string_bytes)
    raise _NoData(f"its type is {kind}")


def _booleans(kind: pa.DataType, rows: int, random: Random, _: int) -> pa.Array:
    return pa.array(random.integers(0, 2, rows).astype(bool), kind)


def _floats(kind: pa.DataType, rows: int, random: Random, _: int) -> pa.Array:
    return pa.array(random.standard_normal(rows).astype(kind.to_pandas_dtype()), kind)


def _integers(kind: pa.DataType, rows: int, random: Random, _: int) -> pa.Array:
    return pa.array(random.integers(0, INTEGERS, rows)).cast(kind)


def _decimals(kind: pa.DataType, rows: int, random: Random, _: int) -> pa.Array:
    digits = min(INTEGERS, 10 ** (kind.precision - kind.scale))
    return pa.array([Decimal(int(each)) for each in random.integers(0, digits, rows)], kind)


def _times(kind: pa.DataType, rows: int, random: Random, _: int) -> pa.Array:
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    unit = DAY_MS if types.is_date64(kind) else 1
    return pa.array(unit * random.integers(0, INTEGERS, rows), width).cast(kind)


def _texts(kind: pa.DataType, rows: int, random: Random, string_bytes: int) -> pa.Array:
    width = kind.byte_width if types.is_fixed_size_binary(kind) else string_bytes
    letters = random.choice(LETTERS, (rows, width)).tobytes()
    values = [letters[at : at + width] for at in range(0, len(letters), width)] if width else []
    return pa.array(values or [b""] * rows, pa.binary()).cast(kind)


_VALUES: tuple[
    tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType, int, Random, int], pa.Array]], ...
] = (
    (types.is_boolean, _booleans),
    (types.is_floating, _floats),
    (types.is_integer, _integers),
    (types.is_decimal, _decimals),
    (types.is_temporal, _times),
    (types.is_string, _texts),
    (types.is_large_string, _texts),
    (types.is_binary, _texts),
    (types.is_large_binary, _texts),
    (types.is_fixed_size_binary, _texts),
)
