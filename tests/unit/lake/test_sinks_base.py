"""Steps that files and tables share: stops, aborts, deleted outputs, and errors of the system."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitStateUnknownException, ServiceUnavailableError
from support.scoring_sinks import SCHEMA, Crash, a_job, a_plan, rows_of, run, tree

from iskander.errors import Cancelled
from iskander.lake.errors import JobConflict
from iskander.lake.job import Job
from iskander.lake.sinks import Sink, open_sink
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sinks.files import FileSink
from iskander.lake.sinks.iceberg import IcebergSink
from iskander.lake.sinks.storage import Record, Storage

KINDS: dict[str, dict[str, Any]] = {
    "out": {},
    "out.parquet": {},
    "out.csv": {},
    "out.arrow": {},
    "sorted": {"sort_by": ("score",)},
    "delta": {},
    "delta sorted": {"sort_by": ("score",)},
    "iceberg": {},
    "iceberg sorted": {"sort_by": ("score",)},
}


class Stopped(Exception):
    """The caller of a commit stops it."""


@dataclass
class Place:
    """An output of one kind, with its folder, its options, and a count of its rows."""

    root: Path
    output: str
    options: dict[str, Any]
    catalog: SqlCatalog

    def job(self, **options: Any) -> Job:
        return a_job(self.output, self.root / "s", **self.options, **options)

    def sink(self, **options: Any) -> Sink:
        return self.make(self.job(**options))

    def make(self, job: Job) -> Sink:
        if job.output.startswith("iceberg://"):
            return IcebergSink(job, self.catalog)
        return open_sink(job)

    def rows(self) -> int:
        """Rows of the output; -1 if it does not exist."""
        if self.output.startswith("iceberg://"):
            if not self.catalog.table_exists("ns.out"):
                return -1
            return int(self.catalog.load_table("ns.out").scan().to_arrow().num_rows)
        path = Path(self.output.removeprefix("delta://"))
        if self.output.startswith("delta://"):
            if not DeltaTable.is_deltatable(str(path)):
                return -1
            return int(DeltaTable(path).to_pyarrow_dataset().count_rows())
        if not path.exists() or (path.is_dir() and not (path / "_SUCCESS").exists()):
            return -1
        format = {".csv": "csv", ".arrow": "ipc"}.get(path.suffix, "parquet")
        return int(pads.dataset(path, format=format).count_rows())

    def delete(self) -> None:
        """Delete the output, as its owner does."""
        if self.output.startswith("iceberg://"):
            self.catalog.drop_table("ns.out")
            return
        path = Path(self.output.removeprefix("delta://"))
        for each in sorted(path.rglob("*"), reverse=True):
            each.rmdir() if each.is_dir() else each.unlink()
        path.rmdir() if path.is_dir() else path.unlink()

    def files(self) -> dict[str, bytes]:
        """All files but those of the catalog itself."""
        return {k: v for k, v in tree(self.root).items() if not k.endswith(".db")}


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    (tmp_path / "house").mkdir()
    catalog = SqlCatalog(
        "c", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}/house"
    )
    catalog.create_namespace("ns")
    output = {"delta": f"delta://{tmp_path}/t", "iceberg": "iceberg://c/ns.out"}.get(
        kind.partition(" ")[0], f"{tmp_path}/{kind}"
    )
    yield Place(tmp_path, output, KINDS[kind], catalog)
    catalog.engine.dispose()


def test_stopped_commit_leaves_all_as_it_was_and_is_resumed(place: Place) -> None:
    """`check` raises at each of its calls, and is not called after the record says committing."""
    plan = a_plan(2)
    journal: dict[int, Any] = {}
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(each, iter([rows_of(each.index, 50)])) for each in plan.units]
    before = place.files()
    number = stops = 0
    while True:
        calls = 0

        def check(_number: int = number) -> None:
            nonlocal calls
            assert not sink.is_commit_begun
            calls += 1
            if calls == _number + 1:
                raise Stopped

        try:
            sink.commit(plan, staged, check=check)
        except Stopped:
            stops += 1
            after = place.files()
            assert {key: after[key] for key in before} == before
            assert place.rows() == -1 and not sink.is_commit_begun
        else:
            break
        number += 1
    assert stops >= 3
    sink.finish()
    assert place.rows() == 100
    place.delete()
    run(place.job(), plan, finished=journal, rows=50, make=place.make)
    assert place.rows() == 100


def test_abort_after_a_stopped_commit_leaves_nothing(place: Place) -> None:
    plan = a_plan(1)
    sink = place.sink()
    sink.abort()
    for calls in (None, 0, 1):
        sink.prepare(plan, SCHEMA, is_resumed=False)
        left = calls

        def check() -> None:
            nonlocal left
            assert left is not None
            left -= 1
            if left < 0:
                raise Stopped

        if calls is not None:
            staged = [sink.stager().stage(plan.units[0], iter([rows_of(0, 50)]))]
            with pytest.raises(Stopped):
                sink.commit(plan, staged, check=check)
        sink.abort()
        sink.abort()
        assert place.files() == {}
        assert not (place.root / "s").exists()
        sink = place.sink()


def test_abort_ends_units_in_other_threads(place: Place) -> None:
    """A unit waits for its next batch during the abort, and goes on afterwards."""
    plan = a_plan(2)
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=False)
    waits, goes_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of(0, 70_000)
        waits.set()
        assert goes_on.wait(30)
        yield rows_of(0, 70_000)

    def stage() -> None:
        try:
            sink.stager().stage(plan.units[0], batches())
        except Cancelled as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    assert waits.wait(30)
    sink.abort()
    goes_on.set()
    thread.join(30)
    assert len(errors) == 1
    with pytest.raises(Cancelled, match="aborted"):
        sink.stager().stage(plan.units[1], iter([rows_of(1, 10)]))
    assert place.files() == {}


@pytest.mark.parametrize("place", ["out"], indirect=True)
def test_abort_waits_for_a_unit_that_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan(1)
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=False)
    writes, goes_on = threading.Event(), threading.Event()
    changed = sink._staging._changed  # type: ignore[attr-defined]
    publish, wait_for = Storage.publish, changed.wait_for

    def slow(self: Storage, partial: str, folder: str) -> None:
        writes.set()
        goes_on.wait(2)
        publish(self, partial, folder)

    def observed(*words: Any) -> Any:
        goes_on.set()
        return wait_for(*words)

    monkeypatch.setattr(Storage, "publish", slow)
    monkeypatch.setattr(changed, "wait_for", observed)
    words = (plan.units[0], iter([rows_of(0, 10)]))
    thread = threading.Thread(target=sink.stager().stage, args=words)
    thread.start()
    assert writes.wait(30)
    sink.abort()
    thread.join(30)
    assert not (place.root / "out").exists()


def test_output_deleted_after_the_commit_is_made_again(place: Place) -> None:
    """The process died before it removed the record, and the output was deleted since."""
    plan = a_plan(2)
    journal: dict[int, Any] = {}
    run(place.job(), plan, finished=journal, rows=50, make=place.make, is_finished=False)
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=True)
    assert all(sink.recover(each, journal[each.index]) for each in plan.units)
    place.delete()
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=True)
    assert not any(sink.recover(each, journal[each.index]) for each in plan.units)
    journal.clear()
    run(place.job(), plan, finished=journal, rows=50, make=place.make)
    assert place.rows() == 100


def test_output_knows_the_plan_of_its_results(place: Place) -> None:
    plan, other = a_plan(1), a_plan(1, "other")
    assert not place.sink().is_complete(plan)
    run(place.job(), plan, rows=50, make=place.make)
    is_known = not place.output.endswith(".csv")
    assert place.sink().is_complete(plan) == is_known
    assert not place.sink().is_complete(other)
    run(place.job(overwrite="replace"), other, rows=50, make=place.make)
    assert place.sink().is_complete(other) == is_known
    assert not place.sink().is_complete(plan)


@pytest.mark.parametrize("place", ["delta", "iceberg"], indirect=True)
def test_table_knows_the_plans_that_were_appended(place: Place) -> None:
    run(place.job(), a_plan(1), rows=50, make=place.make)
    run(place.job(overwrite="append"), a_plan(1, "other"), rows=50, make=place.make)
    assert place.sink(overwrite="append").is_complete(a_plan(1))
    assert not place.sink(overwrite="append").is_complete(a_plan(1, "third"))


def test_table_without_rows_knows_its_plan(place: Place) -> None:
    run(place.job(), a_plan(1), rows=0, make=place.make)
    assert place.sink().is_complete(a_plan(1)) == (not place.output.endswith(".csv"))


def test_begun_commit_is_known_to_any_job(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(1)
    journal: dict[int, Any] = {}
    assert not place.sink().is_commit_begun
    with monkeypatch.context() as patch:
        patch.setattr(type(place.sink()), "_clean", _crash)
        with pytest.raises(Crash):
            run(place.job(), plan, finished=journal, rows=50, make=place.make)
    assert place.sink().is_commit_begun
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=True)
    sink.abort()
    assert place.rows() == 50 and sink.is_commit_begun
    run(place.job(), plan, finished=journal, rows=50, make=place.make)
    assert place.rows() == 50 and not place.sink().is_commit_begun


def _crash(*_: Any) -> None:
    raise Crash


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from iskander.lake.sinks import staging
from support.scoring_sinks import a_job, a_plan, run
def killed(*_, folder, **__):
    Path(folder, "rows.tmp").write_bytes(b"x")
    os.kill(os.getpid(), signal.SIGKILL)
staging.sorted_batches = killed
run(a_job(sys.argv[1], sys.argv[2], sort_by=("score",)), a_plan(1), rows=50)
"""


def test_killed_sort_leaves_no_files_after_the_next_one(tmp_path: Path) -> None:
    """Nothing is in the folder for temporary files of the system either."""
    (tmp_path / "tmp").mkdir()
    words = [sys.executable, "-c", KILLED, tmp_path / "out", tmp_path / "s"]
    done = subprocess.run(
        [*words, Path(__file__).parents[2]],
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / "s" / "sort" / "rows.tmp").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    run(a_job(tmp_path / "out", tmp_path / "s", sort_by=("score",)), a_plan(1), rows=50)
    assert not (tmp_path / "s").exists()
    assert pads.dataset(tmp_path / "out").count_rows() == 50


def test_restart_deletes_the_files_of_a_killed_sort(tmp_path: Path) -> None:
    (tmp_path / "s" / "sort").mkdir(parents=True)
    (tmp_path / "s" / "sort" / "rows.tmp").touch()
    run(a_job(tmp_path / "out", tmp_path / "s"), a_plan(1), rows=50)
    assert not (tmp_path / "s").exists()


def test_record_that_the_system_rejects_is_named(tmp_path: Path) -> None:
    (tmp_path / "s" / "output.json" / "x").mkdir(parents=True)
    record = Record(tmp_path / "s")
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    calls: list[Callable[[], Any]] = [
        record.peek,
        record.remove,
        lambda: record.load("f"),
        lambda: record.save(state="prepared"),
        lambda: sink.is_commit_begun,
        sink.finish,
    ]
    for each in calls:
        with pytest.raises(OutputError, match=r"s/output\.json"):
            each()


@pytest.mark.parametrize("text", ["", "[]", "{", "\0"])
def test_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "output.json").write_text(text)
    sink = open_sink(a_job(tmp_path / "out", tmp_path / "s"))
    with pytest.raises(JobConflict, match=r"output\.json: is damaged"):
        assert sink.is_commit_begun


@pytest.mark.parametrize("place", ["iceberg"], indirect=True)
def test_errors_of_a_catalog_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan(1)
    sink = place.sink()
    sink.prepare(plan, SCHEMA, is_resumed=False)
    staged = [sink.stager().stage(plan.units[0], iter([rows_of(0, 10)]))]

    def failing(error: Exception) -> Callable[..., Any]:
        def raised(*_: Any, **__: Any) -> None:
            raise error

        return raised

    unknown = CommitStateUnknownException("gateway timeout")
    with monkeypatch.context() as patch:
        patch.setattr(place.catalog, "create_table_transaction", failing(unknown))
        with pytest.raises(OutputError, match=r"ns\.out: the commit failed: gateway timeout"):
            sink.commit(plan, staged)
    with monkeypatch.context() as patch:
        patch.setattr(place.catalog, "load_table", failing(ServiceUnavailableError("busy")))
        for each in (lambda: place.sink().is_complete(plan), lambda: sink.commit(plan, staged)):
            with pytest.raises(OutputError, match=r"ns\.out: cannot open the table: busy"):
                each()
    sink.commit(plan, staged)
    assert place.rows() == 10


@pytest.mark.parametrize("place", ["delta"], indirect=True)
def test_errors_of_a_log_are_named(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    run(place.job(), a_plan(1), rows=10, make=place.make)

    def failing(*_: Any) -> None:
        raise DeltaError("torn checkpoint")

    monkeypatch.setattr(DeltaTable, "transaction_version", failing)
    sink = place.sink(overwrite="append")
    for each in (
        lambda: sink.is_complete(a_plan(1)),
        lambda: sink.prepare(a_plan(1, "more"), SCHEMA, is_resumed=False),
    ):
        with pytest.raises(OutputError, match=r"t: cannot read the log: torn checkpoint"):
            each()


def test_stager_writes_units_in_another_process(tmp_path: Path) -> None:
    """Two processes may write a unit at the same time, if one is thought to be dead."""
    plan = a_plan(2)
    sink = FileSink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    other = pickle.loads(pickle.dumps(sink.stager()))  # noqa: S301

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of(0, 10)
        other.stage(plan.units[0], iter([rows_of(0, 10)]))

    staged = [sink.stager().stage(plan.units[0], batches())]
    staged.append(other.stage(plan.units[1], iter([rows_of(1, 10)])))
    sink.commit(plan, staged)
    assert pq.read_table(tmp_path / "out").num_rows == 20


def test_partial_units_of_killed_processes_are_deleted_at_a_resume(tmp_path: Path) -> None:
    plan = a_plan(1)
    sink = FileSink(a_job(tmp_path / "out", tmp_path / "s"))
    sink.prepare(plan, SCHEMA, is_resumed=False)
    left = Path(sink.stager().folder) / "part-00000.1234.partial" / "file"
    left.parent.mkdir(parents=True)
    left.touch()
    again = FileSink(a_job(tmp_path / "out", tmp_path / "s"))
    again.prepare(plan, SCHEMA, is_resumed=True)
    assert not left.parent.exists()
