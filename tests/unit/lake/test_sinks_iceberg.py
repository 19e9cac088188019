"""Iceberg tables as output: one snapshot, crashes, partitions, and tables that exist."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.transforms import BucketTransform
from support.scoring_sinks import SCHEMA, Crash, a_job, a_plan, crash_at, rows_of, run

from iskander.errors import ConfigError, Unsupported
from iskander.lake.job import Job
from iskander.lake.sinks import Sink, open_sink
from iskander.lake.sinks.errors import OutputExists
from iskander.lake.sinks.iceberg import ATTEMPT, IcebergSink

ALL = pa.Table.from_batches([rows_of(i) for i in range(3)])


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[SqlCatalog]:
    (tmp_path / "house").mkdir()
    made = SqlCatalog("c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/house")
    yield made
    made.engine.dispose()


def job_for(folder: Path, name: str = "out", **options: Any) -> Job:
    return a_job(f"iceberg://c/ns.{name}", folder / "s" / name, **options)


def score(catalog: SqlCatalog, job: Job, *args: Any, **options: Any) -> Any:
    def make(each: Job) -> Sink:
        return IcebergSink(each, catalog)

    return run(job, *args, make=make, **options)


def rows(catalog: SqlCatalog, name: str = "out") -> pa.Table:
    found = catalog.load_table(f"ns.{name}").scan().to_arrow()
    return found.select(SCHEMA.names).cast(SCHEMA).sort_by("id")


def test_new_table_has_all_rows_one_snapshot_and_the_origin(
    tmp_path: Path, catalog: SqlCatalog
) -> None:
    score(catalog, job_for(tmp_path), a_plan())
    table = catalog.load_table("ns.out")
    assert len(table.snapshots()) == 1
    assert rows(catalog).equals(ALL)
    summary = table.current_snapshot().summary.additional_properties
    assert summary["iskander.model"] == "churn" and summary["iskander.version"] == "3"
    assert summary["iskander.fingerprint"] == a_plan().fingerprint
    assert not (tmp_path / "s" / "out").exists()


def test_table_is_invisible_before_the_commit(tmp_path: Path, catalog: SqlCatalog) -> None:
    sink = IcebergSink(job_for(tmp_path), catalog)
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))
    assert not catalog.table_exists("ns.out")
    sink.abort()
    assert not list((tmp_path / "house").rglob("*.parquet"))


def test_partitions_are_identities(tmp_path: Path, catalog: SqlCatalog) -> None:
    score(catalog, job_for(tmp_path, partition_by=("group", "day")), a_plan())
    assert rows(catalog).equals(ALL)
    table = catalog.load_table("ns.out")
    assert [each.name for each in table.spec().fields] == ["group", "day"]
    found = table.scan(row_filter="group = 'b/c'").to_arrow()
    assert found.num_rows == ALL.column("group").to_pylist().count("b/c")
    score(catalog, job_for(tmp_path, overwrite="append"), a_plan(1, "more"), rows=10)
    assert table.refresh().scan().to_arrow().num_rows == 3010


def test_sorted_rows_are_in_order_across_files(tmp_path: Path, catalog: SqlCatalog) -> None:
    score(catalog, job_for(tmp_path, sort_by=("score",), file_bytes=1000), a_plan())
    scores: list[float] = []
    files = sorted((tmp_path / "house").rglob("*.parquet"))
    for each in files:
        scores += pa.parquet.read_table(each).column("score").to_pylist()
    assert scores == sorted(ALL.column("score").to_pylist())
    assert rows(catalog).equals(ALL)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"partition_by": ("day",)}, marks=pytest.mark.slow),
        pytest.param({"sort_by": ("score",)}, marks=pytest.mark.slow),
        pytest.param({"overwrite": "append"}, marks=pytest.mark.slow),
        {"overwrite": "replace"},
    ],
)
def test_interrupted_job_makes_one_snapshot(
    tmp_path: Path,
    catalog: SqlCatalog,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The process dies before and after each operation on files and at the commit."""
    plan = a_plan(2)
    number = 0
    mode = options.get("overwrite")
    original = IcebergSink._commit
    while True:
        name = f"out{number}"
        if mode is not None:
            score(catalog, job_for(tmp_path, name), a_plan(1, "old"), rows=10)
        job = job_for(tmp_path, name, **options)
        journal: dict[int, Any] = {}

        def dying(self: IcebergSink, *args: Any, _number: int = number) -> None:
            if _number == 0:
                raise Crash("before the commit")
            original(self, *args)
            if _number == 1:
                raise Crash("after the commit")

        with crash_at(monkeypatch, number - 2 if number > 1 else 10**9), monkeypatch.context() as p:
            p.setattr(IcebergSink, "_commit", dying)
            try:
                score(catalog, job, plan, finished=journal, rows=300, is_finished=False)
            except Crash:
                pass
            else:
                break
        score(catalog, job, plan, finished=journal, rows=300)
        table = catalog.load_table(f"ns.{name}")
        attempts = [each.summary.additional_properties.get(ATTEMPT) for each in table.snapshots()]
        count = {None: 1, "append": 2, "replace": 3}[mode]
        assert len(attempts) == count
        assert len(set(attempts)) == (1 if mode is None else 2)
        assert table.scan().to_arrow().num_rows == 600 + (10 if mode == "append" else 0)
        number += 1
    assert number > 10


def test_committed_unit_is_not_scored_again_after_a_crash(
    tmp_path: Path, catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies while it deletes the units that the sort replaced."""
    plan = a_plan(2)
    journal: dict[int, Any] = {}
    job = job_for(tmp_path, sort_by=("score",))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        original = IcebergSink._commit

        def dying(self: IcebergSink, *args: Any) -> None:
            original(self, *args)
            for each in plan.units:
                self._ready().storage.remove_folder(f"{self._ready().folder}/{each.name}")
            raise Crash("after the commit")

        patch.setattr(IcebergSink, "_commit", dying)
        score(catalog, job, plan, finished=journal)
    sink = IcebergSink(job, catalog)
    sink.prepare(plan, SCHEMA, is_resumed=True)
    assert all(sink.recover(each, journal[each.index]) for each in plan.units)


def test_existing_table_is_rejected_by_name(tmp_path: Path, catalog: SqlCatalog) -> None:
    score(catalog, job_for(tmp_path), a_plan())
    sink = IcebergSink(job_for(tmp_path), catalog)
    with pytest.raises(OutputExists, match=r"ns\.out: the Iceberg table exists"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


def test_table_that_appears_during_the_job_is_unchanged(
    tmp_path: Path, catalog: SqlCatalog
) -> None:
    plan = a_plan(1)
    sink = IcebergSink(job_for(tmp_path), catalog)
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(plan.units[0], iter([rows_of(0)]))]
    catalog.create_table("ns.out", SCHEMA)
    with pytest.raises(OutputExists):
        sink.commit(plan, staged)
    assert catalog.load_table("ns.out").snapshots() == []


def test_second_append_of_one_job_is_rejected(tmp_path: Path, catalog: SqlCatalog) -> None:
    score(catalog, job_for(tmp_path), a_plan(1, "old"))
    score(catalog, job_for(tmp_path, overwrite="append"), a_plan())
    sink = IcebergSink(job_for(tmp_path, overwrite="append"), catalog)
    with pytest.raises(OutputExists, match="already"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


def test_replacement_by_the_same_job_keeps_the_earlier_files(
    tmp_path: Path, catalog: SqlCatalog
) -> None:
    score(catalog, job_for(tmp_path), a_plan())
    first = catalog.load_table("ns.out").current_snapshot().snapshot_id
    score(catalog, job_for(tmp_path, overwrite="replace"), a_plan(), rows=10)
    table = catalog.load_table("ns.out")
    assert table.scan().to_arrow().num_rows == 30
    assert table.scan(snapshot_id=first).to_arrow().num_rows == 3000


@pytest.mark.parametrize(
    ("schema", "options", "text"),
    [
        (SCHEMA.set(0, pa.field("id", pa.int32())), {}, "columns differ"),
        (SCHEMA, {"partition_by": ("day",)}, "partition_by"),
    ],
)
def test_append_of_another_form_is_rejected(
    tmp_path: Path, catalog: SqlCatalog, schema: pa.Schema, options: dict[str, Any], text: str
) -> None:
    score(catalog, job_for(tmp_path), a_plan(1, "old"))
    sink = IcebergSink(job_for(tmp_path, overwrite="append", **options), catalog)
    with pytest.raises(OutputExists, match=text):
        sink.prepare(a_plan(), schema, is_resumed=False)


def test_table_with_transformed_partitions_is_rejected(tmp_path: Path, catalog: SqlCatalog) -> None:
    catalog.create_namespace("ns")
    with catalog.create_table("ns.out", SCHEMA).update_spec() as spec:
        spec.add_field("id", BucketTransform(4), "bucket")
    sink = IcebergSink(job_for(tmp_path, overwrite="append"), catalog)
    with pytest.raises(Unsupported, match="bucket"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


@pytest.mark.parametrize("units", [0, 2])
def test_table_without_rows_has_the_columns(
    tmp_path: Path, catalog: SqlCatalog, units: int
) -> None:
    score(catalog, job_for(tmp_path), a_plan(units), rows=0)
    assert rows(catalog).num_rows == 0
    score(catalog, job_for(tmp_path, overwrite="replace"), a_plan(2, "x"), rows=5)
    score(catalog, job_for(tmp_path, overwrite="replace"), a_plan(units, "y"), rows=0)
    assert rows(catalog).num_rows == 0


def test_restart_deletes_the_files_of_the_earlier_attempt(
    tmp_path: Path, catalog: SqlCatalog
) -> None:
    sink = IcebergSink(job_for(tmp_path), catalog)
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))
    score(catalog, job_for(tmp_path, restart=True), a_plan(2))
    assert len(list((tmp_path / "house").rglob("*.parquet"))) == 2
    assert rows(catalog).num_rows == 2000


@pytest.mark.parametrize("name", ["iceberg://c", "iceberg://c/t", "iceberg:///ns.t"])
def test_invalid_uri_is_rejected(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="NAMESPACE"):
        open_sink(a_job(name, tmp_path / "s"))


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(ConfigError, match=r"iskander\[iceberg\]"):
        open_sink(job_for(tmp_path))
