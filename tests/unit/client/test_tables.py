"""Tables of the real libraries as record batches, and results as tables of the same library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import duckdb
import ibis
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from iskander.client.tables import open_source
from iskander.errors import ContractError, QueueFull

TABLE = pa.table({"x": [3, 1, 2], "text": ["a", "b", None]})
EXPECTED = {"y": [3, 1, 2]}


class StreamOnly:
    """A table of an unknown library."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


class ArrayOnly:
    """A batch of an unknown library."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._batch.__arrow_c_array__(requested_schema)


class PolarsSubclass(pl.DataFrame):
    """A frame of a class of the caller."""


class PandasSubclass(pd.DataFrame):
    """A frame of a class of the caller."""


class ResultKind(NamedTuple):
    """An expected kind of result, and its columns as lists."""

    kind: Any
    read: Callable[[Any], dict[str, list[Any]]]


def batch_of(table: pa.Table) -> pa.RecordBatch:
    columns = [column.combine_chunks() for column in table.columns]
    return pa.record_batch(columns, schema=table.schema)


def numpy_lists(columns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in columns.items()}


ARROW_TABLE = ResultKind(pa.Table, pa.Table.to_pydict)
POLARS = ResultKind(pl.DataFrame, lambda frame: frame.to_dict(as_series=False))
PANDAS = ResultKind(pd.DataFrame, lambda frame: frame.to_dict("list"))
KINDS: dict[str, tuple[Callable[[pa.Table], Any], ResultKind]] = {
    "pyarrow table": (lambda table: table, ARROW_TABLE),
    "pyarrow batch": (batch_of, ResultKind(pa.RecordBatch, pa.RecordBatch.to_pydict)),
    "pyarrow reader": (
        pa.Table.to_reader,
        ResultKind(pa.RecordBatchReader, lambda reader: reader.read_all().to_pydict()),
    ),
    "pyarrow dataset": (ds.dataset, ARROW_TABLE),
    "pyarrow scanner": (lambda table: ds.dataset(table).scanner(), ARROW_TABLE),
    "Polars frame": (pl.from_arrow, POLARS),
    "Polars lazy frame": (
        lambda table: pl.from_arrow(table).lazy(),
        ResultKind(pl.LazyFrame, lambda frame: frame.collect().to_dict(as_series=False)),
    ),
    "Polars subclass": (lambda table: PolarsSubclass(pl.from_arrow(table)), POLARS),
    "pandas frame": (pa.Table.to_pandas, PANDAS),
    "pandas subclass": (lambda table: PandasSubclass(table.to_pandas()), PANDAS),
    "DuckDB relation": (
        duckdb.from_arrow,
        ResultKind(duckdb.DuckDBPyRelation, lambda rows: rows.to_arrow_table().to_pydict()),
    ),
    "Ibis table": (
        ibis.memtable,
        ResultKind(ibis.Table, lambda table: table.to_pyarrow().to_pydict()),
    ),
    "stream only": (StreamOnly, ARROW_TABLE),
    "array only": (lambda table: ArrayOnly(batch_of(table)), ARROW_TABLE),
    "dict of NumPy arrays": (
        lambda table: {
            name: column.to_numpy()
            for name, column in zip(table.column_names, table.columns, strict=True)
        },
        ResultKind(dict, numpy_lists),
    ),
}


def scored(data: Any) -> tuple[list[pa.RecordBatch], Any]:
    """Return the batches of a source, and the result of a model that renames `x`."""
    source = open_source(data)
    batches = list(source.batches)
    assert all(batch.schema == source.schema for batch in batches)
    schema = pa.schema([source.schema.field("x").with_name("y")])
    results = [pa.record_batch([batch.column("x")], schema=schema) for batch in batches]
    return batches, source.restore(schema, iter(results))


@pytest.mark.parametrize("name", KINDS)
def test_table_gives_its_rows_and_a_result_of_its_kind(name: str) -> None:
    make, expected = KINDS[name]
    batches, result = scored(make(TABLE))
    sent = pa.Table.from_batches(batches)
    assert sent["x"].to_pylist() == [3, 1, 2]
    assert sent["text"].to_pylist() == ["a", "b", None]
    assert isinstance(result, expected.kind)
    assert expected.read(result) == EXPECTED


@pytest.mark.parametrize("name", KINDS)
def test_table_without_rows_gives_one_batch_of_its_schema(name: str) -> None:
    make, expected = KINDS[name]
    batches, result = scored(make(TABLE.schema.empty_table()))
    assert [batch.num_rows for batch in batches] == [0]
    assert batches[0].schema.names == ["x", "text"]
    assert isinstance(result, expected.kind)
    assert expected.read(result) == {"y": []}


@pytest.mark.parametrize(
    "data",
    [pa.table({}), pl.DataFrame(), pl.LazyFrame(), pd.DataFrame(), {}],
    ids=["pyarrow", "Polars", "lazy", "pandas", "dict"],
)
def test_table_without_columns_gives_a_batch_without_columns(data: Any) -> None:
    source = open_source(data)
    assert source.schema.names == []
    assert [batch.num_rows for batch in source.batches] == [0]


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["a"]), pl.List(pl.String), pl.Datetime])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_polars_frame_without_rows_keeps_its_types(kind: Any, is_lazy: bool) -> None:
    frame = pl.DataFrame(schema={"x": kind})
    _, result = scored(frame.lazy() if is_lazy else frame)
    assert dict(result.lazy().collect_schema()) == {"y": kind}


def test_lazy_frame_is_collected_in_order_and_only_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def count(column: pl.Series) -> pl.Series:
        calls.append(len(column))
        return column

    lazy = pl.LazyFrame({"x": range(200_000)}).with_columns(
        pl.col("x").map_batches(count, return_dtype=pl.Int64)
    )
    source = open_source(lazy)
    assert calls == []
    assert pa.Table.from_batches(source.batches)["x"].to_pylist() == list(range(200_000))
    # Versions of Polars before 1.34.
    monkeypatch.delattr(pl.LazyFrame, "collect_batches")
    assert pa.Table.from_batches(open_source(lazy).batches)["x"].to_pylist() == list(range(200_000))


def test_pandas_result_has_the_index() -> None:
    index = pd.MultiIndex.from_tuples([("a", 1), ("a", 2), ("b", 1)], names=["site", "day"])
    frame = pd.DataFrame({"x": [1, 2, 3]}, index=index)
    batches, result = scored(frame)
    assert batches[0].schema.names == ["x"]
    pd.testing.assert_index_equal(result.index, index)
    _, empty = scored(frame[:0])
    pd.testing.assert_index_equal(empty.index, index[:0])


def returned(frame: pd.DataFrame) -> pd.DataFrame:
    """The result of a model that passes all columns through."""
    source = open_source(frame)
    return source.restore(source.schema, source.batches)


EXTENSIONS = {
    "Int64": pd.array([2**53 + 1, None, 5], "Int64"),
    "Int64 without nulls": pd.array([1, 2, 3], "Int64"),
    "UInt8": pd.array([1, None, 5], "UInt8"),
    "Float32": pd.array([0.5, None, 1], "Float32"),
    "boolean": pd.array([True, None, False], "boolean"),
    "string": pd.array(["a", None, "b"], "string"),
    "string[python]": pd.array(["a", None, "b"], "string[python]"),
    "str": pd.array(["a", None, "b"], "str"),
    "pyarrow integers": pd.array([2**60 + 1, None, 5], "int64[pyarrow]"),
    "pyarrow text": pd.array(["a", None, "b"], pd.ArrowDtype(pa.large_string())),
    "pyarrow lists": pd.array([[1], None, []], pd.ArrowDtype(pa.list_(pa.int64()))),
    "category": pd.Categorical(["b", None, "a"], ordered=True),
    "period": pd.period_range("2020", periods=3, freq="D"),
    "interval": pd.interval_range(0, 3),
    "zone": pd.date_range("2020", periods=3, tz="Europe/Paris"),
}


@pytest.mark.parametrize(
    ("name", "rows"),
    # A batch of no rows has no categories.
    [(name, rows) for name in EXTENSIONS for rows in (3, 0) if rows or name != "category"],
)
def test_pandas_columns_with_an_extension_dtype_are_returned_as_sent(name: str, rows: int) -> None:
    only = pd.DataFrame({"k": EXTENSIONS[name]}, index=["a", "b", "c"])[:rows]
    pd.testing.assert_frame_equal(returned(only), only)
    among = pd.DataFrame({"a": [1, 2, 3], "k": EXTENSIONS[name], "b": [0.5, np.nan, 1]})[:rows]
    pd.testing.assert_frame_equal(returned(among), among)


def test_numpy_columns_of_pandas_are_returned_as_numpy() -> None:
    columns: dict[str, Any] = {"i": [1, 2], "b": [True, False], "f": np.float32([1, np.nan])}
    frame = pd.DataFrame({**columns, "t": pd.to_datetime(["2020", "2021"])})
    pd.testing.assert_frame_equal(returned(frame), frame)


def test_integers_with_nulls_are_not_returned_as_floats() -> None:
    frame = pd.DataFrame({"i": pd.Series([2**53 + 1, None], dtype=object)})
    assert returned(frame)["i"].tolist() == [2**53 + 1, pd.NA]


def test_result_of_another_type_has_the_nullable_dtype_of_its_type() -> None:
    frame = pd.DataFrame({"x": pd.array([1.0, None], "Float64"), "y": pd.array([1, 2], "Int8")})
    result = pa.record_batch({"x": pa.array([1, None]), "y": pa.array(["a", "b"]), "z": [1, 2]})
    scored = open_source(frame).restore(result.schema, iter([result]))
    assert scored["x"].dtype == "Int64"
    assert scored["y"].tolist() == ["a", "b"]
    assert scored["z"].dtype == np.int64


def test_missing_values_of_pandas_are_nulls() -> None:
    (batch,) = open_source(pd.DataFrame({"x": [0.5, np.nan]})).batches
    assert batch.to_pydict() == {"x": [0.5, None]}


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (pd.DataFrame([[1, 2]], columns=["x", "x"]), "Duplicate column names"),
        (pd.DataFrame({"x": [1, "a"]}), "column x"),
        (pd.DataFrame({"x": [2**70]}), "too large"),
        (pd.DataFrame({"x": [1j]}), "column x"),
    ],
    ids=["repeated name", "mixed types", "large integer", "complex"],
)
def test_pandas_frame_without_arrow_types_is_an_error(frame: pd.DataFrame, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        open_source(frame)


def test_relation_of_another_connection_gives_one_of_the_default_connection() -> None:
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE own AS SELECT range AS x FROM range(5000)")
        _, result = scored(connection.sql("FROM own ORDER BY x DESC"))
    assert result.aggregate("count(*), max(y)").fetchall() == [(5000, 4999)]
    assert duckdb.sql("SELECT min(y) FROM result").fetchall() == [(0,)]


def test_reader_is_read_as_its_result_is_read() -> None:
    read: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        for number in range(3):
            read.append(number)
            yield pa.record_batch({"x": [number]})

    source = open_source(pa.RecordBatchReader.from_batches(pa.schema({"x": pa.int64()}), batches()))
    assert source.is_live
    result = source.restore(source.schema, source.batches)
    assert read == []
    assert result.read_next_batch().to_pydict() == {"x": [0]}
    assert read == [0]


def test_error_of_a_result_keeps_its_type_in_a_reader() -> None:
    def results() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"x": [1]})
        raise QueueFull("queue full", retry_after_ms=5)

    source = open_source(TABLE.to_reader())
    reader = source.restore(pa.schema({"x": pa.int64()}), results())
    with pytest.raises(QueueFull, match="queue full") as raised:
        reader.read_all()
    assert raised.value.retry_after_ms == 5


def test_several_results_of_a_batch_are_one_batch() -> None:
    batch = pa.record_batch({"x": [1, 2]})
    result = open_source(batch).restore(batch.schema, iter([batch[:1], batch[1:]]))
    assert result == batch
    assert open_source(batch).restore(batch.schema, iter([])) == batch[:0]


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2), (0, 3)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_axes_of_numpy_arrays_are_lists_in_both_directions(
    shape: tuple[int, ...], is_transposed: bool
) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    values = values.T.copy().T if is_transposed else values
    batches, result = scored({"x": values})
    assert sum(batch.num_rows for batch in batches) == shape[0]
    assert result["y"].dtype == np.float32
    np.testing.assert_array_equal(result["y"], values)


def test_results_of_several_batches_and_tensors_are_arrays() -> None:
    values = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    batch = pa.record_batch([tensors], names=["y"])
    restore = open_source({"x": values}).restore
    result = restore(batch.schema, iter([batch[:1], batch[1:]]))
    np.testing.assert_array_equal(result["y"], values)
    with_null = pa.record_batch({"y": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))})
    rows = restore(with_null.schema, iter([with_null]))["y"].tolist()
    assert rows[0].tolist() == [1, 2]
    assert rows[1] is None


@pytest.mark.parametrize("permutation", [[1, 0, 2], [2, 0, 1], [0, 1, 2], None])
@pytest.mark.parametrize("has_null", [False, True])
def test_permuted_tensors_are_arrays_with_their_logical_axes(
    permutation: list[int] | None, has_null: bool
) -> None:
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 3, 4), permutation=permutation)
    big = 2**24
    rows = [[*range(24)], None if has_null else [0] * 24, [*range(big, big + 24)]]
    tensors = pa.ExtensionArray.from_storage(kind, pa.array(rows, kind.storage_type))
    batch = pa.record_batch({"y": tensors})
    result = open_source({"x": [1]}).restore(batch.schema, iter([batch[:1], batch[1:]]))["y"]
    for index, row in enumerate(rows):
        if row is None:
            assert result[index] is None
        else:
            wanted = np.array(row, np.int32).reshape(2, 3, 4)
            wanted = wanted if permutation is None else wanted.transpose(permutation)
            np.testing.assert_array_equal(result[index], wanted)
            assert result[index].dtype == np.int32
    assert result.dtype == (object if has_null else np.int32)
    if permutation == [1, 0, 2] and not has_null:
        np.testing.assert_array_equal(result, tensors.to_numpy_ndarray())


def test_table_of_no_rows_may_have_unions() -> None:
    union = pa.dense_union([pa.field("a", pa.int8())])
    schema = pa.schema([("x", pa.int64()), ("u", union), ("l", pa.list_(union))])
    (batch,) = open_source(pa.Table.from_batches([], schema)).batches
    assert (batch.num_rows, batch.schema) == (0, schema)


def test_dict_may_have_lists_and_columns_of_other_libraries() -> None:
    columns = {
        "list": ["a", None],
        "lists": [[1], [2, 3]],
        "polars": pl.Series([1, 2]),
        "pandas": pd.Series([1, 2]),
        "arrow": pa.array([1, 2]),
        "masked": np.ma.masked_array([1, 2], [False, True]),
    }
    (batch,) = open_source(columns).batches
    assert batch.to_pydict() == {
        "list": ["a", None],
        "lists": [[1], [2, 3]],
        "polars": [1, 2],
        "pandas": [1, 2],
        "arrow": [1, 2],
        "masked": [1, None],
    }


def test_columns_of_different_lengths_are_named_with_their_lengths() -> None:
    with pytest.raises(ContractError, match=r"`a` has 1, `b` has 2"):
        open_source({"a": [1], "b": np.arange(2)})


@pytest.mark.parametrize(
    "values",
    [
        *(5, None, "abc", b"abc", np.array(5), np.ones((2, 0)), [object()], [2**70], [1, "a"]),
        *(np.arange(2, dtype=">i4"), np.array([[1, "a"]], dtype=object), pd.DataFrame({"a": [1]})),
    ],
    ids=lambda values: type(values).__name__,
)
def test_values_that_are_no_column_name_the_column(values: Any) -> None:
    with pytest.raises(ContractError, match="`x`") as raised:
        open_source({"x": values})
    assert raised.value.column == "x"


def test_column_name_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ContractError, match="column 1 has a name of the type int"):
        open_source({1: [5]})


NO_TABLES: dict[str, Any] = {
    "int": 5,
    "None": None,
    "text": "x",
    "list": [{"x": 1}],
    "NumPy array": np.arange(3),
    "pyarrow array": pa.array([1]),
    "pyarrow chunked array": pa.chunked_array([[1]]),
    "struct with nulls": pa.array([{"x": 1}, None]),
    "pyarrow schema": TABLE.schema,
    "Polars series": pl.Series([1]),
    "Polars expression": pl.col("x"),
    "pandas series": pd.Series([1]),
    "pandas index": pd.Index([1]),
    "DuckDB connection": duckdb.connect(),
    "Ibis column": ibis.memtable(TABLE).x,
    "class": pl.DataFrame,
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_object_that_is_no_table_is_an_error_with_its_type(name: str) -> None:
    data = NO_TABLES[name]
    with pytest.raises(ContractError, match="expected a pyarrow table") as raised:
        open_source(data)
    kind = data if isinstance(data, type) else type(data)
    assert kind.__name__ in raised.value.message


def test_polars_type_that_arrow_lacks_is_named() -> None:
    frame = pl.DataFrame({"x": [1]}, schema={"x": pl.Int128})
    for data in (frame, frame.lazy()):
        with pytest.raises(ContractError, match="column `x` has the Polars type Int128") as raised:
            open_source(data)
        assert raised.value.column == "x"


def test_polars_type_that_arrow_lacks_is_named_inside_lists_and_beside_others() -> None:
    frame = pl.DataFrame({"a": [1], "x": [[1]]}, schema={"a": pl.Int64, "x": pl.List(pl.Int128)})
    with pytest.raises(ContractError, match=r"column `x` has the Polars type List\(Int128\)"):
        open_source(frame)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_python_objects_of_polars_are_an_error_and_not_sent_as_addresses(is_lazy: bool) -> None:
    frame = pl.DataFrame({"x": [1], "o": pl.Series([object()], dtype=pl.Object)})
    with pytest.raises(ContractError, match="column `o` has the Polars type Object") as raised:
        open_source(frame.lazy() if is_lazy else frame)
    assert raised.value.column == "o"


def test_repeated_names_are_left_to_the_matching() -> None:
    for data in (
        pa.table([[1], [2]], names=["x", "x"]),
        duckdb.sql("SELECT 1 AS x, 2 AS x"),
    ):
        assert open_source(data).schema.names == ["x", "x"]


def test_no_library_is_imported_for_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("polars", "pandas", "duckdb", "ibis"):
        monkeypatch.delitem(sys.modules, library)
    open_source(TABLE)
    open_source({"x": [1]})
    open_source(StreamOnly(TABLE))
    assert not {"polars", "pandas", "duckdb", "ibis"} & set(sys.modules)
