"""External sort of all results with DuckDB; needs the library `duckdb`.

Rows with equal keys keep their order, so that the result depends on the rows alone. Nulls come
last. Columns are named by position for DuckDB, because its names ignore case. Types that DuckDB
would change are passed as integers or floats with the same order.

Runs in: the operator's tool, one thread, and the threads of DuckDB.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from iskander.errors import ConfigError, Unsupported
from iskander.lake.sinks.errors import OutputError

MEMORY_BYTES: Final = 1 << 30
"""Memory of DuckDB in a sort; more rows go to temporary files."""
THREAD_BYTES: Final = 256 << 20
_POSITION: Final = "position"


def check_sort(sort_by: Sequence[str], schema: pa.Schema) -> None:
    """Check that DuckDB is installed, and that it returns the columns unchanged.

    Raises:
        ConfigError: The library is not installed, or a key has a nested type.
        Unsupported: DuckDB does not have the type of a column.
    """
    duckdb = _library()
    for name in sort_by:
        kind = schema.field(name).type
        if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
            raise ConfigError(f"sort_by has {name!r} with the type {kind}, which has no order")
    with duckdb.connect() as connection:
        for field in schema:
            one = pa.schema([pa.field("c0", _sort_type(field.type))])
            try:
                connection.register("one", one.empty_table())
                found = _reader(connection.execute("select c0 from one"), 1).schema[0].type
                pa.nulls(0, found).cast(one[0].type).cast(field.type)
                is_exact = _is_exact(one[0].type, found)
            except (duckdb.Error, pa.ArrowException):
                is_exact = False
            if not is_exact:
                raise Unsupported(
                    f"sort_by is not possible with column {field.name!r} of type {field.type}; "
                    "leave it out with --keep"
                )


def sorted_batches(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    sort_by: Sequence[str],
    *,
    folder: str,
    batch_rows: int,
    memory_bytes: int = MEMORY_BYTES,
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the rows of batches in sorted order.

    Args:
        batches: Rows in the order that decides between equal keys.
        schema: Columns of the batches.
        sort_by: Names of the keys.
        folder: Local folder for temporary files.
        batch_rows: Rows of a sorted batch.
        memory_bytes: Memory of the sort.

    Raises:
        OutputError: The temporary files cannot be written.
        Exception: The error that `batches` raised.
    """
    duckdb = _library()
    failures: list[Exception] = []
    inner = pa.schema(
        [pa.field(f"c{index}", _sort_type(each.type)) for index, each in enumerate(schema)]
        + [pa.field(_POSITION, pa.int64())]
    )
    keys = [f"c{schema.get_field_index(name)} nulls last" for name in sort_by]
    columns = ", ".join(inner.names[:-1])
    order = ", ".join([*keys, _POSITION])
    settings = {
        "memory_limit": f"{memory_bytes // 1024}KiB",
        "temp_directory": folder,
        # Every thread keeps its own blocks in memory.
        "threads": str(max(1, min(os.cpu_count() or 1, memory_bytes // THREAD_BYTES))),
        "preserve_insertion_order": "false",
    }
    try:
        with duckdb.connect(config=settings) as connection:
            reader = pa.RecordBatchReader.from_batches(
                inner, _with_positions(_store_error(batches, failures), inner)
            )
            connection.register("rows", reader)
            result = connection.execute(f"select {columns} from rows order by {order}")
            for batch in _reader(result, batch_rows):
                arrays = [
                    array.cast(inner_field.type).cast(field.type)
                    for array, inner_field, field in zip(
                        batch.columns, list(inner)[:-1], schema, strict=True
                    )
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if failures:
            raise failures[0] from None
        raise OutputError(f"{folder}: cannot sort the output: {error}", output=folder) from error


def _store_error(
    batches: Iterator[pa.RecordBatch], failures: list[Exception]
) -> Iterator[pa.RecordBatch]:
    """Store the error of an iterator in `failures`, because DuckDB passes on only its text."""
    try:
        yield from batches
    except Exception as error:
        failures.append(error)
        raise


def _with_positions(
    batches: Iterator[pa.RecordBatch], inner: pa.Schema
) -> Iterator[pa.RecordBatch]:
    start = 0
    for batch in batches:
        arrays = [
            array.cast(field.type) for array, field in zip(batch.columns, inner, strict=False)
        ]
        position = pa.arange(start, start + batch.num_rows)
        start += batch.num_rows
        yield pa.RecordBatch.from_arrays([*arrays, position], schema=inner)


def _sort_type(kind: Any) -> Any:  # noqa: ANN401
    """Return the type for DuckDB, which drops units of times and has no half floats."""
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.int64()
    if pa.types.is_date64(kind):
        return pa.int64()
    return pa.float32() if pa.types.is_float16(kind) else kind


def _is_exact(wanted: Any, found: Any) -> bool:  # noqa: ANN401
    if wanted == found:
        return True
    plain = {
        pa.large_string(): pa.string(),
        pa.string_view(): pa.string(),
        pa.large_binary(): pa.binary(),
        pa.binary_view(): pa.binary(),
    }
    if pa.types.is_fixed_size_binary(wanted):
        return bool(found == pa.binary())
    if pa.types.is_time(wanted):
        return bool(pa.types.is_time64(found)) and wanted.unit != "ns"
    if pa.types.is_large_list(wanted):
        return bool(pa.types.is_list(found)) and _is_exact(wanted.value_type, found.value_type)
    if pa.types.is_list(wanted) or pa.types.is_fixed_size_list(wanted):
        return type(wanted) is type(found) and _is_exact(wanted.value_type, found.value_type)
    return bool(plain.get(wanted) == found)


def _reader(result: Any, rows: int) -> Any:  # noqa: ANN401
    """Read a result in batches, by a method that DuckDB renamed in version 1.5."""
    if hasattr(result, "to_arrow_reader"):
        return result.to_arrow_reader(rows)
    return result.fetch_record_batch(rows)


def _library() -> Any:  # noqa: ANN401
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError("sort_by needs duckdb; install iskander[sort]") from error
    return duckdb
