"""Runner of jobs with a scripted source, sink and client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from iskander.client import ModelDescription
from iskander.errors import (
    Cancelled,
    ConfigError,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    ModelMoved,
    ModelNotFound,
    NotReady,
    QueueFull,
    RuntimeDiffers,
    SourceChanged,
)
from iskander.foundation import clock
from iskander.lake.dry_run import DryRun, dry_run
from iskander.lake.errors import JobConflict
from iskander.lake.filters import Filter
from iskander.lake.job import Job
from iskander.lake.journal import Finished, Journal
from iskander.lake.plan import Plan, Unit, unit
from iskander.lake.planning import Planned, describe, plan_job
from iskander.lake.positions import Position
from iskander.lake.run import runner, unit_run
from iskander.lake.run.flow import Flow
from iskander.lake.run.runner import Interrupted, Parts, Runner, Stop, memory_bytes
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sinks.writing import Staged
from iskander.lake.whole import whole_if_needed

WITHIN_S = 10.0


def description(**changes: Any) -> ModelDescription:
    values: dict[str, Any] = {
        "name": "m", "version": "3", "ready": True, "backend": "onnx", "max_batch_rows": 100,
        "limits": {"rows": 1000, "bytes": 1 << 20, "string_bytes": 1 << 20}, "versions": ("3",),
        "aliases": {}, "input_schema": pa.schema([("x", pa.int64())]),
        "output_schema": pa.schema([pa.field("y", pa.int64(), nullable=False)]),
        "input_types": {"x": "int64"}, "passthrough": "none", "ranked_within": (),
        "metadata": {"name": "m", "version": "3", "ready": True, "inputs": ["x"]},
    }  # fmt: skip
    return ModelDescription(**(values | changes))


class ScriptedSource:
    """Units of `rows` rows, with the columns `x` (row number) and `id` (its text)."""

    is_resumable = True
    decimals: frozenset[str] = frozenset()

    def __init__(self, units: int = 3, rows: int = 10) -> None:
        self.schema = pa.schema([("x", pa.int64()), ("id", pa.string())])
        self.snapshot = {"kind": "scripted"}
        self.read_batches = 0
        self.error_after: tuple[int, Exception] | None = None
        self._rows = rows
        self._units = [unit(i, {"n": i}, rows=rows, bytes=8 * rows) for i in range(units)]

    def units(self) -> list[Unit]:
        return self._units

    def count(self, unit: Unit, filter: Filter | None) -> int:
        return self._rows

    def read(
        self, unit: Unit, columns: Any, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        first = unit.index * self._rows
        for start in range(first, first + self._rows, batch_rows):
            x = list(range(start, min(start + batch_rows, first + self._rows)))
            batch = pa.record_batch({"x": x, "id": [f"r{each}" for each in x]}, self.schema)
            self.read_batches += 1
            yield batch.select(columns)
        if self.error_after is not None and self.error_after[0] == unit.index:
            raise self.error_after[1]

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        return Position(f"file-{unit.index}", row)

    def close(self) -> None:
        pass


class ScriptedSink:
    """Keeps rows in memory."""

    is_resumable = True
    is_commit_begun = False

    def __init__(self) -> None:
        self.is_done = False
        self.on_commit: Callable[[], None] = lambda: None
        self.rows: dict[int, list[dict[str, Any]]] = {}
        self.lost: set[int] = set()
        self.committed: list[dict[str, Any]] | None = None
        self.calls: list[str] = []
        self.error: Exception | None = None

    def prepare(self, plan: Plan, schema: pa.Schema, *, is_resumed: bool) -> None:
        self.calls.append(f"prepare {is_resumed}")
        if self.error is not None:
            raise self.error

    def stager(self) -> ScriptedSink:
        return self

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        rows = [row for batch in batches for row in batch.to_pylist()]
        self.rows[unit.index] = rows
        return Staged(unit.index, unit.name, len(rows), 8 * len(rows))

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        if unit.index in self.lost:
            return None
        return Staged(unit.index, unit.name, finished.rows_out, finished.bytes)

    def is_complete(self, plan: Plan) -> bool:
        return self.is_done

    def commit(self, plan: Plan, staged: Any, *, check: Callable[[], None] = lambda: None) -> None:
        self.on_commit()
        check()
        assert [each.index for each in staged] == [each.index for each in plan.units]
        self.calls.append("commit")
        self.committed = [row for each in plan.units for row in self.rows.get(each.index, [])]

    def abort(self) -> None:
        self.calls.append("abort")

    def finish(self) -> None:
        self.calls.append("finish")


class ScriptedClient:
    """`y = 3 x + 1`; `answer` decides on each batch, with an error or None."""

    def __init__(self) -> None:
        self.description = description()
        self.answer: Callable[[list[int]], Exception | None] = lambda x: None
        self.calls: list[tuple[str, str | None, Any]] = []
        self.sent: list[list[int]] = []
        self.columns: set[str] = set()

    def model(self, name: str, *, version: str | None = None) -> Any:
        return SimpleNamespace(description=self.description)

    def stream(
        self,
        model: str,
        batches: Any,
        *,
        version: str | None = None,
        terms: Any = None,
        timeout_s: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        for outcome in self.outcomes(model, batches, version=version, terms=terms):
            if isinstance(outcome, IskanderError):
                raise outcome
            yield outcome

    def outcomes(
        self, model: str, batches: Any, *, version: str | None = None, terms: Any = None
    ) -> Iterator[Any]:
        self.calls.append((model, version, terms))
        for batch in batches:
            self.columns |= set(batch.schema.names)
            x = batch["x"].to_pylist()
            self.sent.append(x)
            error = self.answer(x)
            yield pa.record_batch({"y": [3 * each + 1 for each in x]}) if error is None else error


class Bench:
    """A job with its scripted parts."""

    def __init__(self, folder: Path, *, units: int = 3, **options: Any) -> None:
        values: dict[str, Any] = {"model": "m", "inputs": ("in",), "output": "out"}
        values |= {"batch_rows": 4, "concurrency": 1, **options}
        self.job = Job(**values)
        self.source = ScriptedSource(units)
        self.sink = ScriptedSink()
        self.client = ScriptedClient()
        self.state = folder / "state"
        self.stop = Stop()
        self.lost: Callable[[], IskanderError | None] = lambda: None
        self.runner: Runner | None = None
        self.is_kept = True

    def planned(self) -> Planned:
        source = whole_if_needed(self.source, self.client.description)
        return plan_job(self.job, source, self.client.description)

    def run(self, **limits: float) -> Any:
        planned = self.planned()
        with Journal(self.state) as journal:
            parts = Parts(
                job=self.job,
                planned=planned,
                source=whole_if_needed(self.source, self.client.description),
                sink=self.sink,
                client=self.client,
                journal=journal if self.is_kept else None,
                stop=self.stop,
                lost=self.lost,
            )
            self.runner = Runner(parts, **limits)
            return self.runner.run()

    def dry_run(self) -> DryRun:
        client: Any = self.client
        with Journal(self.state) as journal:
            source = whole_if_needed(self.source, client.description)
            return dry_run(self.job, self.planned(), source=source, client=client, journal=journal)

    def finished(self) -> set[int]:
        with Journal(self.state) as journal:
            journal.begin(self.planned().plan)
            return set(journal.finished())


def rejecting(*bad: int) -> Callable[[list[int]], Exception | None]:
    return lambda x: ContractError("bad row") if set(x) & set(bad) else None


# -- Results


@pytest.mark.parametrize("concurrency", [1, 3])
def test_rows_keep_their_order_and_kept_columns(tmp_path: Path, concurrency: int) -> None:
    bench = Bench(tmp_path, concurrency=concurrency, keep=("id",))
    report = bench.run()
    assert bench.sink.committed == [{"id": f"r{x}", "y": 3 * x + 1} for x in range(30)]
    assert (report.rows_in, report.rows_out, report.units, report.state) == (30, 30, 3, "done")
    assert bench.sink.calls == ["prepare False", "commit", "finish"]
    assert not bench.state.exists()


def test_only_inputs_of_the_model_are_sent_to_the_pinned_version(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.run()
    assert bench.client.columns == {"x"}
    (model, version, terms) = bench.client.calls[0]
    assert (model, version) == ("m", "3")
    assert terms["run_alone"] is True
    assert terms["client"] == f"score-{bench.planned().plan.fingerprint[:8]}"


def test_batches_are_cut_to_the_limits_of_the_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path, units=1, batch_rows=8)
    limits = {"rows": 3, "bytes": 1 << 20, "string_bytes": 1 << 20}
    bench.client.description = description(limits=limits)
    bench.run()
    assert max(map(len, bench.client.sent)) == 3
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(10)]


def test_dry_run_sends_a_batch_within_the_limits_of_the_server(tmp_path: Path) -> None:
    bench = Bench(tmp_path, batch_rows=10)
    half = pa.record_batch({"x": list(range(5))})
    limits = {"rows": 1000, "bytes": pa.ipc.get_record_batch_size(half), "string_bytes": 1 << 20}
    bench.client.description = description(limits=limits)
    estimate = bench.dry_run().estimate
    assert bench.client.sent == [[0, 1, 2, 3, 4]]
    assert estimate is not None and estimate.rows == 5


def test_dry_run_counts_finished_units_and_rejects_a_damaged_journal(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(25)
    with pytest.raises(ContractError):
        bench.run()
    assert (bench.dry_run().earlier.state, bench.dry_run().earlier.units_finished) == ("same", 2)
    with (bench.state / "journal.jsonl").open("ab") as file:
        file.write(b"\0\0\n")
    with pytest.raises(JobConflict, match="line 3 is damaged"):
        bench.dry_run()


def test_limit_scores_the_first_units_only(tmp_path: Path) -> None:
    bench = Bench(tmp_path, limit=12)
    assert [each.rows_max for each in bench.planned().plan.units] == [None, 2]


# -- Rejected rows


def test_rejected_rows_become_null(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    bench.client.answer = rejecting(0, 13, 29)
    report = bench.run()
    expected = [None if x in (0, 13, 29) else 3 * x + 1 for x in range(30)]
    assert [row["y"] for row in bench.sink.committed or []] == expected
    assert (report.rejected, report.quarantined) == (3, 0)


def test_rejected_rows_are_quarantined(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error=f"quarantine={tmp_path / 'bad'}")
    bench.client.answer = rejecting(5, 6)
    report = bench.run()
    assert [row["x"] for row in bench.sink.committed or []] == [
        x for x in range(30) if x not in (5, 6)
    ]
    assert (report.rows_in, report.rows_out, report.quarantined) == (30, 28, 2)


def test_rows_that_cannot_be_sent_are_rejected_rows(tmp_path: Path) -> None:
    """Three batches in a row cannot be matched, and the first stream has nothing to send."""
    bench = Bench(tmp_path, units=1, on_error="null", batch_rows=2)
    bench.client.description = description(
        input_schema=pa.schema([("x", pa.int8())]), input_types={"x": "int8"}
    )
    bench.source._rows = 260
    bench.run()
    expected = [3 * x + 1 if x < 128 else None for x in range(260)]
    assert [row["y"] for row in bench.sink.committed or []] == expected


def test_rejected_row_fails_a_strict_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(15)
    with pytest.raises(ContractError, match="bad row"):
        bench.run()
    assert bench.sink.committed is None
    assert bench.finished() == {0}


def test_retryable_error_of_a_batch_is_scored_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    errors: list[Exception] = [QueueFull("full")]
    bench.client.answer = lambda x: errors.pop() if errors else None
    report = bench.run()
    assert report.rejected == 0
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(30)]


def test_rows_that_are_rejected_after_a_retryable_error_do_not_end_the_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    errors: list[Exception] = [QueueFull("full")]
    reject = rejecting(2)
    bench.client.answer = lambda x: errors.pop() if errors else reject(x)
    assert bench.run().rejected == 1
    expected = [None if x == 2 else 3 * x + 1 for x in range(30)]
    assert [row["y"] for row in bench.sink.committed or []] == expected


# -- Failures and resume


def test_finished_units_are_not_scored_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(25)
    with pytest.raises(ContractError):
        bench.run()
    bench.client.answer, bench.client.sent = lambda x: None, []
    report = bench.run()
    assert min(min(x) for x in bench.client.sent) == 20
    assert (report.rows_in, report.units_resumed) == (30, 2)
    assert len(bench.sink.committed or []) == 30


def test_unit_whose_files_are_lost_is_scored_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = rejecting(25)
    with pytest.raises(ContractError):
        bench.run()
    bench.sink.lost = {0}
    bench.client.answer = rejecting(5)
    with pytest.raises(ContractError):
        bench.run()
    assert bench.finished() == {1}
    bench.client.answer, bench.client.sent = lambda x: None, []
    report = bench.run()
    assert {x for batch in bench.client.sent for x in batch} == {*range(10), *range(20, 30)}
    assert report.rows_in == 30


def test_unit_of_a_changed_source_does_not_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.source.error_after = (1, SourceChanged("in.parquet: changed"))
    with pytest.raises(SourceChanged, match=r"in\.parquet"):
        bench.run()
    assert bench.finished() == {0}
    assert 1 not in bench.sink.rows


def test_rejected_output_leaves_no_state(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sink.error = OutputError("full disk")
    with pytest.raises(OutputError):
        bench.run()
    assert not bench.state.exists()
    assert bench.client.sent == []


def test_replaced_model_ends_the_job_before_its_unit_counts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def replace(x: list[int]) -> None:
        if x[0] == 14:
            metadata = {**bench.client.description.metadata, "inputs": ["x", "z"]}
            bench.client.description = description(metadata=metadata)

    planned = bench.client.description
    bench.client.answer = replace
    with pytest.raises(ModelMoved, match=r"m/3.*part-00001"):
        bench.run()
    bench.client.description = planned
    assert bench.finished() == {0}


def test_model_with_other_files_and_the_same_contract_ends_the_job(tmp_path: Path) -> None:
    bench = Bench(tmp_path, units=2)
    metadata = {"inputs": ["x"], "files_sha256": "a"}
    bench.client.description = description(metadata=metadata)

    def answer(x: list[int]) -> None:
        if x[0] == 10:
            replaced = description(metadata=metadata | {"files_sha256": "b"})
            bench.client.description = replaced

    bench.client.answer = answer
    with pytest.raises(ModelMoved, match="replaced during the job"):
        bench.run()
    assert bench.sink.committed is None


def test_unloaded_model_ends_the_job_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.answer = lambda x: ModelNotFound("no such model") if x[0] > 20 else None
    with pytest.raises(ModelMoved, match=r"m/3.*unloaded"):
        bench.run()


def test_state_of_workers_and_versions_is_no_change_of_the_model(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.planned().plan.fingerprint
    metadata = {**bench.client.description.metadata, "ready": False, "versions": ["3", "4"]}
    bench.client.description = description(metadata=metadata)
    assert bench.planned().plan.fingerprint == first


# -- Stop


def test_stop_finishes_units_in_flight(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def answer(x: list[int]) -> None:
        if x[0] == 14:
            bench.stop.request()

    bench.client.answer = answer
    with pytest.raises(Interrupted):
        bench.run(grace_s=WITHIN_S)
    assert bench.runner is not None
    report = bench.runner.report("interrupted")
    assert (report.state, report.rows_in, report.units) == ("interrupted", 20, 3)
    assert bench.finished() == {0, 1}
    assert bench.sink.committed is None


@pytest.mark.parametrize(("requests", "grace_s"), [(1, 0.0), (2, 60.0)])
def test_late_units_are_dropped(tmp_path: Path, requests: int, grace_s: float) -> None:
    bench = Bench(tmp_path)
    is_over = threading.Event()

    def answer(x: list[int]) -> None:
        if x[0] == 14:
            for _ in range(requests):
                bench.stop.request()
            is_over.wait(0.5)

    bench.client.answer = answer
    with pytest.raises(Interrupted):
        bench.run(grace_s=grace_s)
    is_over.set()
    assert bench.finished() == {0}
    bench.client.answer, bench.stop = lambda x: None, Stop()
    bench.run()
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(30)]


def test_stop_during_the_commit_leaves_a_job_that_resumes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.finished() == {0, 1, 2}
    bench.sink.on_commit, bench.stop = lambda: None, Stop()
    assert bench.run().units_resumed == 3
    assert len(bench.sink.committed or []) == 30


def test_job_without_a_journal_deletes_its_staged_units_if_it_ends(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.is_kept = False
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.sink.calls[-1] == "abort"


def test_restart_is_rejected_after_a_half_commit_and_loses_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    again = Bench(tmp_path, restart=True)
    again.sink.is_commit_begun = True  # type: ignore[misc]
    with pytest.raises(JobConflict, match="complete it with"):
        again.run()
    assert again.finished() == {0, 1, 2}


def test_resume_after_the_state_was_removed_reports_the_complete_output(tmp_path: Path) -> None:
    bench = Bench(tmp_path, resume=True)
    with pytest.raises(JobConflict, match="no earlier run"):
        bench.run()
    bench.sink.is_done = True
    assert bench.run().state == "done"
    assert bench.client.sent == []


def test_unattended_job_is_not_repeated_and_continues_an_unfinished_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, unattended=True)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    bench.sink.on_commit, bench.stop = lambda: None, Stop()
    assert bench.run().units_resumed == 3
    bench.sink.is_done = True
    bench.client.sent.clear()
    assert bench.run().state == "done"
    assert bench.client.sent == []


def test_complete_output_still_reports_its_quarantined_rows(tmp_path: Path) -> None:
    options = {"on_error": f"quarantine={tmp_path / 'bad'}"}
    bench = Bench(tmp_path, **options)
    bench.client.answer = rejecting(5, 6, 29)
    assert bench.run().quarantined == 3
    again = Bench(tmp_path, resume=True, **options)
    again.sink.is_done = True
    assert again.run().quarantined == 3
    assert again.client.sent == []


def test_rejected_rows_are_counted_after_a_resume(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    bench.client.answer = rejecting(3, 14)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    bench.sink.on_commit, bench.stop = lambda: None, Stop()
    assert bench.run().rejected == 2


def test_unit_whose_quarantine_is_lost_is_scored_again(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    bench = Bench(tmp_path, on_error=f"quarantine={folder}")
    bench.client.answer = rejecting(3, 14)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    sorted(folder.glob("part-00001*"))[0].unlink()
    bench.sink.on_commit, bench.stop = lambda: None, Stop()
    report = bench.run()
    assert (report.units_resumed, report.quarantined) == (2, 2)
    assert len(sorted(folder.glob("*.parquet"))) == 2


def test_time_before_the_first_unit_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    prepare = bench.sink.prepare

    def slow(*args: Any, **options: Any) -> None:
        prepare(*args, **options)
        threading.Event().wait(0.3)

    monkeypatch.setattr(bench.sink, "prepare", slow)
    assert bench.run(stall_s=0.25).state == "done"


def test_job_without_progress_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "THREADS_END_S", 0.1)
    bench = Bench(tmp_path)
    is_over = threading.Event()

    def answer(x: list[int]) -> None:
        is_over.wait(WITHIN_S)

    bench.client.answer = answer
    with pytest.raises(DeadlineExceeded, match=r"no progress for 0\.2 s"):
        bench.run(stall_s=0.2)
    is_over.set()


def test_lost_server_fails_the_job_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "THREADS_END_S", 0.1)
    bench = Bench(tmp_path)
    is_over = threading.Event()

    def answer(x: list[int]) -> None:
        is_over.wait(WITHIN_S)

    bench.client.answer = answer
    bench.lost = lambda: NotReady("the private server ended")
    with pytest.raises(NotReady, match="private server"):
        bench.run()
    is_over.set()


# -- Memory


def test_reader_waits_for_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_run, "IN_FLIGHT_BATCHES", 2)
    bench = Bench(tmp_path, units=1, batch_rows=1)
    seen: list[int] = []
    bench.client.answer = lambda x: seen.append(bench.source.read_batches - x[0])
    bench.run()
    # Two in flight, and one in the reader's hands.
    assert max(seen) <= 3 + 1


def test_flow_is_bounded_in_bytes_and_takes_one_large_item() -> None:
    flow = Flow(100, 10)
    flow.put("large", 1000)
    is_put = threading.Event()

    def put() -> None:
        flow.put("next", 1)
        is_put.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert flow.take() == "large"
    assert not is_put.wait(0.05)
    flow.release(1000)
    assert is_put.wait(WITHIN_S)
    thread.join(WITHIN_S)
    assert flow.take() == "next"
    flow.end()
    assert flow.take() is None


def test_flow_is_bounded_in_items_and_cancel_ends_its_waits() -> None:
    flow = Flow(100, 1)
    flow.put("first", 1)
    caught: list[Exception] = []

    def put() -> None:
        try:
            flow.put("second", 1)
        except Cancelled as error:
            caught.append(error)

    thread = threading.Thread(target=put)
    thread.start()
    flow.cancel()
    thread.join(WITHIN_S)
    assert len(caught) == 1
    with pytest.raises(Cancelled):
        flow.take()


def test_memory_grows_with_streams_and_batches() -> None:
    def job(**options: Any) -> Job:
        return Job(model="m", inputs=("in",), output="out", **options)

    one = memory_bytes(job(concurrency=1))
    assert memory_bytes(job(concurrency=4)) == 4 * one
    assert memory_bytes(job(concurrency=1), 1 << 30) > 1 << 30
    assert memory_bytes(job(concurrency=1, partition_by=("a",))) > one


# -- Plan


def test_column_that_is_also_a_result_is_rejected_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = description(output_schema=pa.schema([("id", pa.int64())]))
    with pytest.raises(ContractError, match=r"'id'.*--keep"):
        bench.planned()


def test_unknown_kept_column_is_rejected_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep has 'idd'.*'id'"):
        Bench(tmp_path, keep=("idd",)).planned()


def test_mapped_column_is_sent_under_the_name_of_the_input(tmp_path: Path) -> None:
    bench = Bench(tmp_path, columns={"n": "x"})
    bench.client.description = description(
        input_schema=pa.schema([("n", pa.int64())]), input_types={"n": "int64"}
    )
    planned = bench.planned()
    assert (planned.sent, planned.matching.schema.names) == (("x",), ["n"])


RUNTIME = {
    "library": "ONNX Runtime 1.31.1",
    "providers": ["CPUExecutionProvider"],
    "threads": 2,
    "name": "ONNX Runtime 1.31.1, CPUExecutionProvider, threads 2",
}
LATER = {**RUNTIME, "library": "ONNX Runtime 1.32.0"}


def described(*runtimes: dict[str, Any], files: str = "f", **changes: Any) -> ModelDescription:
    metadata = {"inputs": ["x"], "files_sha256": files, "runtimes": list(runtimes)}
    return description(**{"metadata": metadata, **changes})


def test_fingerprint_has_the_model_files_and_what_runs_it(tmp_path: Path) -> None:
    def plan(given: ModelDescription, **options: Any) -> Plan:
        bench = Bench(tmp_path, **options)
        return plan_job(bench.job, bench.source, given).plan

    first = plan(described(RUNTIME))
    for same in (described(RUNTIME), described(RUNTIME, ready=False, aliases={"a": "3"})):
        assert plan(same).fingerprint == first.fingerprint
    limits = {"rows": 10, "bytes": 1 << 20, "string_bytes": 1 << 20}
    others = [
        plan(described(RUNTIME, files="g")),
        plan(described(RUNTIME), keep=("id",)),
        plan(described(RUNTIME), batch_rows=7),
        plan(described(LATER)),
        plan(described({**RUNTIME, "providers": ["CUDAExecutionProvider"]})),
        plan(described({**RUNTIME, "threads": 3})),
        plan(described(RUNTIME, {**RUNTIME, "threads": 3})),
        plan(described(RUNTIME, max_batch_rows=50)),
        plan(described(RUNTIME, limits=limits)),
    ]
    assert len({first.fingerprint, *(each.fingerprint for each in others)}) == 10
    assert first.values["runtime"] == "ONNX Runtime 1.31.1"
    assert first.values["providers"] == "CPUExecutionProvider"
    assert first.values["threads"] == "2"


def test_calls_are_for_servers_with_the_planned_runtimes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)
    bench.run()
    assert {terms["runtimes"] for _, _, terms in bench.client.calls} == {RUNTIME["name"]}


def test_runtime_that_changes_during_the_job_ends_it_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)

    def restart(x: list[int]) -> None:
        bench.client.description = described(LATER)

    bench.client.answer = restart
    text = "runtime was ONNX Runtime 1.31.1, is ONNX Runtime 1.32.0"
    with pytest.raises(RuntimeDiffers, match=text):
        bench.run()
    bench.client.description = described(RUNTIME)
    assert bench.finished() == set()


def test_resume_with_another_runtime_is_rejected_by_name(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = described(RUNTIME)
    bench.client.answer = rejecting(14)
    with pytest.raises(ContractError):
        bench.run()
    again = Bench(tmp_path, resume=True, batch_rows=5)
    again.client.description = described(LATER)
    text = r"batch_rows was 4, is 5; runtime was ONNX Runtime 1.31.1, is ONNX Runtime 1.32.0\)"
    with pytest.raises(JobConflict, match=text):
        again.run()


def test_batches_fit_a_batch_of_a_worker(tmp_path: Path) -> None:
    """A server cuts larger ones by its load, which changes the last bits."""
    bench = Bench(tmp_path, units=1, batch_rows=10)
    bench.client.description = description(max_batch_rows=4)
    bench.run()
    assert max(map(len, bench.client.sent)) <= 4 and sum(map(len, bench.client.sent)) == 10
    ranked = Bench(tmp_path / "ranked", units=1, batch_rows=10)
    ranked.client.description = description(max_batch_rows=4, ranked_within=("",))
    ranked.run()
    assert ranked.client.sent == [list(range(10))]


def test_description_waits_for_the_runtimes_of_all_workers() -> None:
    partial: Any = described(RUNTIME)
    partial.metadata["all_runtimes"] = False
    found = [partial, partial, described(RUNTIME, LATER)]

    def model(name: str, *, version: str | None = None) -> Any:
        return SimpleNamespace(description=found.pop(0))

    client: Any = SimpleNamespace(model=model)
    assert len(describe(client, "m", None).metadata["runtimes"]) == 1
    assert len(describe(client, "m", None, workers_s=WITHIN_S).metadata["runtimes"]) == 2


@pytest.mark.parametrize("how", ["null", "quarantine=bad"])
def test_rejected_rows_of_a_ranked_batch_cannot_be_taken_out(tmp_path: Path, how: str) -> None:
    bench = Bench(tmp_path, on_error=how)
    bench.client.description = description(ranked_within=("",))
    with pytest.raises(ConfigError, match="ranks the rows of a batch"):
        bench.planned()


def test_description_waits_for_a_server_that_starts() -> None:
    errors: list[Exception] = [NotReady("starting"), NotReady("starting")]
    client = ScriptedClient()

    def model(name: str, *, version: str | None = None) -> Any:
        if errors:
            raise errors.pop()
        return SimpleNamespace(description=client.description)

    client.model = model  # type: ignore[method-assign]
    started_ns = clock.now_ns()
    assert describe(client, "m", None) is client.description
    assert clock.now_ns() > started_ns
    errors.append(ModelNotFound("none"))
    with pytest.raises(ModelNotFound):
        describe(client, "m", None)


# -- Models whose rows depend on each other


def related(rows: int = 1000, **changes: Any) -> ModelDescription:
    metadata = {"inputs": ["x"], "rows": {"verdict": "dependent"}}
    limits = {"rows": rows, "bytes": 1 << 20, "string_bytes": 1 << 20}
    return description(
        limits=limits,
        metadata=metadata,
        row_relation="dependent",
        is_whole=True,
        whole_reason="its rows are dependent: row 3",
        **changes,
    )


@pytest.mark.parametrize(("limit", "rows"), [(None, 30), (30, 30), (17, 17), (3, 3)])
def test_table_of_related_rows_is_one_request(tmp_path: Path, limit: int | None, rows: int) -> None:
    bench = Bench(tmp_path, limit=limit, keep=("id",))
    bench.client.description = related()
    report = bench.run()
    assert bench.client.sent == [list(range(rows))]
    assert bench.sink.committed == [{"id": f"r{x}", "y": 3 * x + 1} for x in range(rows)]
    assert (report.rows_in, report.units) == (rows, 1)
    (_, _, terms) = bench.client.calls[0]
    assert "cut" not in terms


def test_table_of_related_rows_above_the_limit_is_an_error_of_the_plan(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.client.description = related(29)
    with pytest.raises(LimitExceeded) as caught:
        bench.planned()
    for part in ("30 rows", "limit 29 (`limits.rows`)", "row 3", "combine = true"):
        assert part in caught.value.message
    # With a filter, only reading tells.
    bench = Bench(tmp_path, filter="x >= 0")
    bench.client.description = related(29)
    with pytest.raises(LimitExceeded, match="at least 30 rows"):
        bench.run()
    assert bench.client.sent == []


def test_related_rows_are_not_separated(tmp_path: Path) -> None:
    bench = Bench(tmp_path, on_error="null")
    bench.client.description = related()
    with pytest.raises(ConfigError, match=r"'null'.*row 3.*use `fail`"):
        bench.planned()


def test_parts_of_related_rows_are_rejected(tmp_path: Path) -> None:
    """As a reader of a source would send them."""
    bench = Bench(tmp_path)
    with pytest.raises(ContractError, match=r"all rows of a table in one request.*row 3"):
        plan_job(bench.job, bench.source, related())


def test_verdict_that_changes_during_the_job_ends_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    metadata = {"inputs": ["x"], "rows": {"verdict": "independent"}}
    bench.client.description = description(metadata=metadata)

    def answer(x: list[int]) -> Exception | None:
        bench.client.description = related()
        return None

    bench.client.answer = answer
    with pytest.raises(ModelMoved, match="replaced during the job"):
        bench.run()
    (_, _, terms) = bench.client.calls[0]
    assert terms["cut"] == "true"


def test_evidence_is_not_in_the_fingerprint_but_the_rule_is(tmp_path: Path) -> None:
    def plan(rows: dict[str, str], **changes: Any) -> Plan:
        bench = Bench(tmp_path)
        bench.client.description = description(metadata={"inputs": ["x"], "rows": rows}, **changes)
        return bench.planned().plan

    first = plan({"verdict": "independent", "evidence": "a"})
    assert plan({"verdict": "independent", "evidence": "b"}).fingerprint == first.fingerprint
    assert plan({}, is_whole=True).fingerprint != first.fingerprint
