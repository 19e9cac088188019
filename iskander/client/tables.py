"""Tables of any library as record batches, and results as tables of the same library.

A library is recognized by the Arrow PyCapsule interface, or by the module of the object's type; it
is imported only for an object of its own.

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


class Source(NamedTuple):
    """Data of a caller.

    Attributes:
        schema: Schema of all batches.
        batches: Record batches in order; an empty table yields one of no rows.
        restore: Returns result batches as an object of the caller's library.
    """

    schema: pa.Schema
    batches: Batches
    restore: Restore


def open_source(data: Any) -> Source:  # noqa: ANN401
    """Read a table of any supported library.

    Raises:
        ContractError: The object is not a table, or its columns differ in length.
    """
    if isinstance(data, pa.RecordBatch):
        return Source(data.schema, iter([data]), _to_batch)
    if isinstance(data, pa.Table):
        return _table_source(data, _to_table)
    if isinstance(data, pa.RecordBatchReader):
        return _reader_source(data, _to_reader)
    if isinstance(data, Mapping):
        return _table_source(_columns_table(data), _to_columns)
    library = type(data).__module__.partition(".")[0]
    open_table = _LIBRARIES.get(library)
    source = open_table(data) if open_table is not None else None
    if source is None:
        source = _capsule_source(data)
    return source


def _capsule_source(data: Any) -> Source:  # noqa: ANN401
    if hasattr(data, "__arrow_c_stream__"):
        return _reader_source(_stream(data), _to_table)
    if hasattr(data, "__arrow_c_array__"):
        with _table_error(data):
            batch = pa.record_batch(data)
        return Source(batch.schema, iter([batch]), _to_table)
    raise ContractError(f"data is a {type(data).__name__}; expected {_ACCEPTED}")


def _stream(data: Any) -> pa.RecordBatchReader:  # noqa: ANN401
    with _table_error(data):
        return pa.RecordBatchReader.from_stream(data)


@contextlib.contextmanager
def _table_error(data: Any) -> Iterator[None]:  # noqa: ANN401
    """Name the type of an object without columns, such as a series."""
    try:
        yield
    except (pa.ArrowInvalid, TypeError) as error:
        text = f"data is a {type(data).__name__}, not a table: {error}"
        raise ContractError(f"{text}; expected {_ACCEPTED}") from None


def _reader_source(reader: pa.RecordBatchReader, restore: Restore) -> Source:
    return Source(reader.schema, _at_least_one(reader.schema, reader), restore)


def _table_source(table: pa.Table, restore: Restore) -> Source:
    return Source(table.schema, _at_least_one(table.schema, table.to_batches()), restore)


def _at_least_one(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Batches:
    """Yield batches; one without rows if there are none, so that the result has a schema."""
    is_empty = True
    for batch in batches:
        is_empty = False
        yield batch
    if is_empty:
        yield pa.RecordBatch.from_pylist([], schema)


def _to_table(schema: pa.Schema, results: Batches) -> pa.Table:
    return pa.Table.from_batches(results, schema)


def _to_batch(schema: pa.Schema, results: Batches) -> pa.RecordBatch:
    batches = list(results)
    if len(batches) == 1:
        return batches[0]
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema)


def _to_reader(schema: pa.Schema, results: Batches) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(schema, results)


def _open_pyarrow(data: Any) -> Source | None:  # noqa: ANN401
    """Open a dataset or a scanner."""
    scanner = data.scanner() if hasattr(data, "scanner") else data
    if not hasattr(scanner, "to_reader"):
        return None
    return _reader_source(scanner.to_reader(), _to_table)


def _open_pandas(data: Any) -> Source | None:  # noqa: ANN401
    """Open a data frame; the result has its index."""
    if type(data).__name__ != "DataFrame":
        return None

    def to_pandas(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        # Without the metadata of the sent frame, which describes its index.
        frame = _to_table(schema, results).replace_schema_metadata(None).to_pandas()
        frame.index = data.index
        return frame

    try:
        table = pa.Table.from_pandas(data, preserve_index=False)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ContractError(f"the pandas frame is no Arrow table: {error}") from None
    return _table_source(table.replace_schema_metadata(None), to_pandas)


def _open_polars(data: Any) -> Source | None:  # noqa: ANN401
    """Open an eager frame, or collect a lazy one in batches."""
    polars = sys.modules["polars"]

    def to_frame(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return polars.from_arrow(_to_table(schema, results))

    if isinstance(data, polars.LazyFrame):
        schema = pa.schema(pa.table(polars.DataFrame(schema=data.collect_schema())).schema)
        batches = (batch for frame in data.collect_batches() for batch in _stream(frame))
        return Source(
            schema,
            _at_least_one(schema, batches),
            lambda schema, results: to_frame(schema, results).lazy(),
        )
    if isinstance(data, polars.DataFrame):
        return _reader_source(_stream(data), to_frame)
    return None


def _open_duckdb(data: Any) -> Source | None:  # noqa: ANN401
    """Open a relation; the result is a relation of DuckDB's default connection."""
    if type(data).__name__ != "DuckDBPyRelation":
        return None
    duckdb = sys.modules["duckdb"]

    def to_relation(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return duckdb.from_arrow(_to_table(schema, results))

    return _reader_source(_stream(data), to_relation)


def _open_ibis(data: Any) -> Source | None:  # noqa: ANN401
    """Open a table expression; the result is an in-memory table."""
    if not hasattr(data, "__arrow_c_stream__"):
        return None
    ibis = sys.modules["ibis"]

    def to_memtable(schema: pa.Schema, results: Batches) -> Any:  # noqa: ANN401
        return ibis.memtable(_to_table(schema, results))

    return _reader_source(_stream(data), to_memtable)


def _columns_table(columns: Mapping[str, Any]) -> pa.Table:
    """Return a dictionary of arrays as a table; two-dimensional arrays become lists."""
    arrays = {name: _array(name, values) for name, values in columns.items()}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ContractError(f"columns differ in length: {_named_lengths(lengths)}")
    return pa.table(arrays)


def _named_lengths(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"`{name}` has {length}" for name, length in lengths.items())


def _array(name: str, values: Any) -> Any:  # noqa: ANN401
    """Return a NumPy array of one or two dimensions, or a list, as an Arrow array."""
    dimensions = getattr(values, "ndim", 1)
    try:
        if dimensions == 2:
            flat = pa.array(values.reshape(-1))
            return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        if dimensions == 1:
            return pa.array(values)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise ContractError(f"column `{name}` is no Arrow array: {error}", column=name) from None
    text = f"column `{name}` has {dimensions} dimensions, expected 1 or 2"
    raise ContractError(text, column=name)


def _to_columns(schema: pa.Schema, results: Batches) -> dict[str, Any]:
    """Return results as NumPy arrays; lists of one length become two-dimensional arrays."""
    table = _to_table(schema, results).combine_chunks()
    return {
        name: _numpy(column.combine_chunks())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def _numpy(array: Any) -> Any:  # noqa: ANN401
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_fixed_size_list(array.type) and not array.null_count:
        values = array.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(array), array.type.list_size)
    return array.to_numpy(zero_copy_only=False)


_LIBRARIES: dict[str, Callable[[Any], Source | None]] = {
    "pyarrow": _open_pyarrow,
    "pandas": _open_pandas,
    "polars": _open_polars,
    "duckdb": _open_duckdb,
    "_duckdb": _open_duckdb,
    "ibis": _open_ibis,
}
"""Functions that open objects, by the top-level module of their type."""
