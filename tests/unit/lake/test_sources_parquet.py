"""Parquet features that pyarrow misreads: rejected by name, or read right."""

from __future__ import annotations

import base64
import datetime
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from iskander.errors import SourceError
from iskander.lake.filters import parse_filter
from iskander.lake.sources.files import FileSource
from iskander.lake.sources.parquet import TAIL_BYTES, read_footer
from tests.support.parquet_footers import (
    BINARY,
    ROW_GROUPS,
    SCHEMA,
    STRUCT,
    Struct,
    edited,
    field,
    put,
)


def rows(path: Path, columns: list[str] | None = None, filter: str = "") -> list[dict[str, Any]]:
    source = FileSource([str(path)])
    condition = parse_filter(filter) if filter else None
    return [
        row
        for unit in source.units()
        for batch in source.read(unit, columns, condition, 100)
        for row in batch.to_pylist()
    ]


def written(data: pa.Table, **options: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(data, file, **options)
    return file.getvalue()


class Kms(pe.KmsClient):  # type: ignore[misc]
    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


@pytest.mark.parametrize("has_column_keys", [False, True])
@pytest.mark.parametrize("is_plain", [False, True])
def test_encrypted_file_is_rejected(tmp_path: Path, is_plain: bool, has_column_keys: bool) -> None:
    """With a readable footer, pyarrow aborts the process as soon as one asks for the column."""
    keys = {"column_keys": {"c": ["b"]}} if has_column_keys else {"uniform_encryption": True}
    config = pe.EncryptionConfiguration(footer_key="f", plaintext_footer=is_plain, **keys)
    factory = pe.CryptoFactory(lambda _: Kms())
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    data = pa.table({"a": [1, 2], "b": [3, 4]})
    path = tmp_path / "e.parquet"
    with pq.ParquetWriter(path, data.schema, encryption_properties=properties) as writer:
        writer.write_table(data)
    with pytest.raises(SourceError, match=r"e\.parquet: .* encrypted"):
        rows(path, ["a"], filter="b > 3")


def annotated(index: int, logical: int, value: Struct) -> Callable[[Struct], None]:
    def edit(footer: Struct) -> None:
        put(field(footer, SCHEMA)[index], 10, STRUCT, [[logical, STRUCT, value]])

    return edit


@pytest.mark.parametrize("column", [1, 2])
@pytest.mark.parametrize("name", ["a", "a (UNKNOWN)"])
def test_unknown_logical_type_is_rejected(tmp_path: Path, name: str, column: int) -> None:
    """A number with an unknown meaning, such as a scaled one, is no plain number."""
    data = written(pa.table({name: pa.array([1], pa.int32()), "s": ["x"]}), store_schema=False)
    path = tmp_path / "a.parquet"
    path.write_bytes(data)
    assert len(rows(path)) == 1
    path.write_bytes(edited(data, annotated(column, 30, [])))
    with pytest.raises(SourceError, match=r"column '(a|a \(UNKNOWN\)|s)' has a logical type"):
        rows(path)


def test_variant_is_rejected(tmp_path: Path) -> None:
    kind = pa.struct([("metadata", pa.binary()), ("value", pa.binary())])
    column = pa.array([{"metadata": b"a", "value": b"b"}], kind)
    data = written(pa.table({"v": column, "a": [1]}), store_schema=False)
    path = tmp_path / "a.parquet"
    path.write_bytes(edited(data, annotated(1, 16, [[1, 3, 1]])))
    with pytest.raises(SourceError, match="column 'v' has the type Variant"):
        rows(path)


def test_columns_in_other_files_are_rejected(tmp_path: Path) -> None:
    def edit(footer: Struct) -> None:
        for group in field(footer, ROW_GROUPS):
            for chunk in field(group, 1):
                put(chunk, 1, BINARY, b"other.parquet")

    path = tmp_path / "all.parquet"
    path.write_bytes(edited(written(pa.table({"a": [1]})), edit))
    with pytest.raises(SourceError, match=r"all\.parquet: .* 'other\.parquet'"):
        rows(path)


def times(*years: int) -> pa.Array:
    return pa.array([datetime.datetime(year, 5, 1) for year in years], pa.timestamp("us"))


@pytest.mark.parametrize("years", [(2020, 9999), (1, 2020), (1600,), (2263,)])
@pytest.mark.parametrize("is_nested", [False, True])
def test_int96_time_that_would_wrap_around_is_rejected(
    tmp_path: Path, years: tuple[int, ...], is_nested: bool
) -> None:
    """pyarrow gives the year 1815 for 9999."""
    column = times(*years)
    if is_nested:
        column = pa.array([column.to_pylist()], pa.list_(pa.timestamp("us")))
    data = pa.table({"t": column, "i": list(range(len(column)))})
    path = tmp_path / "a.parquet"
    pq.write_table(data, path, use_deprecated_int96_timestamps=True)
    with pytest.raises(SourceError, match=r"a\.parquet: column 't' has INT96 times outside"):
        rows(path)
    assert len(rows(path, ["i"])) == len(column)


def test_int96_times_are_exact(tmp_path: Path) -> None:
    stamps = [None, -(2**63 // 1000) * 1000, -1, 0, 1, 2**63 // 1000 * 1000 - 1]
    data = pa.table({"t": pa.array(stamps, pa.timestamp("ns"))})
    path = tmp_path / "a.parquet"
    pq.write_table(data, path, use_deprecated_int96_timestamps=True, row_group_size=2)
    source = FileSource([str(path)])
    found = [batch for unit in source.units() for batch in source.read(unit, None, None, 10)]
    assert pa.Table.from_batches(found).column("t").cast(pa.int64()).to_pylist() == stamps


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        (datetime.date(1582, 10, 14), False),
        (datetime.date(1582, 10, 15), True),
        (datetime.datetime(1899, 12, 31), False),
        (datetime.datetime(1900, 1, 1), True),
        ([datetime.date(1, 1, 1)], False),
        ({"d": datetime.date(1, 1, 1)}, False),
        ([("k", datetime.date(1, 1, 1))], False),
    ],
)
def test_old_dates_of_spark_2_are_rejected(tmp_path: Path, value: Any, is_read: bool) -> None:
    """They are of the Julian calendar, and pyarrow reads them as Gregorian ones."""
    kind = pa.map_(pa.string(), pa.date32()) if isinstance(value, list) and value[0] == (
        "k",
        datetime.date(1, 1, 1),
    ) else None  # fmt: skip
    data = pa.table({"d": pa.array([value, None], kind), "i": [1, 2]})
    path = tmp_path / "a.parquet"
    pq.write_table(data, path)
    assert len(rows(path)) == 2
    marked = data.replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})
    pq.write_table(marked, path)
    assert len(rows(path, ["i"])) == 2
    if is_read:
        assert rows(path)[0]["d"] == value
    else:
        with pytest.raises(SourceError, match=r"column 'd' has dates before .* Spark 2"):
            rows(path)


def test_changed_page_is_an_error(tmp_path: Path) -> None:
    """pyarrow does not look at the checksums that a file has unless it is told to."""
    data = pa.table({"a": list(range(1000))})
    options = {"use_dictionary": False, "compression": "none", "write_page_checksum": True}
    text = bytearray(written(data, **options))
    at = text.index((500).to_bytes(8, "little"))
    text[at] += 1
    path = tmp_path / "a.parquet"
    path.write_bytes(bytes(text))
    with pytest.raises(SourceError, match=r"a\.parquet: cannot read"):
        rows(path)


def test_footer_that_is_larger_than_the_first_read(tmp_path: Path) -> None:
    data = pa.table({f"column {index}": [index] for index in range(2000)})
    path = tmp_path / "a.parquet"
    pq.write_table(data, path)
    with pa.OSFile(str(path)) as file:
        footer = read_footer(file, "a")
    assert footer.metadata.serialized_size > TAIL_BYTES
    assert rows(path, ["column 7"]) == [{"column 7": 7}]
    kinds = pa.table(
        {"d": pa.array(["a"]).dictionary_encode(), "l": pa.array(["b"], pa.large_string())}
    )
    pq.write_table(kinds, path)
    assert FileSource([str(path)]).schema == kinds.schema.remove_metadata()
