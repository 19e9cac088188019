"""Iceberg tables as input: frozen snapshot, deletes, changed schemas, and missing files."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.types import DoubleType

from iskander.errors import SourceChanged, SourceError
from iskander.scoring.filters import parse_filter
from iskander.scoring.plan import limited
from iskander.scoring.sources import open_source
from iskander.scoring.sources.iceberg import IcebergSource

pytestmark = pytest.mark.filterwarnings("ignore")
URI = "iceberg://work/db.t"


def data(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table({"id": list(numbers), "name": [f"n{number}" for number in numbers]})


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
    values = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.db", "warehouse": f"file://{tmp_path}"}
    for key, value in values.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__WORK__{key.upper()}", value)
    catalog = load_catalog("work", **values)
    catalog.create_namespace("db")
    yield catalog
    catalog.close()


@pytest.fixture
def table(catalog: Catalog) -> Any:
    table = catalog.create_table("db.t", schema=data(0, 1).schema)
    table.append(data(0, 100))
    table.append(data(100, 100))
    return table


@pytest.fixture(autouse=True)
def configured(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `load_catalog` of the source find the test's catalog."""
    monkeypatch.setattr("pyiceberg.catalog.load_catalog", _loader(catalog))


def _loader(catalog: Catalog) -> Any:
    def load(name: str) -> Catalog:
        if name != "work":
            raise ValueError(f"no catalog {name}")
        return catalog

    return load


def rows(source: Any, columns: list[str] | None = None, filter: str | None = None) -> list[Any]:
    parsed = parse_filter(filter) if filter else None
    found: list[Any] = []
    for unit in source.units():
        for batch in source.read(unit, columns, parsed, 64):
            found += batch.to_pylist()
    return found


def test_rows_columns_and_filter(table: Any) -> None:
    source = open_source([URI])
    assert isinstance(source, IcebergSource)
    assert source.schema.names == ["id", "name"]
    assert sorted(row["id"] for row in rows(source)) == list(range(200))
    assert rows(source, ["name"], "id == 150") == [{"name": "n150"}]
    (unit,) = source.units()
    assert unit.rows == 200 and source.count(unit, parse_filter("id >= 50")) == 150
    sizes = [batch.num_rows for batch in source.read(unit, None, None, 64)]
    assert sizes == [64, 64, 64, 8]
    source.close()


def test_order_is_that_of_the_paths(table: Any) -> None:
    first, second = IcebergSource(URI, unit_bytes=1), IcebergSource(URI, unit_bytes=1)
    assert first.units() == second.units() and len(first.units()) == 2
    paths = [unit.locator["files"][0]["path"] for unit in first.units()]
    assert paths == sorted(paths) and rows(first) == rows(second)


def test_snapshot_is_frozen_at_the_plan(table: Any) -> None:
    source = IcebergSource(URI)
    table.append(data(200, 50))
    assert len(rows(source)) == 200
    later = IcebergSource(URI)
    assert len(rows(later)) == 250 and later.snapshot != source.snapshot
    old = IcebergSource(f"{URI}@{source.snapshot['snapshot']}")
    assert old.snapshot == source.snapshot and old.units() == source.units()


def test_deleted_rows_are_left_out(table: Any) -> None:
    table.delete("id < 30")
    assert sorted(row["id"] for row in rows(IcebergSource(URI))) == list(range(30, 200))


def test_column_that_was_added_later_is_null_in_earlier_files(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("x", DoubleType())
    table.append(data(200, 1).append_column("x", pa.array([1.5])))
    source = IcebergSource(URI)
    values = {row["id"]: row["x"] for row in rows(source)}
    assert values[0] is None and values[200] == 1.5
    assert rows(source, ["id"], "x > 1") == [{"id": 200}]


def test_renamed_column_is_read_by_its_new_name(table: Any) -> None:
    with table.update_schema() as update:
        update.rename_column("name", "title")
    assert rows(IcebergSource(URI), ["title"], "id == 3") == [{"title": "n3"}]


def test_limit_cuts_the_last_unit(table: Any) -> None:
    source = IcebergSource(URI, unit_bytes=1)
    kept = limited(source.units(), 130, lambda unit: source.count(unit, None))
    counts = [sum(b.num_rows for b in source.read(unit, ["id"], None, 64)) for unit in kept]
    assert counts == [100, 30]


def test_empty_table_is_one_unit_without_rows(catalog: Catalog) -> None:
    catalog.create_table("db.t", schema=data(0, 1).schema)
    source = IcebergSource(URI)
    assert [unit.rows for unit in source.units()] == [0] and rows(source) == []
    assert source.snapshot["snapshot"] == "none"


@pytest.mark.parametrize("how", ["gone", "larger"])
def test_changed_data_file_is_rejected_by_name(table: Any, how: str) -> None:
    source = IcebergSource(URI)
    uri = source.units()[0].locator["files"][0]["path"]
    path = Path(urllib.parse.urlparse(uri).path)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SourceChanged, match=path.name):
        rows(source)


@pytest.mark.parametrize(
    "uri",
    [
        "iceberg://work/db.other",
        "iceberg://work/no.t",
        "iceberg://other/db.t",
        "iceberg://work/db.t@12",
        "iceberg://work",
        "iceberg://work/t",
    ],
)
def test_missing_table_is_rejected_by_name(table: Any, uri: str) -> None:
    with pytest.raises(SourceError) as caught:
        IcebergSource(uri)
    assert uri in caught.value.message
