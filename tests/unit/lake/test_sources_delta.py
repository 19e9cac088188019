"""Delta tables as input: frozen version, partitions, changed schemas, and rejected features."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from iskander.errors import SourceChanged, SourceError, Unsupported
from iskander.lake.filters import parse_filter
from iskander.lake.sources import open_source
from iskander.lake.sources.delta import DeltaSource


def table(start: int, count: int) -> pa.Table:
    numbers = range(start, start + count)
    return pa.table(
        {
            "id": list(numbers),
            "p": ["a b", "ü", None, "c/d"][: count % 5] or ["x"] * count,
            "day": [datetime.date(2024, 1, 1 + start)] * count,
        }
    )


def rows(source: Any, filter: str | None = None) -> list[dict[str, Any]]:
    parsed = parse_filter(filter) if filter else None
    found: list[dict[str, Any]] = []
    for unit in source.units():
        for batch in source.read(unit, None, parsed, 100):
            assert batch.schema == source.schema
            found += batch.to_pylist()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> str:
    path = str(tmp_path / "a b ü")
    deltalake.write_deltalake(path, table(0, 4), partition_by=["p", "day"])
    return path


@pytest.mark.parametrize("form", ["{}", "delta://{}"])
def test_rows_and_partition_values(folder: str, form: str) -> None:
    source = open_source([form.format(folder)])
    assert isinstance(source, DeltaSource)
    assert sorted(row["id"] for row in rows(source)) == [0, 1, 2, 3]
    assert {row["id"]: (row["p"], row["day"]) for row in rows(source)}[2] == (
        None,
        datetime.date(2024, 1, 1),
    )
    assert [row["id"] for row in rows(source, "p == 'c/d' and day == '2024-01-01'")] == [3]
    assert sum(unit.rows or 0 for unit in source.units()) == 4
    assert source.count(source.units()[0], parse_filter("id > 1")) == 2
    source.close()


def test_version_is_frozen_at_the_plan(folder: str) -> None:
    source = DeltaSource(folder)
    deltalake.write_deltalake(folder, table(4, 4), mode="append")
    assert sorted(row["id"] for row in rows(source)) == [0, 1, 2, 3]
    assert source.snapshot["version"] == "0"
    paths = [file["path"] for unit in source.units() for file in unit.locator["files"]]
    assert paths == sorted(paths) and len(paths) == 4
    later = DeltaSource(folder)
    assert later.snapshot["version"] == "1" and len(rows(later)) == 8
    first = DeltaSource(f"{folder}@v0")
    assert first.snapshot == source.snapshot and first.units() == source.units()
    assert open_source([f"{folder}@v0"]).snapshot == source.snapshot


def test_replaced_table_of_the_same_path_is_another_snapshot(folder: str) -> None:
    source = DeltaSource(folder)
    deltalake.write_deltalake(folder, table(0, 4), mode="overwrite", partition_by=["p", "day"])
    assert DeltaSource(folder).snapshot != source.snapshot


def test_column_that_was_added_later_is_null_in_earlier_files(folder: str) -> None:
    added = table(4, 4).append_column("x", pa.array([1.5] * 4))
    deltalake.write_deltalake(folder, added, mode="append", schema_mode="merge")
    values = {row["id"]: row["x"] for row in rows(DeltaSource(folder))}
    assert values[0] is None and values[7] == 1.5
    assert [row["id"] for row in rows(DeltaSource(folder), "x is null and id > 1")]
    only = DeltaSource(folder)
    (unit,) = only.units()
    (batch,) = only.read(unit, ["x"], None, 100)
    assert batch.num_rows == 8


def test_large_file_is_cut_between_row_groups(tmp_path: Path) -> None:
    path = str(tmp_path)
    data = pa.table({"id": list(range(5000))})
    properties = deltalake.WriterProperties(max_row_group_size=1000)
    deltalake.write_deltalake(path, data, writer_properties=properties)
    source = DeltaSource(path, unit_bytes=1)
    assert [unit.rows for unit in source.units()] == [1000] * 5
    assert [row["id"] for row in rows(source)] == list(range(5000))


def test_empty_table_is_one_unit_without_rows(tmp_path: Path) -> None:
    deltalake.DeltaTable.create(str(tmp_path), table(0, 1).schema)
    source = DeltaSource(str(tmp_path))
    assert [unit.rows for unit in source.units()] == [0] and rows(source) == []


def test_deleted_file_is_rejected_by_name(folder: str) -> None:
    source = DeltaSource(folder)
    gone = next(Path(folder).rglob("*.parquet"))
    gone.unlink()
    with pytest.raises(SourceChanged, match=gone.name):
        rows(source)


@pytest.mark.parametrize("where", ["missing", ".", "{}@v99"])
def test_missing_table_or_version_is_rejected_by_name(
    folder: str, tmp_path: Path, where: str
) -> None:
    uri = "delta://" + (where.format(folder) if "{" in where else str(tmp_path / where))
    with pytest.raises(SourceError) as caught:
        DeltaSource(uri)
    assert uri in caught.value.message


def test_deletion_vectors_are_rejected_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    deltalake.write_deltalake(path, table(0, 4))
    deltalake.DeltaTable(path).alter.add_feature(
        deltalake.TableFeatures.DeletionVectors, allow_protocol_versions_increase=True
    )
    with pytest.raises(Unsupported, match="deletionVectors"):
        DeltaSource(path)


def column(name: str, kind: str, **metadata: Any) -> dict[str, Any]:
    mapping = {f"delta.columnMapping.{key}": value for key, value in metadata.items()}
    return {"name": name, "type": kind, "nullable": True, "metadata": mapping}


PLAIN = [column("id", "long"), column("x", "double")]
MAPPED = [
    column("id", "long", id=1, physicalName="col-1"),
    column("x", "double", id=2, physicalName="col-2"),
]


def hand_written(
    folder: Path,
    data: pa.Table,
    columns: list[dict[str, Any]] = PLAIN,
    *,
    reader: int = 1,
    features: list[str] | None = None,
    mode: str | None = None,
    **options: Any,
) -> str:
    """Write a table with a protocol that the library does not write."""
    protocol: dict[str, Any] = {"minReaderVersion": reader, "minWriterVersion": 5}
    if features is not None:
        protocol |= {"minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    (folder / "_delta_log").mkdir(parents=True)
    pq.write_table(data, folder / "a.parquet", **options)
    metadata = {
        "id": "t",
        "format": {"provider": "parquet", "options": {}},
        "schemaString": json.dumps({"type": "struct", "fields": columns}),
        "partitionColumns": [],
        "configuration": {} if mode is None else {"delta.columnMapping.mode": mode},
    }
    file = {
        "path": "a.parquet",
        "partitionValues": {},
        "size": (folder / "a.parquet").stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
    }
    lines = [{"protocol": protocol}, {"metaData": metadata}, {"add": file}]
    log = "\n".join(map(json.dumps, lines))
    (folder / "_delta_log" / f"{0:020}.json").write_text(log)
    return str(folder)


DATA = pa.table({"id": [1, 2], "x": [1.5, 2.5]})


@pytest.mark.parametrize("mode", ["name", "id"])
@pytest.mark.parametrize(("reader", "features"), [(1, None), (2, None), (3, ["columnMapping"])])
def test_mapped_columns_are_rejected_by_name(
    tmp_path: Path, mode: str, reader: int, features: list[str] | None
) -> None:
    """The library reads all columns of such a table as null."""
    data = DATA.rename_columns(["col-1", "col-2"])
    path = hand_written(tmp_path / "t", data, MAPPED, reader=reader, features=features, mode=mode)
    with pytest.raises(
        Unsupported, match=r"columnMapping.* supported are the reader versions 1 to"
    ):
        DeltaSource(path)


@pytest.mark.parametrize(
    ("reader", "features", "mode"),
    [(1, None, None), (2, None, None), (2, None, "none"), (3, [], None), (3, [], "none")],
)
def test_supported_protocols_are_read(
    tmp_path: Path, reader: int, features: list[str] | None, mode: str | None
) -> None:
    path = hand_written(tmp_path / "t", DATA, reader=reader, features=features, mode=mode)
    assert rows(DeltaSource(path)) == DATA.to_pylist()


@pytest.mark.parametrize(
    "feature",
    [
        "deletionVectors",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantType",
        "variantType-preview",
        "variantShredding-preview",
        "catalogManaged",
        "later",
    ],
)
def test_other_reader_features_are_rejected_by_name(tmp_path: Path, feature: str) -> None:
    features = ["timestampNtz", feature]
    path = hand_written(tmp_path / "t", DATA, reader=3, features=features)
    with pytest.raises((Unsupported, SourceError), match=rf"{feature}|catalog-managed"):
        DeltaSource(path)


def test_later_reader_versions_are_rejected(tmp_path: Path) -> None:
    with pytest.raises((Unsupported, SourceError), match=r"version"):
        DeltaSource(hand_written(tmp_path / "t", DATA, reader=4))


def test_times_without_a_zone_are_read(tmp_path: Path) -> None:
    times = [datetime.datetime(1, 1, 1), None, datetime.datetime(9999, 1, 1, 2, 3, 4, 5)]
    data = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    deltalake.write_deltalake(str(tmp_path), data)
    protocol = deltalake.DeltaTable(str(tmp_path)).protocol()
    assert protocol.reader_features == ["timestampNtz"]
    assert [row["t"] for row in rows(DeltaSource(str(tmp_path)))] == times


def test_int96_times_of_all_years_are_read(tmp_path: Path) -> None:
    """Spark writes them by default, and nanoseconds would wrap around."""
    times = [datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (1, 2020, 9999)]
    data = pa.table({"t": pa.array(times, pa.timestamp("us", "UTC"))})
    path = hand_written(
        tmp_path / "t", data, [column("t", "timestamp")], use_deprecated_int96_timestamps=True
    )
    assert [row["t"] for row in rows(DeltaSource(path))] == times
    assert len(rows(DeltaSource(path), "t > '9998-01-01 00:00:00Z'")) == 1


@pytest.mark.parametrize(
    ("names", "text"),
    [(["c1", "c2"], "none of the table's columns id, x"), (["id", "X"], "'x' is 'X' in the file")],
)
def test_file_with_other_columns_is_rejected(tmp_path: Path, names: list[str], text: str) -> None:
    source = DeltaSource(hand_written(tmp_path / "t", DATA.rename_columns(names)))
    with pytest.raises(SourceError, match=text):
        rows(source)


def test_file_in_another_place_is_rejected(tmp_path: Path) -> None:
    """A shallow clone refers to the files of its original by their full paths."""
    path = hand_written(tmp_path / "t", DATA)
    log = Path(path, "_delta_log", f"{0:020}.json")
    log.write_text(log.read_text().replace('"a.parquet"', f'"file://{path}/a.parquet"'))
    with pytest.raises(Unsupported, match="shallow clone"):
        DeltaSource(path)


def test_library_is_loaded_for_delta_tables_only() -> None:
    code = (
        "import sys; import iskander.lake.sources.files, iskander.lake.sources.delta, "
        "iskander.lake.sources.iceberg; "
        "print({'deltalake', 'pyiceberg', 'duckdb', 'msgspec'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "set()"
