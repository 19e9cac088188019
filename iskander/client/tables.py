"""Conversion of tables of any library to record batches, and of results to the same library.

The library of an object is recognized by the Arrow PyCapsule interface, or by the module of the
object's type or of a base class. This module never imports a library: the caller has imported it.

Runs on: the caller's threads. Source: the Arrow PyCapsule interface.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from iskander.errors import ContractError

Batches: TypeAlias = Iterator[pa.RecordBatch]
Restore: TypeAlias = Callable[[pa.Schema, Batches], Any]

_ACCEPTED = (
    "a pyarrow table, batch, reader or dataset, a Polars, pandas, DuckDB or Ibis table, an object "
    "with __arrow_c_stream__ or __arrow_c_array__, or a dict of NumPy arrays"
)
_TEXTS = (pa.utf8(), pa.large_utf8())
_NULLABLE = {
    pa.bool_(): "boolean",
    pa.int8(): "Int8",
    pa.int16(): "Int16",
    pa.int32(): "Int32",
    pa.int64(): "Int64",
    pa.uint8(): "UInt8",
    pa.uint16(): "UInt16",
    pa.uint32(): "UInt32",
    pa.uint64(): "UInt64",
    pa.float32(): "Float32",
    pa.float64(): "Float64",
}
"""Names of the nullable dtypes of pandas, by Arrow type."""
_CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)
"""Errors of pyarrow for values that have no Arrow type."""


class InputTable(NamedTuple):
    """A caller's table as record batches.

    Attributes:
        schema: Schema of all batches.
        batches: Record batches in order; an empty table has one batch without rows.
        restore: Converts result batches to an object of the caller's library.
        is_live: Whether the caller may read results before all batches are read.
    """

    schema: pa.Schema
    batches: Batches
    restore: Restore
    is_live: bool = False


def open_source(data: Any) -> InputTable:  # noqa: ANN401
    """Return the record batches of a table of any supported library.

    Raises:
        ContractError: The object is not a table, or its columns differ in length.
    """
    if isinstance(data, pa.RecordBatch):
        return InputTable(data.schema, iter([data]), _to_batch)
    if isinstance(data, pa.Table):
        return _table_source(data, _to_table)
    if isinstance(data, pa.RecordBatchReader):
        return _reader_source(data, _to_reader)._replace(is_live=True)
    if isinstance(data, Mapping):
        return _table_source(_columns_table(data), _to_columns)
    for kind in type(data).__mro__:
        open_table = _LIBRARIES.get(kind.__module__.partition(".")[0])
        source = None if open_table is None else open_table(data)
        if source is not None:
            return source
    return _capsule_source(data)


def _capsule_source(data: Any) -> InputTable:  # noqa: ANN401
    if isinstance(data, type):
        raise ContractError(f"data is the class {data.__name__}; expected {_ACCEPTED}")
    if hasattr(data, "__arrow_c_stream__"):
        return _reader_source(_stream(data), _to_table)
    if hasattr(data, "__arrow_c_array__"):
        with _table_error(data):
            batch = pa.record_batch(data)
        return InputTable(batch.schema, iter([batch]), _to_table)
    raise ContractError(f"data has the type {type(data).__name__}; expected {_ACCEPTED}")


def _stream(data: Any) -> pa.RecordBatchReader:  # noqa: ANN401
    with _table_error(data):
        return pa.RecordBatchReader.from_stream(data)


@contextlib.contextmanager
def _table_error(data: Any) -> Iterator[None]:  # noqa: ANN401
    """Convert errors of the block about an object that is no Arrow table to ContractError."""
    try:
        yield
    except (pa.ArrowInvalid, TypeError) as error:
        text = f"data of the type {type(data).__name__} is no Arrow table: {error}"
        raise ContractError(f"{text}; expected {_ACCEPTED}") from None


def _reader_source(reader: pa.RecordBatchReader, restore: Restore) -> InputTable:
    return InputTable(reader.schema, _at_least_one(reader.schema, reader), restore)


def _table_source(table: pa.Table, restore: Restore) -> InputTable:
    return InputTable(table.schema, _at_least_one(table.schema, table.to_batches()), restore)


def _at_least_one(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Batches:
    """Yield batches; if there are none, yield one without rows, so that results have a schema."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield batch
    if is_empty:
        yield empty_batch(schema)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows, also for types that `from_pylist` lacks."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _to_table(schema: pa.Schema, results: Batches) -> pa.Table:
    return pa.Table.from_batches(results, schema)


def _to_batch(schema: pa.Schema, results: Batches) -> pa.RecordBatch:
    batches = list(results)
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches) if batches else empty_batch(schema)


def _to_reader(schema: pa.Schema, results: Batches) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(schema, results)


def _open_pyarrow(data: Any) -> InputTable | None:  # noqa: ANN401
    """Open a dataset or a scanner."""
    scanner = data.scanner() if hasattr(data, "scanner") else data
    if not hasattr(scanner, "to_reader"):
        return None
    return _reader_source(scanner.to_reader(), _to_table)


def _open_pandas(data: Any) -> InputTable | None:  # noqa: ANN401
    """Open a data frame; the result has the same index."""
    if not isinstance(data, sys.modules["pandas"].DataFrame):
        return None
    try:
        table = pa.Table.from_pandas(data, preserve_index=False)
    except _CONVERSION_ERRORS as error:
        raise ContractError(f"the pandas frame is no Arrow table: {error}") from None
    dtypes = dict(zip(table.column_names, data.dtypes, strict=True))

    def to_pandas(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        # The metadata describes the index of the sent frame, so it is removed.
        scored = _to_table(schema, results).replace_schema_metadata(None)
        kept = {}
        for position, (name, column) in enumerate(zip(schema.names, scored.columns, strict=True)):
            is_same = name in dtypes and table.schema.field(name).type == column.type
            dtype = _extension_dtype(column, dtypes.get(name), is_same=is_same)
            if dtype is not None:
                kept[position] = dtype
        frame = scored.select([i for i in range(len(schema)) if i not in kept]).to_pandas()
        # A frame without columns has no rows.
        frame = frame if frame.shape[1] else sys.modules["pandas"].DataFrame(index=data.index)
        frame.index = data.index
        for position, dtype in kept.items():
            values = dtype.__from_arrow__(scored.column(position))
            frame.insert(position, schema.names[position], values)
        return frame

    return _table_source(table.replace_schema_metadata(None), to_pandas)


def _extension_dtype(column: pa.ChunkedArray, given: Any, *, is_same: bool) -> Any | None:  # noqa: ANN401
    """Return the extension dtype for a result; None for the dtype that pyarrow chooses.

    Args:
        column: The result.
        given: Dtype of the sent frame's column with the same name; None if it has no such column.
        is_same: Whether that column has the Arrow type of the result.
    """
    pandas, kind = sys.modules["pandas"], column.type
    is_extension = hasattr(given, "__from_arrow__")
    if isinstance(given, pandas.ArrowDtype):
        return pandas.ArrowDtype(kind)
    if is_extension and (is_same or (kind in _TEXTS and isinstance(given, pandas.StringDtype))):
        return given
    # NumPy has no nulls for integers, and floats would change large integers.
    is_nullable = column.null_count and not pa.types.is_floating(kind)
    name = _NULLABLE.get(kind) if is_extension or is_nullable else None
    return None if name is None else pandas.api.types.pandas_dtype(name)


def _open_polars(data: Any) -> InputTable | None:  # noqa: ANN401
    """Open an eager frame, or collect a lazy one in batches."""
    polars = sys.modules["polars"]

    def to_frame(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return polars.from_arrow(_to_table(schema, results))

    if isinstance(data, polars.LazyFrame):
        schema = _polars_stream(polars.DataFrame(schema=data.collect_schema())).schema
        batches = (batch for frame in _collect_frames(data) for batch in _polars_stream(frame))
        return InputTable(
            schema,
            _at_least_one(schema, batches),
            lambda schema, results: to_frame(schema, results).lazy(),
        )
    if isinstance(data, polars.DataFrame):
        return _reader_source(_polars_stream(data), to_frame)
    return None


def _polars_stream(frame: Any) -> pa.RecordBatchReader:  # noqa: ANN401
    """Return the batches of a frame; raise a ContractError for a type that Arrow lacks."""
    polars = sys.modules["polars"]
    for name, dtype in frame.schema.items():
        # Polars would export the addresses of the objects.
        if dtype == polars.Object:
            raise _polars_type_error(name, dtype)
    try:
        return pa.RecordBatchReader.from_stream(frame)
    except pa.ArrowInvalid:
        for name, dtype in frame.schema.items():
            try:
                pa.RecordBatchReader.from_stream(frame.select(name).clear())
            except pa.ArrowInvalid:
                raise _polars_type_error(name, dtype) from None
        raise


def _polars_type_error(name: str, dtype: Any) -> ContractError:  # noqa: ANN401
    text = f"column `{name}` has the Polars type {dtype}, which Arrow lacks; cast or drop it"
    return ContractError(text, column=name, got=str(dtype))


def _collect_frames(data: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a lazy frame as frames in order; older versions of Polars yield only one frame."""
    if hasattr(data, "collect_batches"):
        yield from data.collect_batches(maintain_order=True)
    else:
        yield data.collect()


def _open_duckdb(data: Any) -> InputTable | None:  # noqa: ANN401
    """Open a relation; the result is a relation of DuckDB's default connection."""
    if type(data).__name__ != "DuckDBPyRelation":
        return None
    duckdb = sys.modules["duckdb"]

    def to_relation(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return duckdb.from_arrow(_to_table(schema, results))

    return _reader_source(_stream(data), to_relation)


def _open_ibis(data: Any) -> InputTable | None:  # noqa: ANN401
    """Open a table expression; the result is an in-memory table."""
    if not hasattr(data, "__arrow_c_stream__"):
        return None
    ibis = sys.modules["ibis"]

    def to_memtable(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return ibis.memtable(_to_table(schema, results))

    return _reader_source(_stream(data), to_memtable)


def _columns_table(columns: Mapping[str, Any]) -> pa.Table:
    """Convert a dictionary of arrays to a table; axes after the first become lists."""
    arrays = {name: _to_arrow_array(name, values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ContractError(f"columns differ in length: {_named_lengths(lengths)}")
    return pa.table(arrays)


def _named_lengths(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` has {length}" for name, length in lengths.items())


def _to_arrow_array(name: str, values: Any) -> Any:  # noqa: ANN401
    """Convert a NumPy array of one or more dimensions, or a list, to an Arrow array."""
    if not isinstance(name, str):
        raise ContractError(f"column {name!r} has a name of the type {type(name).__name__}")
    shape = getattr(values, "shape", (0,))
    if not shape or isinstance(values, str | bytes):
        raise ContractError(f"column `{name}` has no dimensions, expected rows", column=name)
    try:
        if len(shape) == 1:
            return pa.array(values)
        array = pa.array(values.reshape(-1))
        for size in reversed(shape[1:]):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array
    except (*_CONVERSION_ERRORS, AttributeError) as error:
        raise ContractError(f"column `{name}` is no Arrow array: {error}", column=name) from None


def _to_columns(schema: pa.Schema, results: Batches) -> dict[str, Any]:
    """Convert results to NumPy arrays; lists of a fixed length become axes after the first."""
    table = _to_table(schema, results).combine_chunks()
    return {
        name: _to_numpy(column)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _to_numpy(column: pa.ChunkedArray) -> Any:  # noqa: ANN401
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type)
    if isinstance(array.type, pa.FixedShapeTensorType):
        return _numpy_tensors(array)
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type) and not array.null_count:
        shape.append(array.type.list_size)
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(shape)


def _numpy_tensors(array: Any) -> Any:  # noqa: ANN401
    """Convert tensors to one array; with nulls, to an array of arrays and None."""
    if array.null_count:
        tensors = iter(_numpy_tensors(array.drop_null()))
        rows = array.is_null().to_numpy(zero_copy_only=False).astype(object)
        for index, is_null in enumerate(rows):
            rows[index] = None if is_null else next(tensors)
        return rows
    shape, axes = array.type.shape, array.type.permutation
    values = array.storage.flatten().to_numpy(zero_copy_only=False)
    values = values.reshape([len(array), *shape])
    # `to_numpy_ndarray` of pyarrow 26 has wrong strides if a permutation is not its own inverse.
    return values if axes is None else values.transpose(0, *(axis + 1 for axis in axes))


_LIBRARIES: dict[str, Callable[[Any], InputTable | None]] = {
    "pyarrow": _open_pyarrow,
    "pandas": _open_pandas,
    "polars": _open_polars,
    "duckdb": _open_duckdb,
    "_duckdb": _open_duckdb,
    "ibis": _open_ibis,
}
"""Functions that open objects, by the top-level module of their type."""
