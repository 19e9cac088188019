"""Files as output: equal bytes, crashes, full disks, partitions, order and object stores."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from support.scoring_sinks import (
    SCHEMA,
    Crash,
    a_job,
    a_plan,
    crash_at,
    cut,
    rows_of,
    run,
    tree,
)

from iskander.errors import Cancelled, ConfigError, ContractError, LimitExceeded, Unsupported
from iskander.lake.errors import JobConflict
from iskander.lake.sinks import open_sink, sorting, writing
from iskander.lake.sinks.errors import OutputError, OutputExists
from iskander.lake.sinks.files import FileSink

ALL = pa.Table.from_batches([rows_of(i) for i in range(3)])
CASES = {
    "folder": ("out", {}),
    "partitioned": ("out", {"partition_by": ("group", "day")}),
    "sorted": ("out", {"sort_by": ("group", "score"), "file_bytes": 10_000}),
    "sorted and partitioned": ("out", {"sort_by": ("score",), "partition_by": ("day",)}),
    "rolled": ("out", {"file_bytes": 1}),
    "ipc folder": ("out.arrow/", {}),
    "csv folder": ("out.csv/", {"partition_by": ("day",)}),
    "one parquet": ("out.parquet", {}),
    "one sorted": ("out.parquet", {"sort_by": ("day", "id")}),
    "one csv": ("out.csv", {}),
    "one csv.gz": ("out.csv.gz", {}),
    "one ipc": ("out.arrow", {"compression": "zstd"}),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make several row groups of a unit."""
    monkeypatch.setattr(writing, "group_rows", lambda _: 256)


def output(folder: Path, name: str) -> str:
    return f"{folder}/{name}"


def visible(folder: Path) -> dict[str, bytes]:
    found = tree(folder)
    assert not [each for each in found if "staging" in each or "partial" in each], found.keys()
    return found


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_equal_rows_give_equal_bytes_however_they_are_cut(tmp_path: Path, case: str) -> None:
    name, options = CASES[case]
    results = []
    for cut_rows in (1000, 77, 1):
        place = tmp_path / str(cut_rows)
        job = a_job(output(place, name), tmp_path / "state" / str(cut_rows), **options)
        run(job, a_plan(), cut_rows=cut_rows)
        results.append(visible(place))
    assert results[0] == results[1] == results[2]
    assert len(results[0]) >= 1


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        # Each operation on a disk takes its time.
        each if each in ("folder", "one parquet") else pytest.param(each, marks=pytest.mark.slow)
        for each in CASES
    ],
)
def test_interrupted_job_gives_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies before and after each operation on files, and another one resumes."""
    name, options = CASES[case]
    plan = a_plan(2)
    run(a_job(output(tmp_path / "whole", name), tmp_path / "s", **options), plan, rows=300)
    whole = visible(tmp_path / "whole")
    number = 0
    while True:
        place = tmp_path / str(number)
        job = a_job(output(place, name), tmp_path / "state" / str(number), **options)
        journal: dict[int, Any] = {}
        with crash_at(monkeypatch, number) as steps:
            try:
                run(job, plan, finished=journal, rows=300, is_finished=False)
            except Crash:
                pass
            else:
                break
        early = [each for each in tree(place) if not each.partition("/")[2].startswith("_stag")]
        if "_SUCCESS" in early:
            assert len(early) == len(whole)
        run(job, plan, finished=journal, rows=300)
        assert visible(place) == whole, steps[-1]
        assert not Path(job.state_folder).exists()
        number += 1
    assert number > 8


@pytest.mark.slow
def test_interrupted_replacement_ends_with_the_new_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(2)
    job = a_job(tmp_path / "whole", tmp_path / "s")
    run(job, plan, rows=300)
    whole = visible(tmp_path / "whole")
    number = 0
    while True:
        place = tmp_path / str(number)
        run(a_job(place, tmp_path / "s", partition_by=("day",)), a_plan(4, "old"), rows=50)
        old = visible(place)
        job = a_job(place, tmp_path / "s", overwrite="replace")
        journal: dict[int, Any] = {}
        with crash_at(monkeypatch, number) as steps:
            try:
                run(job, plan, finished=journal, rows=300, is_finished=False)
            except Crash as crash:
                if "move" not in str(crash) and not any("move" in step for step in steps):
                    kept = {k: v for k, v in tree(place).items() if not k.startswith("_staging-")}
                    assert kept in (old, {k: v for k, v in old.items() if k != "_SUCCESS"})
            else:
                break
        run(job, plan, finished=journal, rows=300)
        assert visible(place) == whole, steps[-1]
        assert not [each for each in place.iterdir() if each.is_dir()]
        number += 1
    assert number > 12


def test_folder_has_all_rows_in_order_with_their_origin(tmp_path: Path) -> None:
    run(a_job(tmp_path / "out", tmp_path / "s"), a_plan())
    assert pads.dataset(tmp_path / "out").to_table().equals(ALL)
    for each in (tmp_path / "out").glob("*.parquet"):
        metadata = pq.read_schema(each).metadata
        assert metadata[b"iskander.model"] == b"churn"
        assert metadata[b"iskander.version"] == b"3"
        assert metadata[b"iskander.digest"] == b"d" * 64
        assert metadata[b"iskander.product"].startswith(b"iskander ")
        assert json.loads(metadata[b"iskander.input"]) == {"kind": "files"}
        assert pq.ParquetFile(each).metadata.metadata[b"iskander.model"] == b"churn"
        assert pq.ParquetFile(each).metadata.row_group(0).num_rows == 256
    assert json.loads((tmp_path / "out" / "_SUCCESS").read_text())["iskander.model"] == "churn"
    names = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert names == ["_SUCCESS", *(f"{each.name}.parquet" for each in a_plan().units)]


@pytest.mark.parametrize(
    "name", ["out.parquet", "out.arrow", "out.csv", "out.csv.gz", "out.feather", "out.csv.zst"]
)
def test_one_file_has_all_rows_in_order(tmp_path: Path, name: str) -> None:
    run(a_job(tmp_path / name, tmp_path / "s"), a_plan())
    format = "csv" if ".csv" in name else "parquet" if "parquet" in name else "ipc"
    if format == "csv":
        compressed = pa.input_stream(str(tmp_path / name))
        found = pacsv.read_csv(
            compressed, convert_options=pacsv.ConvertOptions(column_types=SCHEMA)
        )
        compressed.close()
        assert found.column("score").equals(ALL.column("score"))
        assert found.column("id").equals(ALL.column("id"))
    else:
        assert pads.dataset(tmp_path / name, format=format).to_table().equals(ALL)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_one_ipc_file_has_the_origin(tmp_path: Path) -> None:
    run(a_job(tmp_path / "out.arrow", tmp_path / "s"), a_plan())
    with pa.memory_map(str(tmp_path / "out.arrow")) as file:
        assert pa.ipc.open_file(file).schema.metadata[b"iskander.version"] == b"3"


def test_partitions_are_hive_folders_with_quoted_values(tmp_path: Path) -> None:
    run(a_job(tmp_path / "out", tmp_path / "s", partition_by=("group", "day")), a_plan())
    hive = pads.partitioning(
        pa.schema([("group", pa.string()), ("day", pa.int32())]), flavor="hive"
    )
    found = pads.dataset(tmp_path / "out", partitioning=hive).to_table().sort_by("id")
    assert found.select(SCHEMA.names).equals(ALL)
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "group=b%2Fc" in names and "group=__HIVE_DEFAULT_PARTITION__" in names
    one = pq.ParquetFile(next((tmp_path / "out" / "group=a" / "day=0").glob("*.parquet")))
    assert one.schema_arrow.names == ["id", "score"]
    assert one.read().column("id").to_pylist() == sorted(one.read().column("id").to_pylist())


@pytest.mark.long
def test_partitions_beyond_the_open_files_and_the_buffer_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "OPEN_MAX", 2)
    monkeypatch.setattr(writing, "BUFFERED_BLOCKS", 1)
    monkeypatch.setattr(writing, "group_rows", lambda _: 16)
    results = []
    for cut_rows in (1000, 7):
        place = tmp_path / str(cut_rows)
        job = a_job(place, tmp_path / "s", partition_by=("group", "day"))
        run(job, a_plan(1), cut_rows=cut_rows)
        results.append(visible(place))
    assert results[0] == results[1]
    assert any("_00001" in each for each in results[0])
    hive = pads.partitioning(
        pa.schema([("group", pa.string()), ("day", pa.int32())]), flavor="hive"
    )
    found = pads.dataset(tmp_path / "7", partitioning=hive).to_table().sort_by("id")
    assert found.select(SCHEMA.names).equals(pa.Table.from_batches([rows_of(0)]))
    for folder in {Path(each).parent for each in results[0] if each != "_SUCCESS"}:
        ids: list[int] = []
        for each in sorted((tmp_path / "7" / folder).glob("*.parquet")):
            ids += pq.ParquetFile(each).read().column("id").to_pylist()
        assert ids == sorted(ids)


def test_too_many_partitions_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "PARTITIONS_MAX", 10)
    with pytest.raises(LimitExceeded, match="more than 10 partitions"):
        run(a_job(tmp_path / "out", tmp_path / "s", partition_by=("id",)), a_plan())
    assert not list((tmp_path / "out").rglob("*.parquet"))


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (("grup",), "did you mean 'group'"),
        (("score",), "'score' with the type float"),
        (("id", "group", "day"), "not reached"),
        (("day", "day"), "twice"),
    ],
)
def test_unsuitable_partition_columns_are_rejected(
    tmp_path: Path, columns: tuple[str, ...], text: str
) -> None:
    schema = SCHEMA if "not reached" not in text else SCHEMA.remove(3)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s", partition_by=columns))
    with pytest.raises(ConfigError, match=text.replace("not reached", "all columns")):
        sink.prepare(a_plan(), schema, is_resumed=False)
    assert not (tmp_path / "out").exists()


def test_sorted_output_has_a_total_order_across_files(tmp_path: Path) -> None:
    job = a_job(tmp_path / "out", tmp_path / "s", sort_by=("group", "day"), file_bytes=3000)
    run(job, a_plan())
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(files) > 2
    found = pa.concat_tables(pq.read_table(each) for each in files)
    keys = ALL.append_column("at", pa.array(range(ALL.num_rows)))
    wanted = keys.sort_by([("group", "ascending"), ("day", "ascending"), ("at", "ascending")])
    assert found.equals(wanted.drop_columns(["at"]))
    sorting_columns = pq.ParquetFile(files[0]).metadata.row_group(0).sorting_columns
    assert [each.column_index for each in sorting_columns] == [1, 2]


@pytest.mark.long
def test_sort_beyond_its_memory_uses_temporary_files(tmp_path: Path) -> None:
    """400,000 rows of 1 kB in 200 MiB."""
    count, rows = 40, 10_000
    schema = pa.schema([("k", pa.int64()), ("s", pa.string())])

    def batches() -> Iterator[pa.RecordBatch]:
        for index in range(count):
            keys = [(index * rows + i) * 7919 % 400_009 for i in range(rows)]
            text = pa.array([f"{key:01000d}" for key in keys])
            yield pa.record_batch([pa.array(keys), text], schema=schema)

    last, total = -1, 0
    for each in sorting.sorted_batches(
        batches(), schema, ("k",), folder=str(tmp_path), batch_rows=4096, memory_bytes=200 << 20
    ):
        keys = each.column("k").to_pylist()
        assert keys == sorted(keys) and keys[0] > last
        last, total = keys[-1], total + len(keys)
    assert total == count * rows


@pytest.mark.parametrize(
    "array",
    [
        pa.array([3, None, 1], pa.timestamp("ns", "Europe/Paris")),
        pa.array([3, None, 1], pa.timestamp("s")),
        pa.array([3, None, 1], pa.duration("us")),
        pa.array([3.5, None, 1.5], pa.float16()),
        pa.array(["c", None, "a"], pa.large_string()),
        pa.array([b"cc", None, b"aa"], pa.binary(2)),
        pa.array([3, None, 1], pa.time32("ms")),
        pa.array([86_400_000, None, 0], pa.date64()),
        pa.array([3, None, 1], pa.uint64()),
        pa.array([True, None, False]),
    ],
    ids=lambda array: str(array.type),
)
def test_sort_keeps_types_and_values(array: pa.Array, tmp_path: Path) -> None:
    """A list stands beside each key."""
    lists = pa.array([[3.0], None, [1.0]], pa.list_(pa.float32(), 1))
    batch = pa.record_batch({"k": array, "K": lists})
    sorting.check_sort(("k",), batch.schema)
    found = list(
        sorting.sorted_batches(
            iter([batch]), batch.schema, ("k",), folder=str(tmp_path), batch_rows=10
        )
    )
    assert found[0].schema == batch.schema
    assert found[0].equals(batch.take(pa.array([2, 0, 1])))


def test_sort_without_duckdb_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s", sort_by=("id",)))
    with pytest.raises(ConfigError, match=r"iskander\[sort\]"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("out", {}),
        ("out", {"partition_by": ("day",)}),
        ("out", {"sort_by": ("id",)}),
        ("out.parquet", {}),
        ("out.csv", {}),
        ("out.arrow", {}),
        ("out.arrow/", {}),
    ],
)
@pytest.mark.parametrize("units", [0, 2])
def test_output_without_rows_has_the_columns(
    tmp_path: Path, name: str, options: dict[str, Any], units: int
) -> None:
    """No units, and units without rows."""
    run(a_job(output(tmp_path, name), tmp_path / "s", **options), a_plan(units), rows=0)
    format = "csv" if "csv" in name else "ipc" if "arrow" in name else "parquet"
    found = pads.dataset(output(tmp_path, name).rstrip("/"), format=format)
    assert found.schema.names == SCHEMA.names
    assert found.to_table().num_rows == 0
    if format != "csv":
        assert found.schema.remove_metadata() == SCHEMA


def test_unit_without_rows_makes_no_file(tmp_path: Path) -> None:
    plan = a_plan(2)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(plan.units[0], iter([rows_of(0, 0)]))]
    staged.append(sink.stager().stage(plan.units[1], iter([rows_of(1, 5)])))
    sink.commit(plan, staged)
    sink.finish()
    assert [each.rows for each in staged] == [0, 5]
    names = sorted(visible(tmp_path / "out"))
    assert names == ["_SUCCESS", f"{plan.units[1].name}.parquet"]


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_existing_output_is_rejected_by_name_and_unchanged(tmp_path: Path, name: str) -> None:
    run(a_job(tmp_path / name, tmp_path / "s"), a_plan())
    before = tree(tmp_path)
    sink = open_sink(a_job(tmp_path / name, tmp_path / "s"))
    with pytest.raises(OutputExists, match=f"{name}: the .* exists; use --overwrite"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_output_that_appears_during_the_job_is_not_replaced(tmp_path: Path, name: str) -> None:
    plan = a_plan(1)
    sink = open_sink(a_job(tmp_path / name, tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(plan.units[0], iter([rows_of(0)]))]
    other = tmp_path / name if "." in name else tmp_path / name / "other.parquet"
    other.write_text("mine")
    with pytest.raises(OutputExists):
        sink.commit(plan, staged)
    assert other.read_text() == "mine"


def test_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run(a_job(tmp_path / "out", tmp_path / "s"), a_plan())
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_append_keeps_the_earlier_files_of_equal_units(tmp_path: Path) -> None:
    job = a_job(tmp_path / "out", tmp_path / "s")
    run(job, a_plan())
    before = visible(tmp_path / "out")
    run(a_job(tmp_path / "out", tmp_path / "s", overwrite="append"), a_plan(text="second"))
    after = visible(tmp_path / "out")
    assert all(after[name] == text for name, text in before.items() if name != "_SUCCESS")
    assert pads.dataset(tmp_path / "out").count_rows() == 2 * ALL.num_rows


@pytest.mark.parametrize(
    ("options", "schema", "text"),
    [
        ({}, SCHEMA.set(0, pa.field("id", pa.int32())), "columns differ"),
        ({}, SCHEMA.append(pa.field("more", pa.int32())), "columns differ"),
        ({"partition_by": ("day",)}, SCHEMA, "folders"),
    ],
)
def test_append_of_another_form_is_rejected(
    tmp_path: Path, options: dict[str, Any], schema: pa.Schema, text: str
) -> None:
    run(a_job(tmp_path / "out", tmp_path / "s"), a_plan())
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s", overwrite="append", **options))
    with pytest.raises(OutputExists, match=text):
        sink.prepare(a_plan(text="second"), schema, is_resumed=False)


def test_replace_rejects_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "out" / "sub").mkdir(parents=True)
    (tmp_path / "out" / "sub" / "thesis.txt").write_text("mine")
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s", overwrite="replace"))
    with pytest.raises(OutputExists, match=r"sub/thesis\.txt"):
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    assert (tmp_path / "out" / "sub" / "thesis.txt").read_text() == "mine"


def test_replace_of_one_file(tmp_path: Path) -> None:
    run(a_job(tmp_path / "out.parquet", tmp_path / "s"), a_plan(1))
    run(a_job(tmp_path / "out.parquet", tmp_path / "s", overwrite="replace"), a_plan(2, "second"))
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 2000


def test_staged_units_of_another_job_are_rejected_unless_restart(tmp_path: Path) -> None:
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))
    other = open_sink(a_job(tmp_path / "out", tmp_path / "s2"))
    with pytest.raises(JobConflict, match="another job"):
        other.prepare(a_plan(text="second"), SCHEMA, is_resumed=False)
    run(a_job(tmp_path / "out", tmp_path / "s2", restart=True), a_plan(text="second"))
    assert pads.dataset(tmp_path / "out").to_table().equals(ALL)
    visible(tmp_path / "out")


def test_new_run_does_not_use_the_staged_units_of_an_earlier_one(tmp_path: Path) -> None:
    plan = a_plan(2)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    sink.stager().stage(plan.units[0], iter([rows_of(7)]))
    sink.stager().stage(plan.units[1], iter([rows_of(7)]))
    run(a_job(tmp_path / "out", tmp_path / "s"), plan)
    assert pads.dataset(tmp_path / "out").to_table().equals(ALL.slice(0, 2000))


def test_lost_unit_is_not_recovered_and_not_committed(tmp_path: Path) -> None:
    plan = a_plan(1)
    journal: dict[int, Any] = {}
    job = a_job(tmp_path / "out", tmp_path / "s")
    sink = open_sink(job)
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = sink.stager().stage(plan.units[0], iter([rows_of(0)]))
    assert Path(staged.path).is_dir() and staged.rows == 1000
    next(Path(staged.path).glob("*.parquet")).unlink()
    with pytest.raises(OutputError, match="lost"):
        sink.commit(plan, [staged])
    assert not list((tmp_path / "out").glob("*.parquet"))
    run(job, plan, finished=journal)
    assert pads.dataset(tmp_path / "out").count_rows() == 1000


def test_abort_leaves_nothing(tmp_path: Path) -> None:
    for name in ("out", "out.parquet"):
        sink = open_sink(a_job(tmp_path / name, tmp_path / "s"))
        sink.prepare(a_plan(), SCHEMA, is_resumed=False)
        sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))
        sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_failed_iterator_leaves_no_unit_and_passes_its_error(tmp_path: Path) -> None:
    plan = a_plan()
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)

    def failing() -> Iterator[pa.RecordBatch]:
        yield rows_of(0)
        raise OSError("of the network")

    with pytest.raises(OSError, match="of the network"):
        sink.stager().stage(plan.units[0], failing())
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_batch_with_other_columns_is_rejected(tmp_path: Path) -> None:
    plan = a_plan()
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    with pytest.raises(ContractError, match="columns"):
        sink.stager().stage(plan.units[0], iter([rows_of(0).select(["id"])]))
    text = rows_of(0).set_column(3, "score", pa.array(["x"] * 1000))
    with pytest.raises(ContractError, match="'score'"):
        sink.stager().stage(plan.units[0], iter([text]))


def test_units_of_several_threads_are_all_committed(tmp_path: Path) -> None:
    plan = a_plan(8)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s", partition_by=("day",)))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged: dict[int, Any] = {}

    def stage(index: int) -> None:
        staged[index] = sink.stager().stage(plan.units[index], cut(rows_of(index), 100))

    threads = [threading.Thread(target=stage, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sink.commit(plan, list(staged.values()))
    assert pads.dataset(tmp_path / "out").count_rows() == 8000


FULL_DISK = """
import resource, sys
# A file of bytecode would be cut at the limit.
sys.dont_write_bytecode = True
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from support.scoring_sinks import a_job, a_plan, run, rows_of
from iskander.lake.sinks.errors import OutputError
import json
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
try:
    run(a_job(sys.argv[1], sys.argv[2], **json.loads(sys.argv[5])), a_plan(2), rows=20000)
except OutputError as error:
    assert "File too large" in error.message or "rror" in error.message, error
    sys.exit(9)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "limit"),
    [
        ("out", {}, 100),
        ("out", {}, 50_000),
        ("out", {"partition_by": ["day"]}, 20_000),
        ("out", {"sort_by": ["score"]}, 310_000),
        ("out.parquet", {}, 10_000),
        # Units fit and all rows together do not.
        ("out.csv", {}, 500_000),
        ("out.csv.gz", {}, 300_000),
        ("out.arrow", {"compression": "none"}, 600_000),
    ],
)
def test_full_disk_leaves_nothing_half_committed(
    tmp_path: Path, name: str, options: dict[str, Any], limit: int
) -> None:
    """A limit of the size of files stands for the disk, in a process of its own."""
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            FULL_DISK,
            tmp_path / name,
            tmp_path / "s",
            tests,
            str(limit),
            json.dumps(options),
        ],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 9, done.stderr.decode()
    assert done.stderr == b""
    place = tmp_path / name
    if "." in name:
        assert not place.exists()
    elif place.exists():
        assert all(each.name.startswith("_staging-") for each in place.iterdir())
    assert not list(tmp_path.rglob("*.partial/*"))
    fixed = {key: tuple(value) if key.endswith("by") else value for key, value in options.items()}
    run(a_job(place, tmp_path / "s", **fixed), a_plan(2), rows=20_000, finished={})
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert place.exists()


def test_folder_without_permission_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sink = open_sink(a_job(tmp_path / "file" / "out", tmp_path / "s"))
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)
    with pytest.raises(OutputError, match="file/out"):
        sink.stager().stage(a_plan().units[0], iter([rows_of(0)]))


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("out.parquet", {"partition_by": ("day",)}, "folder"),
        ("out.parquet", {"overwrite": "append"}, "append needs"),
        ("out.parquet", {"compression": "lzma"}, "compression is 'lzma'"),
        ("out.csv.gz", {"compression": "zstd"}, "the name means 'gzip'"),
        ("in.parquet", {}, "the output is the input in.parquet"),
    ],
)
def test_options_that_do_not_fit_are_rejected(
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=text):
        open_sink(a_job(tmp_path / name, tmp_path / "s", **options))


def test_unknown_scheme_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="ftp://"):
        open_sink(a_job("ftp://host/x", tmp_path / "s"))


def test_csv_with_lists_is_rejected(tmp_path: Path) -> None:
    sink = open_sink(a_job(tmp_path / "out.csv", tmp_path / "s"))
    with pytest.raises(Unsupported, match=r"'v'.*CSV"):
        sink.prepare(a_plan(), pa.schema([("v", pa.list_(pa.int8()))]), is_resumed=False)


def test_two_columns_with_one_name_are_rejected(tmp_path: Path) -> None:
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    with pytest.raises(ContractError, match="two columns"):
        sink.prepare(a_plan(), pa.schema([("v", pa.int8()), ("v", pa.int8())]), is_resumed=False)


def test_nested_and_dictionary_columns_have_equal_bytes(tmp_path: Path) -> None:
    """Dictionaries become values, and bytes under nulls do not reach IPC files."""
    values = pa.array(["x", "y", None, "x"] * 250)
    floats = pa.Array.from_buffers(
        pa.float32(),
        1000,
        [
            pa.array([True, False, True, True] * 250).buffers()[1],
            pa.py_buffer(bytes(range(250)) * 16),
        ],
    )
    lists = pa.FixedSizeListArray.from_arrays(pa.array(range(2000), pa.float32()), 2)
    batch = pa.record_batch({"d": values.dictionary_encode(), "f": floats, "l": lists})
    clean = pa.record_batch(
        {"d": values, "f": pa.array(floats.to_pylist(), pa.float32()), "l": lists}
    )
    plan = a_plan(1)
    for ending in ("arrow", "parquet"):
        found = []
        for index, (each, rows) in enumerate([(batch, 1000), (batch, 33), (clean, 500)]):
            path = tmp_path / f"{index}.{ending}"
            sink = open_sink(a_job(path, tmp_path / "s"))
            sink.prepare(plan, batch.schema, is_resumed=False)
            sink.commit(plan, [sink.stager().stage(plan.units[0], cut(each, rows))])
            sink.finish()
            found.append(path.read_bytes())
        assert found[0] == found[1] == found[2], ending
    assert pq.read_table(tmp_path / "0.parquet").column("d").to_pylist() == values.to_pylist()


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[str, str]]:
    """A bucket of moto's server: the URI before `?`, and the options."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = f"endpoint_override={host}:{port}&scheme=http&region=us-east-1"
    filesystem = pafs.S3FileSystem(
        access_key="a",
        secret_key="b",
        endpoint_override=f"{host}:{port}",
        scheme="http",
        allow_bucket_creation=True,
    )
    filesystem.create_dir("results")
    yield "s3://a:b@results", options
    server.stop()


def objects(uri: str) -> dict[str, bytes]:
    """The visible objects below a URI, by their names from there."""
    filesystem, folder = pafs.FileSystem.from_uri(uri)
    found = {}
    selector = pafs.FileSelector(folder, recursive=True, allow_not_found=True)
    for each in filesystem.get_file_info(selector):
        if each.is_file:
            with filesystem.open_input_file(each.path) as file:
                found[each.path.removeprefix(f"{folder}/")] = file.read()
    return found


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"partition_by": ("day",)}, {"sort_by": ("score",)}])
def test_object_store_gets_the_files_of_a_folder(
    tmp_path: Path,
    bucket: tuple[str, str],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(a_job(tmp_path / "out", tmp_path / "s", **options), a_plan(), rows=300)
    whole = visible(tmp_path / "out")
    for number in (None, 4, 9, 12, 14):
        output = f"{bucket[0]}/{number}-{len(str(options))}/out?{bucket[1]}"
        job = a_job(output, tmp_path / "s3", **options)
        journal: dict[int, Any] = {}
        if number is not None:
            with crash_at(monkeypatch, number), pytest.raises(Crash):
                run(job, a_plan(), finished=journal, rows=300, is_finished=False)
        run(job, a_plan(), finished=journal, rows=300)
        assert objects(output) == whole
    with pytest.raises(OutputExists):
        open_sink(job).prepare(a_plan(), SCHEMA, is_resumed=False)


@pytest.mark.long
def test_object_store_gets_one_file(tmp_path: Path, bucket: tuple[str, str]) -> None:
    run(a_job(tmp_path / "out.parquet", tmp_path / "s"), a_plan())
    job = a_job(f"{bucket[0]}/one/out.parquet?{bucket[1]}", tmp_path / "s")
    run(job, a_plan())
    whole = (tmp_path / "out.parquet").read_bytes()
    assert objects(f"{bucket[0]}/one?{bucket[1]}") == {"out.parquet": whole}


@pytest.mark.long
def test_abort_in_an_object_store_leaves_nothing_for_the_next_job(
    tmp_path: Path, bucket: tuple[str, str]
) -> None:
    """A unit that is in the middle of an upload ends after the abort."""
    output = f"{bucket[0]}/abort/out?{bucket[1]}"
    job = a_job(output, tmp_path / "s")
    sink = FileSink(job)
    sink.prepare(a_plan(), SCHEMA, is_resumed=False)

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of(0)
        sink.abort()
        yield rows_of(0)

    with pytest.raises(Cancelled):
        sink.stager().stage(a_plan().units[0], batches())
    assert objects(output) == {}
    assert not (tmp_path / "s").exists()
    run(job, a_plan(text="second"), rows=10)
