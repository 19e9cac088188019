"""Outputs and quarantines that touch an input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake
from pyiceberg.catalog.sql import SqlCatalog
from support.scoring_sinks import SCHEMA, a_plan, rows_of

from iskander.errors import ConfigError
from iskander.lake.job import Job
from iskander.lake.sinks import open_sink
from iskander.lake.sinks.apart import check_inputs
from iskander.lake.sinks.iceberg import IcebergSink


def a_job(output: str, *inputs: str, **options: Any) -> Job:
    return Job(model="m", inputs=inputs, output=output, state="s", **options)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working folder with `in`, the link `link` to it, and `in/a.parquet`, which `one` links to."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.parquet").touch()
    (tmp_path / "link").symlink_to("in")
    (tmp_path / "one.parquet").symlink_to("in/a.parquet")
    (tmp_path / "x[1]").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("output", "given", "relation"),
    [
        ("in", "in", "is"),
        ("in/", "./in", "is"),
        ("other/../in", "in", "is"),
        ("link", "in", "is"),
        ("in", "link", "is"),
        ("in/out", "in", "lies in"),
        ("link/out", "in", "lies in"),
        ("in/out.parquet", "in", "lies in"),
        (".", "in", "contains"),
        (".", "in/a.parquet", "contains"),
        ("in", "one.parquet", "contains"),
        ("in/a.parquet", "one.parquet", "is"),
        ("one.parquet", "link/a.parquet", "is"),
        ("in", "in/*.parquet", "contains"),
        ("in/b.parquet", "in/*.parquet", "lies in"),
        ("in/out", "in/*", "lies in"),
        ("in/out", "in/*/*.parquet", "lies in"),
        ("in/out", "link/**/*.parquet", "lies in"),
        ("in/sub/out", "in/s*/", "lies in"),
        ("x[1]/out", "x[1]", "lies in"),
        ("in/out", "file://{}/in", "lies in"),
        ("delta://in", "in", "is"),
        ("delta://in/t", "in", "lies in"),
        ("delta://t", "t/*.parquet", "contains"),
        ("delta://t", "delta://t", "is"),
        ("in/out", "delta://in@v3", "lies in"),
        ("iceberg://c/ns.t", "iceberg://c/ns.t", "is"),
    ],
)
def test_output_that_touches_an_input_is_rejected(
    folder: Path, output: str, given: str, relation: str
) -> None:
    given = given.format(folder)
    with pytest.raises(ConfigError, match=f"the output {relation} the input"):
        open_sink(a_job(output, "elsewhere.parquet", given))


@pytest.mark.parametrize(
    ("output", "given"),
    [
        ("out", "in"),
        ("in2", "in"),
        ("in/out", "in/*.parquet"),
        ("in/out", "in/a.parquet"),
        ("in/b.parquet", "in/a.parquet"),
        ("y/1", "y/[2-9]"),
        ("-", "-"),
        ("out", "-"),
        ("-", "in"),
        ("delta://t", "delta://t@v3"),
        ("t", "delta://./t@v3"),
        ("delta://abc://x/t", "delta://abc://x/t@v1"),
    ],
)
def test_output_apart_from_the_input_is_accepted(output: str, given: str) -> None:
    check_inputs(a_job(output, given))


@pytest.mark.parametrize(
    ("output", "given", "is_apart"),
    [
        ("s3://b/in/out", "s3://b/in", False),
        ("s3://b/in?region=x", "s3://b/in/*.parquet?region=x", False),
        ("delta://abc://b", "delta://abc://b/in@v1", False),
        ("s3://b/out", "s3://b/in", True),
        ("s3://b/in", "in", True),
        ("s3://c/in", "s3://b/in", True),
    ],
)
def test_uris_are_compared_by_their_paths(
    output: str, given: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening the filesystem would ask the network for the bucket's region."""
    from pyarrow import fs

    monkeypatch.setattr(
        "iskander.lake.sources.places._filesystem",
        lambda base: (fs.SubTreeFileSystem("/", fs.LocalFileSystem()), base[5:].partition("?")[0]),
    )
    if is_apart:
        check_inputs(a_job(output, given))
    else:
        with pytest.raises(ConfigError, match=r"the input .*://b/in"):
            check_inputs(a_job(output, given))


@pytest.mark.parametrize("uri", ["in", "in/bad", ".", "out/bad", "out"])
def test_quarantine_that_touches_another_place_is_rejected(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"the quarantine (is|contains|lies in) the"):
        open_sink(a_job("out", "in", on_error=f"quarantine={uri}"))
    open_sink(a_job("-", "in", on_error="quarantine=bad"))


def test_table_is_read_at_a_version_and_changed(folder: Path) -> None:
    write_deltalake(folder / "t", rows_of(0, 5))
    open_sink(a_job("t", "delta://t@v0", overwrite="append"))
    with pytest.raises(ConfigError, match="read the table at a fixed version"):
        open_sink(a_job("delta://t", "t", overwrite="append"))


def test_files_of_an_iceberg_table_are_an_input(folder: Path) -> None:
    catalog = SqlCatalog("c", uri=f"sqlite:///{folder}/c.db", warehouse=f"file://{folder}/house")
    sink = IcebergSink(a_job("iceberg://c/ns.out", "house/ns/out/data/*.parquet"), catalog)
    with pytest.raises(ConfigError, match="the output contains the input"):
        sink.prepare(a_plan(1), SCHEMA, is_resumed=False)
    IcebergSink(a_job("iceberg://c/ns.out", "iceberg://c/ns.out@7"), catalog)
    catalog.engine.dispose()
