"""`Client.score` of every kind of table with a real server: casts, cuts, errors, shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import ibis
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from onnx import TensorProto
from support import models
from support.processes import MIB, Gateway, eventually, running

from iskander.client import Client
from iskander.client.calls.shared_memory import WORTH_BYTES
from iskander.errors import ContractError, Unsupported

ROWS_MAX = 1000
"""Rows that the server accepts in a batch."""
WIDE = np.arange(3.0 * ROWS_MAX * 32, dtype=np.float32).reshape(-1, 32)
"""Rows of which 1000 are worth shared memory, but not 10."""
assert WIDE[:ROWS_MAX].nbytes > WORTH_BYTES > WIDE[:10].nbytes
NAMED = """
format = 1
passthrough = ["key"]
[[inputs]]
column = "age"
type = "float32"
tensor = "x"
[[outputs]]
column = "y"
type = "float32"
tensor = "y"
"""


class StreamOnly:
    """A table of an unknown library."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


KINDS: dict[str, tuple[Callable[[pa.Table], Any], type, Callable[[Any], pa.Table]]] = {
    "pyarrow table": (lambda table: table, pa.Table, lambda table: table),
    "pyarrow batch": (
        lambda table: table.combine_chunks().to_batches()[0],
        pa.RecordBatch,
        lambda batch: pa.Table.from_batches([batch]),
    ),
    "pyarrow reader": (
        lambda table: table.to_reader(700),
        pa.RecordBatchReader,
        pa.RecordBatchReader.read_all,
    ),
    "pyarrow dataset": (ds.dataset, pa.Table, lambda table: table),
    "Polars frame": (pl.from_arrow, pl.DataFrame, pl.DataFrame.to_arrow),
    "Polars lazy frame": (
        lambda table: pl.from_arrow(table).lazy(),
        pl.LazyFrame,
        lambda frame: frame.collect().to_arrow(),
    ),
    "pandas frame": (
        pa.Table.to_pandas,
        pd.DataFrame,
        lambda frame: pa.Table.from_pandas(frame, preserve_index=False),
    ),
    "DuckDB relation": (
        duckdb.from_arrow,
        duckdb.DuckDBPyRelation,
        lambda rows: rows.to_arrow_table(),
    ),
    "Ibis table": (ibis.memtable, ibis.Table, lambda table: table.to_pyarrow()),
    "stream only": (StreamOnly, pa.Table, lambda table: table),
    "dict of NumPy arrays": (
        lambda table: {name: table[name].to_numpy() for name in table.column_names},
        dict,
        pa.table,
    ),
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("client-frames")
    floats = TensorProto.FLOAT
    paths = {
        "named": models.identity(folder / "named", floats, ["rows"]),
        "vector": models.identity(folder / "vector", floats, ["rows", 2, 3]),
        "wide": models.identity(folder / "wide", floats, ["rows", WIDE.shape[1]]),
        "ids": models.row_ids(folder / "ids"),
    }
    (paths["named"] / "manifest.toml").write_text(NAMED)
    served = [
        {"name": name, "path": str(path), "intra_threads": 1, "max_batch_rows": 64}
        for name, path in paths.items()
    ]
    with running(
        folder,
        served,
        workers={"groups": ["0"]},
        limits={"rows": ROWS_MAX},
        shared_memory={"path": str(folder / "memory")},
    ) as ready:
        yield ready
        ready.wait_idle()


@pytest.fixture
def client(gateway: Gateway) -> Iterator[Client]:
    with Client(gateway.address) as client:
        yield client


def people(rows: int) -> pa.Table:
    """Ages as float64, which the model has as float32, a key that it returns, and a name."""
    ages = np.arange(rows) / 4
    keys = pa.array([f"key {row}" for row in range(rows)], pa.utf8())
    return pa.table({"name": keys, "key": keys, "age": ages})


@pytest.mark.parametrize("rows", [0, 3, 2 * ROWS_MAX + 500])
@pytest.mark.parametrize("name", KINDS)
def test_score_casts_cuts_and_returns_the_same_kind(client: Client, name: str, rows: int) -> None:
    make, kind, read = KINDS[name]
    table = people(rows)
    data = make(table) if rows or name != "pyarrow batch" else people(1).to_batches()[0][:0]
    scored = client.score("named", data)
    assert isinstance(scored, kind)
    result = read(scored)
    assert sorted(result.column_names) == ["key", "y"]
    assert result["key"].to_pylist() == table["key"].to_pylist()
    assert result["y"].to_pylist() == table["age"].to_pylist()


def test_polars_result_of_an_empty_frame_has_the_types_of_results(client: Client) -> None:
    frame = pl.from_arrow(people(0))
    expected = {"key": pl.String, "y": pl.Float32}
    assert dict(client.score("named", frame).schema) == expected
    assert dict(client.score("named", frame.lazy()).collect_schema()) == expected
    assert client.score("named", people(0)).schema.field("y").type == pa.float32()


def test_pandas_result_has_the_index_and_types_of_results(client: Client) -> None:
    frame = people(ROWS_MAX + 1).to_pandas().set_index("name")
    scored = client.score("named", frame)
    pd.testing.assert_index_equal(scored.index, frame.index)
    assert scored["y"].dtype == np.float32


def test_numpy_axes_are_lists_in_both_directions(client: Client) -> None:
    values = np.arange(6.0 * (ROWS_MAX + 1)).reshape(-1, 2, 3)
    scored = client.score("vector", {"x": values})
    np.testing.assert_array_equal(scored["y"], values)
    assert scored["y"].dtype == np.float32


def test_integer_types_of_other_libraries_are_accepted(client: Client) -> None:
    rows = duckdb.sql("SELECT range::UTINYINT AS x FROM range(5)")
    assert client.score("ids", rows).fetchall() == [(1,), (4,), (7,), (10,), (13,)]
    frame = pl.DataFrame({"x": [1, 2]}, {"x": pl.UInt64})
    assert client.score("ids", frame)["y"].to_list() == [4, 7]
    frame = pl.DataFrame({"x": ["1", "2"]}, {"x": pl.Categorical})
    with pytest.raises(ContractError, match="column `x`: wanted int64, got dictionary"):
        client.score("ids", frame)


def test_wrong_column_names_the_nearest(client: Client) -> None:
    frame = pl.DataFrame({"Age": [1.0], "key": ["a"]})
    with pytest.raises(ContractError, match="the nearest is `Age`") as raised:
        client.score("named", frame)
    assert raised.value.model == "named"
    assert raised.value.column == "age"
    assert raised.value.fields["nearest"] == "Age"
    assert client.score("named", frame, columns={"age": "Age"})["y"].to_list() == [1.0]


def test_frame_without_columns_names_the_wanted_column(client: Client) -> None:
    for data in (pl.DataFrame(), pd.DataFrame(), {}, pa.table({})):
        with pytest.raises(ContractError, match="wanted `age`"):
            client.score("named", data)


def test_two_columns_with_one_name_are_an_error_if_the_model_needs_it(client: Client) -> None:
    needed = duckdb.sql("SELECT 1.0 AS age, 2.0 AS age, 'a' AS key")
    with pytest.raises(ContractError, match="2 columns are named `age`"):
        client.score("named", needed)
    unneeded = duckdb.sql("SELECT 1.0 AS age, 2 AS other, 3 AS other, 'a' AS key")
    assert client.score("named", unneeded).fetchall() == [("a", 1.0)]


@pytest.mark.parametrize("in_batches", [False, True])
def test_lossy_value_names_column_and_row_of_the_whole_frame(
    client: Client, in_batches: bool
) -> None:
    ages = np.arange(ROWS_MAX + 700) / 4
    ages[ROWS_MAX + 600] = 0.1
    frame = pd.DataFrame({"age": ages})
    data = pa.Table.from_pandas(frame).to_reader(ROWS_MAX) if in_batches else frame
    with pytest.raises(ContractError, match=r"row 1600 has 0\.1") as raised:
        client.score("named", data)
    assert raised.value.column == "age"
    assert raised.value.fields["row"] == ROWS_MAX + 600
    assert raised.value.fields["wanted"] == "float32"
    assert raised.value.fields["got"] == "float64"


def test_value_that_is_no_table_is_an_error_before_a_connection() -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(ContractError, match="data has the type list"),
    ):
        client.score("named", [{"age": 1.0}])


def test_lazy_result_of_a_reader_may_be_left_unread(client: Client, gateway: Gateway) -> None:
    reader = client.score("named", people(20 * ROWS_MAX).to_reader(ROWS_MAX))
    assert reader.read_next_batch().num_rows > 0
    del reader
    gateway.wait_idle()
    assert client.score("named", people(1))["y"].to_pylist() == [0.0]


def test_large_batches_use_shared_memory_without_a_setting(gateway: Gateway) -> None:
    with Client(gateway.address) as client:
        client.score("wide", {"x": WIDE[:10]})
        assert regions(gateway) == 0
        for rows in (ROWS_MAX, len(WIDE)):
            np.testing.assert_array_equal(
                client.score("wide", {"x": WIDE[:rows]})["y"], WIDE[:rows]
            )
            assert regions(gateway) == 1
    eventually(lambda: regions(gateway) == 0, what="the release of the region")


def test_client_without_shared_memory_uses_the_connection(gateway: Gateway) -> None:
    with Client(gateway.address, shared_bytes=0) as client:
        np.testing.assert_array_equal(client.score("wide", {"x": WIDE})["y"], WIDE)
        assert regions(gateway) == 0


@pytest.mark.slow
def test_server_without_shared_memory_gets_large_batches_over_the_connection(
    tmp_path: Path,
) -> None:
    path = models.identity(tmp_path / "wide", TensorProto.FLOAT, ["rows", WIDE.shape[1]])
    with running(tmp_path, [{"name": "wide", "path": str(path)}], workers={"groups": ["0"]}) as own:
        with Client(own.address) as client:
            for _ in range(2):
                np.testing.assert_array_equal(client.score("wide", {"x": WIDE})["y"], WIDE)
        with (
            Client(own.address, shared_bytes=2 * MIB) as client,
            pytest.raises(Unsupported, match="shared"),
        ):
            client.score("wide", {"x": WIDE})


def regions(gateway: Gateway) -> int:
    """Shared-memory regions of all clients."""
    count: int = gateway.stats()["shared_memory"]["regions"]
    return count
