"""Iceberg tables as input: frozen snapshot, deletes, changed schemas, and missing files."""

from __future__ import annotations

import datetime
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType

from iskander.errors import SourceChanged, SourceError, Unsupported
from iskander.lake.filters import parse_filter
from iskander.lake.plan import limit_units
from iskander.lake.positions import Position
from iskander.lake.sources import open_source
from iskander.lake.sources.iceberg import IcebergSource

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
    kept = limit_units(source.units(), 130, lambda unit: source.count(unit, None))
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


class DeletesWriter(ManifestWriterV2):
    """Writer of a manifest with files of deletes, which the library does not write."""

    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def local(uri: str) -> Path:
    return Path(urllib.parse.urlparse(uri).path)


def delete_by(table: Any, content: DataFileContent, data: pa.Table, **values: Any) -> None:
    """Commit a file of deletes to a table."""
    uri = f"{table.location()}/data/deletes.parquet"
    pq.write_table(data, local(uri))
    earlier = table.current_snapshot()
    new = earlier.snapshot_id + 1
    file = DataFile.from_args(
        content=content,
        file_path=uri,
        file_format=values.pop("file_format", FileFormat.PARQUET),
        partition=Record(),
        record_count=data.num_rows,
        file_size_in_bytes=local(uri).stat().st_size,
        **values,
    )
    file.spec_id = 0
    entry = ManifestEntry.from_args(
        status=ManifestEntryStatus.ADDED, snapshot_id=new, sequence_number=None, data_file=file
    )
    output = table.io.new_output(f"{table.location()}/metadata/deletes.avro")
    with DeletesWriter(table.spec(), table.schema(), output, new, "null") as writer:
        writer.add_entry(entry)
    number = table.metadata.next_sequence_number()
    manifests = table.io.new_output(f"{table.location()}/metadata/list.avro")
    with write_manifest_list(2, manifests, new, earlier.snapshot_id, number, "null") as listing:
        listing.add_manifests([writer.to_manifest_file(), *earlier.manifests(table.io)])
    snapshot = Snapshot(
        snapshot_id=new,
        parent_snapshot_id=earlier.snapshot_id,
        sequence_number=number,
        timestamp_ms=earlier.timestamp_ms + 1,
        manifest_list=manifests.location,
        summary=Summary(Operation.DELETE),
        schema_id=table.schema().schema_id,
    )
    transaction = table.transaction()
    main = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=new)
    transaction._apply((AddSnapshotUpdate(snapshot=snapshot), main), ())
    transaction.commit_transaction()


def test_deletes_by_position_are_left_out(table: Any) -> None:
    files = {ids[0]: uri for uri, ids in data_files(table).items()}
    data = pa.table(
        {
            "file_path": [files[0], files[0], files[100]],
            "pos": pa.array([0, 99, 50], pa.int64()),
        }
    )
    delete_by(table, DataFileContent.POSITION_DELETES, data)
    source = IcebergSource(URI)
    kept = sorted(set(range(200)) - {0, 99, 150})
    assert sorted(row["id"] for row in rows(source)) == kept
    (unit,) = source.units()
    assert source.count(unit, None) == 197
    # The library does not tell which row of the file it left out.
    assert source.locate(unit, 150, None) in [Position(uri, None) for uri in files.values()]


@pytest.mark.parametrize("text", [None, "id >= 50"])
def test_row_is_found_in_its_file(table: Any, text: str | None) -> None:
    source = IcebergSource(URI)
    condition = None if text is None else parse_filter(text)
    (unit,) = source.units()
    files = {number: (uri, ids.index(number)) for uri, ids in data_files(table).items()
             for number in ids}  # fmt: skip
    numbers = [row["id"] for row in rows(source, ["id"], text)]
    found = [source.locate(unit, index, condition) for index in range(0, len(numbers), 31)]
    assert found == [Position(*files[number]) for number in numbers[::31]]
    assert source.locate(unit, len(numbers), condition) is None


def data_files(table: Any) -> dict[str, list[int]]:
    uris = [task.file.file_path for task in table.scan().plan_files()]
    return {uri: pq.read_table(local(uri))["id"].to_pylist() for uri in uris}


def test_equality_deletes_are_rejected_by_name(table: Any) -> None:
    deleted = pa.table({"id": pa.array([3], pa.int64())})
    delete_by(table, DataFileContent.EQUALITY_DELETES, deleted, equality_ids=[1])
    with pytest.raises(Unsupported, match=f"{URI}: .* it has equality deletes; supported are"):
        IcebergSource(URI)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"file_format": FileFormat.ORC}, "format ORC"),
        ({"file_format": FileFormat.PUFFIN}, "format PUFFIN"),
        ({"key_metadata": b"key"}, "is encrypted"),
    ],
)
def test_other_files_are_rejected_by_name(table: Any, values: dict[str, Any], text: str) -> None:
    """Deletion vectors are in Puffin files."""
    (first, *_) = data_files(table)
    positions = pa.table({"file_path": [first], "pos": pa.array([0], pa.int64())})
    delete_by(table, DataFileContent.POSITION_DELETES, positions, **values)
    with pytest.raises(Unsupported, match=text):
        IcebergSource(URI)


def rewrite(table: Any, change: Any) -> None:
    """Change the metadata of a table, as a later writer would."""
    path = local(table.metadata_location)
    metadata = json.loads(path.read_text())
    change(metadata)
    path.write_text(json.dumps(metadata))


@pytest.mark.parametrize("version", [3, 4])
def test_later_format_versions_are_rejected_by_name(table: Any, version: int) -> None:
    def change(metadata: dict[str, Any]) -> None:
        metadata |= {"format-version": version, "next-row-id": 200}

    rewrite(table, change)
    with pytest.raises((Unsupported, SourceError), match=f"(?s){URI}: .*version"):
        IcebergSource(URI)


def test_default_values_of_columns_are_rejected_by_name(table: Any) -> None:
    with table.update_schema() as update:
        update.add_column("x", DoubleType())

    def change(metadata: dict[str, Any]) -> None:
        for schema in metadata["schemas"]:
            for field in schema["fields"]:
                if field["name"] == "x":
                    field["initial-default"] = 1.5

    rewrite(table, change)
    with pytest.raises(Unsupported, match="column 'x' has a default value"):
        IcebergSource(URI)


@pytest.mark.parametrize("form", ["", "/data", "/data/*", "/..", "/data/{file}"])
def test_data_files_are_no_plain_files(table: Any, form: str) -> None:
    """They have deleted rows too."""
    table.delete("id < 30")
    folder = local(table.location())
    file = min((folder / "data").glob("*.parquet")).name
    path = f"{folder}{form.format(file=file)}"
    with pytest.raises(SourceError, match=rf"the Iceberg table {folder}, .* iceberg://CATALOG"):
        open_source([path])
    if form == "/data":
        assert len(rows(open_source([path], plain_files=True))) == 270


def test_version_1_is_read(catalog: Catalog) -> None:
    table = catalog.create_table(
        "db.t", schema=data(0, 1).schema, properties={"format-version": "1"}
    )
    table.append(data(0, 3))
    assert table.format_version == 1
    assert [row["id"] for row in rows(IcebergSource(URI))] == [0, 1, 2]


def test_files_without_ids_are_read_by_the_name_mapping(table: Any, tmp_path: Path) -> None:
    with table.update_schema() as update:
        update.rename_column("name", "title")
    added = pa.table({"title": ["x"], "id": [200]})
    pq.write_table(added, tmp_path / "added.parquet")
    table.add_files([str(tmp_path / "added.parquet")])
    found = rows(IcebergSource(URI), None, "id >= 199")
    assert sorted(found, key=lambda row: row["id"]) == [
        {"id": 199, "title": "n199"},
        {"id": 200, "title": "x"},
    ]
    pq.write_table(pa.table({"other": ["x"], "id": [200]}), tmp_path / "added.parquet")
    with pytest.raises(SourceError):
        rows(IcebergSource(URI))


def test_file_with_int96_times_is_rejected(catalog: Catalog, tmp_path: Path) -> None:
    """The library would read the year 9999 as 1815."""
    times = pa.table({"t": pa.array([datetime.datetime(9999, 1, 1)], pa.timestamp("us")), "i": [1]})
    table = catalog.create_table("db.t", schema=times.schema)
    path = tmp_path / "added.parquet"
    pq.write_table(times, path)
    table.add_files([str(path)])
    assert rows(IcebergSource(URI))[0]["t"].year == 9999
    pq.write_table(times, path, use_deprecated_int96_timestamps=True)
    size = path.stat().st_size
    source = IcebergSource(URI)
    for unit in source.units():
        unit.locator["files"][0]["bytes"] = size
    with pytest.raises(
        SourceError, match=r"added\.parquet: columns t have times of the type INT96"
    ):
        rows(source)
    assert rows(source, ["i"]) == [{"i": 1}]
