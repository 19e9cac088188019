"""Inputs of `iskander score` in an object store: a real S3 client against a server on loopback."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from iskander.errors import SourceChanged, SourceError
from iskander.lake.filters import parse_filter
from iskander.lake.sources import open_source
from iskander.lake.sources.files import FileSource


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[pafs.FileSystem, str]:
    """A new bucket, so that no test sees the filesystem or the objects of another."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"b-{uuid.uuid4().hex}"
    filesystem = pafs.S3FileSystem(
        allow_bucket_creation=True, region="us-east-1", endpoint_override=endpoint
    )
    filesystem.create_dir(name)
    return filesystem, name


def table(start: int, count: int) -> pa.Table:
    return pa.table({"id": list(range(start, start + count))})


def write(bucket: tuple[pafs.FileSystem, str], key: str, data: pa.Table, **options: Any) -> None:
    filesystem, name = bucket
    with filesystem.open_output_stream(f"{name}/{key}") as file:
        if key.endswith(".csv"):
            pa_csv.write_csv(data, file)
        else:
            pq.write_table(data, file, **options)


def ids(source: Any, filter: str | None = None) -> list[int]:
    parsed = parse_filter(filter) if filter else None
    return [
        number
        for unit in source.units()
        for batch in source.read(unit, None, parsed, 100)
        for number in batch["id"].to_pylist()
    ]


@pytest.mark.parametrize("end", [".parquet", ".csv"])
def test_keys_with_spaces_and_unicode_are_read(bucket: Any, end: str) -> None:
    write(bucket, f"data/a b%20ü+{end}", table(0, 500))
    source = open_source([f"s3://{bucket[1]}/data/a b%20ü+{end}"])
    assert ids(source) == list(range(500))
    (file,) = source.units()[0].locator["files"]
    assert file["etag"] and "mtime_ns" not in file


def test_folder_with_hive_columns_and_row_groups(bucket: Any) -> None:
    write(bucket, "t/y=1/a.parquet", table(0, 300), row_group_size=100)
    write(bucket, "t/y=2/a.parquet", table(300, 300), row_group_size=100)
    write(bucket, "t/_SUCCESS/x.parquet", table(900, 1))
    source = FileSource([f"s3://{bucket[1]}/t/"], unit_bytes=1)
    assert source.schema.names == ["id", "y"]
    assert [unit.rows for unit in source.units()] == [100] * 6
    assert ids(source) == list(range(600))
    assert ids(source, "y == 2 and id < 310") == list(range(300, 310))


def test_glob(bucket: Any) -> None:
    for key, start in (("g/1/a.parquet", 1), ("g/2/b.parquet", 2), ("g/2/c.txt", 3)):
        write(bucket, key, table(start, 1))
    assert ids(FileSource([f"s3://{bucket[1]}/g/*/*.parquet"])) == [1, 2]
    assert ids(FileSource([f"s3://{bucket[1]}/**/?.parquet"])) == [1, 2]


@pytest.mark.parametrize("mark", ["_delta_log/0.json", ".hoodie/x", "metadata/v1.metadata.json"])
@pytest.mark.parametrize("key", ["lake", "lake/*/*", "lake/t/p=b", "lake/t/p=b/a.parquet", "**"])
def test_files_of_a_table_are_rejected(bucket: Any, mark: str, key: str) -> None:
    write(bucket, "lake/t/p=b/a.parquet", table(0, 1))
    with bucket[0].open_output_stream(f"{bucket[1]}/lake/t/{mark}") as file:
        file.write(b"{}")
    table_uri = rf"s3://{bucket[1]}/lake/t,"
    with pytest.raises(SourceError, match=rf"belongs to the \w+ table {table_uri}"):
        open_source([f"s3://{bucket[1]}/{key}"])
    plain = open_source([f"s3://{bucket[1]}/lake/t/p=b/"], plain_files=True)
    assert ids(plain) == [0]


def test_endpoint_of_the_uri_is_used(
    bucket: Any, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(bucket, "a b.parquet", table(0, 3))
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    uri = f"s3://{bucket[1]}/a b.parquet?region=us-east-1&endpoint_override={endpoint}"
    assert ids(FileSource([uri])) == [0, 1, 2]


def test_object_of_equal_size_that_changed_is_rejected_by_name(bucket: Any) -> None:
    write(bucket, "a.parquet", table(0, 10), use_dictionary=False, compression="none")
    source = FileSource([f"s3://{bucket[1]}/a.parquet"])
    write(bucket, "a.parquet", table(1, 10), use_dictionary=False, compression="none")
    with pytest.raises(SourceChanged, match=r"a\.parquet.*ETag"):
        ids(source)


def test_object_that_changes_while_it_is_read_is_rejected(bucket: Any) -> None:
    write(bucket, "a.parquet", table(0, 1000), row_group_size=100)
    source = FileSource([f"s3://{bucket[1]}/a.parquet"])
    batches = source.read(source.units()[0], None, None, 100)
    next(batches)
    bucket[0].delete_file(f"{bucket[1]}/a.parquet")
    with pytest.raises((SourceChanged, SourceError), match=r"a\.parquet"):
        list(batches)


@pytest.mark.parametrize("key", ["missing.parquet", "none/*.parquet"])
def test_missing_key_is_rejected_by_name(bucket: Any, key: str) -> None:
    with pytest.raises(SourceError) as caught:
        FileSource([f"s3://{bucket[1]}/{key}"])
    assert key in caught.value.message
