"""Delta tables as output: one commit, crashes, partitions, order, and tables that exist."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.scoring_sinks import SCHEMA, Crash, a_job, a_plan, crash_at, rows_of, run

from iskander.errors import ConfigError, Unsupported
from iskander.lake.errors import JobConflict
from iskander.lake.sinks import open_sink
from iskander.lake.sinks.delta import DeltaSink
from iskander.lake.sinks.errors import OutputError, OutputExists

ALL = pa.Table.from_batches([rows_of(i) for i in range(3)])


def job_for(folder: Path, **options: Any) -> Any:
    return a_job(f"delta://{folder / 'out'}", folder / "s", **options)


def rows(folder: Path) -> pa.Table:
    table = DeltaTable(folder / "out").to_pyarrow_dataset().to_table()
    return table.select(SCHEMA.names).sort_by("id")


def test_new_table_has_all_rows_one_commit_and_the_origin(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan())
    table = DeltaTable(tmp_path / "out")
    assert table.version() == 0
    assert rows(tmp_path).equals(ALL)
    assert table.history()[0]["iskander.model"] == "churn"
    assert table.transaction_version(a_plan().fingerprint) == 1
    actions = pa.table(table.get_add_actions(flatten=True))
    assert sum(actions.column("num_records").to_pylist()) == ALL.num_rows
    assert not list((tmp_path / "out").glob("_staging*"))
    assert not (tmp_path / "s").exists()


def test_folder_with_a_log_is_a_delta_table(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan())
    assert isinstance(open_sink(a_job(tmp_path / "out", tmp_path / "s")), DeltaSink)


def test_partitions_have_their_values_in_the_log(tmp_path: Path) -> None:
    run(job_for(tmp_path, partition_by=("group", "day")), a_plan())
    assert rows(tmp_path).equals(ALL)
    table = DeltaTable(tmp_path / "out")
    found = table.to_pyarrow_table(filters=[("group", "=", "b/c")])
    groups = ALL.column("group").to_pylist()
    assert found.num_rows == groups.count("b/c")
    assert table.metadata().partition_columns == ["group", "day"]


def test_sorted_rows_are_in_order_across_files(tmp_path: Path) -> None:
    run(job_for(tmp_path, sort_by=("score",), file_bytes=1000), a_plan())
    scores: list[float] = []
    for each in sorted((tmp_path / "out").glob("*.parquet")):
        scores += pa.parquet.read_table(each).column("score").to_pylist()
    assert scores == sorted(ALL.column("score").to_pylist())


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
def test_interrupted_job_makes_one_commit(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before and after each operation on files and at the commit."""
    plan = a_plan(2)
    number = 0
    has_old = "overwrite" in options
    original = DeltaSink._commit
    while True:
        place = tmp_path / str(number)
        if has_old:
            run(job_for(place), a_plan(1, "old"), rows=10)
        job = job_for(place, **options)
        journal: dict[int, Any] = {}

        def dying(self: DeltaSink, *args: Any, _number: int = number) -> None:
            if _number == 0:
                raise Crash("before the commit")
            original(self, *args)
            if _number == 1:
                raise Crash("after the commit")

        with crash_at(monkeypatch, number - 2 if number > 1 else 10**9), monkeypatch.context() as p:
            p.setattr(DeltaSink, "_commit", dying)
            try:
                run(job, plan, finished=journal, rows=300, is_finished=False)
            except Crash:
                pass
            else:
                break
        run(job, plan, finished=journal, rows=300)
        table = DeltaTable(place / "out")
        assert table.version() == (1 if has_old else 0)
        extra = 10 if options.get("overwrite") == "append" else 0
        assert table.to_pyarrow_dataset().count_rows() == 600 + extra
        assert not list((place / "out").glob("_staging*"))
        number += 1
    assert number > 10


def test_existing_table_is_rejected_by_name(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan())
    sink = open_sink(job_for(tmp_path))
    with pytest.raises(OutputExists, match="out: the Delta table exists"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    assert DeltaTable(tmp_path / "out").version() == 0


def test_folder_with_other_files_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    sink = open_sink(job_for(tmp_path, overwrite="replace"))
    with pytest.raises(OutputExists, match="no Delta table"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


def test_table_that_appears_during_the_job_is_unchanged(tmp_path: Path) -> None:
    plan = a_plan(1)
    sink = open_sink(job_for(tmp_path))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(plan.units[0], iter([rows_of(0)]))]
    write_deltalake(tmp_path / "out", rows_of(5, 7))
    with pytest.raises(OutputExists):
        sink.commit(plan, staged)
    assert DeltaTable(tmp_path / "out").to_pyarrow_dataset().count_rows() == 7


def test_second_append_of_one_job_is_rejected(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan(1, "old"))
    run(job_for(tmp_path, overwrite="append"), a_plan())
    sink = open_sink(job_for(tmp_path, overwrite="append"))
    with pytest.raises(OutputExists, match="already"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


def test_replacement_by_the_same_job_keeps_the_rows_of_the_earlier_version(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan())
    run(job_for(tmp_path, overwrite="replace"), a_plan(), rows=10)
    assert rows(tmp_path).num_rows == 30
    assert DeltaTable(tmp_path / "out", version=0).to_pyarrow_dataset().count_rows() == 3000


@pytest.mark.parametrize(
    ("schema", "options", "text"),
    [
        (SCHEMA.set(0, pa.field("id", pa.int32())), {}, "columns differ"),
        (SCHEMA.append(pa.field("more", pa.int32())), {}, "columns differ"),
        (SCHEMA, {"partition_by": ("day",)}, "partition_by"),
    ],
)
def test_append_of_another_form_is_rejected(
    tmp_path: Path, schema: pa.Schema, options: dict[str, Any], text: str
) -> None:
    run(job_for(tmp_path), a_plan(1, "old"))
    sink = open_sink(job_for(tmp_path, overwrite="append", **options))
    with pytest.raises(OutputExists, match=text):
        sink.prepare(a_plan(), schema, is_resumed=False)


def test_table_with_constraints_is_rejected(tmp_path: Path) -> None:
    run(job_for(tmp_path), a_plan(1, "old"))
    DeltaTable(tmp_path / "out").alter.add_constraint({"positive": "id >= 0"})
    sink = open_sink(job_for(tmp_path, overwrite="append"))
    with pytest.raises(Unsupported, match=r"delta\.constraints"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


@pytest.mark.parametrize("units", [0, 2])
@pytest.mark.parametrize("options", [{}, {"partition_by": ("day",)}, {"sort_by": ("id",)}])
def test_table_without_rows_has_the_columns(
    tmp_path: Path, units: int, options: dict[str, Any]
) -> None:
    run(job_for(tmp_path, **options), a_plan(units), rows=0)
    found = DeltaTable(tmp_path / "out").to_pyarrow_dataset()
    assert found.schema.names == SCHEMA.names and found.count_rows() == 0


def test_types_of_other_widths_are_converted_without_loss(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "u": pa.array([255], pa.uint8()),
            "h": pa.array([1.5], pa.float16()),
            "v": pa.FixedSizeListArray.from_arrays(pa.array([1.0, 2.0], pa.float32()), 2),
            "t": pa.array([1000], pa.timestamp("ns", "Europe/Paris")),
            "d": pa.array(["x"]).dictionary_encode(),
        }
    )
    plan = a_plan(1)
    sink = open_sink(job_for(tmp_path))
    sink.prepare(plan, batch.schema, is_resumed=False)
    sink.commit(plan, [sink.stager().stage(plan.units[0], iter([batch]))])
    found = DeltaTable(tmp_path / "out").to_pyarrow_table().to_pylist()[0]
    assert (found["u"], found["h"], found["v"], found["d"]) == (255, 1.5, [1.0, 2.0], "x")


def test_column_without_a_type_is_rejected(tmp_path: Path) -> None:
    sink = open_sink(job_for(tmp_path))
    with pytest.raises(Unsupported, match=r"'q'.*uint64"):
        sink.prepare(a_plan(), pa.schema([("q", pa.uint64())]), is_resumed=False)


def test_staged_units_of_another_job_are_rejected(tmp_path: Path) -> None:
    sink = open_sink(job_for(tmp_path))
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))
    other = open_sink(job_for(tmp_path))
    with pytest.raises(JobConflict):
        other.prepare(a_plan(text="second"), SCHEMA, is_resumed=False)
    sink.abort()
    assert not (tmp_path / "out").exists()


def test_failed_commit_is_named_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(1)
    journal: dict[int, Any] = {}
    job = job_for(tmp_path)

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("deltalake.transaction.create_table_with_add_actions", failing)
        with pytest.raises(OutputError, match="No space"):
            run(job, plan, finished=journal)
    run(job, plan, finished=journal)
    assert DeltaTable(tmp_path / "out").to_pyarrow_dataset().count_rows() == 1000


def test_missing_library_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"iskander\[delta\]"):
        open_sink(job_for(tmp_path))
