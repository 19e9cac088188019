"""Folders and names of the prediction log's files and columns."""

from __future__ import annotations

from datetime import UTC, datetime

import duckdb
import polars as pl
import pytest

from iskander.sampling.prediction_log.layout import (
    OWN_COLUMNS,
    PARTITIONS,
    file_name,
    is_complete,
    names_of,
    partition_of,
)

NS_PER_S = 1_000_000_000
AT = int(datetime(2026, 5, 1, 23, 59, 59, tzinfo=UTC).timestamp()) * NS_PER_S


def test_partition_is_the_hour_of_utc() -> None:
    wanted = "model=churn/version=3/date=2026-05-01/hour=23"
    assert partition_of("churn", "3", AT + NS_PER_S - 1) == wanted
    assert partition_of("churn", "3", AT + NS_PER_S).endswith("date=2026-05-02/hour=00")


@pytest.mark.parametrize("version", ["a/b", "..", "a=b", "50%", "ü v"])
def test_version_stays_one_folder(version: str) -> None:
    folders = partition_of("m.x:y", version, AT).split("/")
    assert len(folders) == 4
    assert [folder.partition("=")[0] for folder in folders] == list(PARTITIONS)


@pytest.mark.parametrize("version", ["a/b", "a=b", "50%", "ü v"])
def test_readers_decode_the_version(version: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("log")
    folder = root / partition_of("m.x:y", version, AT)
    folder.mkdir(parents=True)
    pl.DataFrame({"x": [1]}).write_parquet(folder / file_name(AT, "ab"))
    found = pl.read_parquet(root / "**/*.parquet", hive_partitioning=True)
    assert found.select("model", "version").rows() == [("m.x:y", version)]
    query = "SELECT model, version FROM read_parquet(?, hive_partitioning = true)"
    assert duckdb.execute(query, [f"{root}/**/*.parquet"]).fetchall() == [("m.x:y", version)]


def test_file_names_sort_by_time() -> None:
    names = [file_name(AT + index * NS_PER_S, token) for index, token in enumerate("cba")]
    assert sorted(names) == names
    assert names[0].endswith("-c.parquet")


@pytest.mark.parametrize(
    ("written", "age_s", "expected"), [(99, 9.9, False), (100, 0, True), (0, 10, True)]
)
def test_file_ends_by_size_or_age(written: int, age_s: float, expected: bool) -> None:
    assert is_complete(written, int(age_s * NS_PER_S), 100, 10.0) is expected


def test_names_are_those_of_the_columns() -> None:
    assert names_of(["user", "age"], ["score"]) == (("user", "age"), ("score",))


def test_names_do_not_collide() -> None:
    """With each other, the log's own, and the partitions; letter case is no difference."""
    inputs, outputs = names_of(["x", "hour", "Model", "input.hour"], ["X", "time", "y"])
    assert inputs == ("x", "input.hour", "input.Model", "input.input.hour")
    assert outputs == ("output.X", "output.time", "y")
    everything = [*inputs, *outputs, *OWN_COLUMNS, *PARTITIONS]
    assert len({name.casefold() for name in everything}) == len(everything)
