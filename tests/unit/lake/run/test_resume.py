"""Scoring jobs that fail, stop or are killed, and what a later run does."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.scoring_bench import (
    WITHIN_S,
    Bench,
    description,
    rejecting,
)

from iskander.errors import (
    ContractError,
    DeadlineExceeded,
    ModelMoved,
    ModelNotFound,
    NotReady,
    SourceChanged,
)
from iskander.lake.errors import JobConflict
from iskander.lake.run import runner
from iskander.lake.run.runner import Interrupted, StopRequest
from iskander.lake.sinks.errors import OutputError


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
    bench.client.answer, bench.stop = lambda x: None, StopRequest()
    bench.run()
    assert [row["y"] for row in bench.sink.committed or []] == [3 * x + 1 for x in range(30)]


def test_stop_during_the_commit_leaves_a_job_that_resumes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    assert bench.finished() == {0, 1, 2}
    bench.sink.on_commit, bench.stop = lambda: None, StopRequest()
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
    bench.sink.on_commit, bench.stop = lambda: None, StopRequest()
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
    bench.sink.on_commit, bench.stop = lambda: None, StopRequest()
    assert bench.run().rejected == 2


def test_unit_whose_quarantine_is_lost_is_scored_again(tmp_path: Path) -> None:
    folder = tmp_path / "bad"
    bench = Bench(tmp_path, on_error=f"quarantine={folder}")
    bench.client.answer = rejecting(3, 14)
    bench.sink.on_commit = bench.stop.request
    with pytest.raises(Interrupted):
        bench.run()
    sorted(folder.glob("part-00001*"))[0].unlink()
    bench.sink.on_commit, bench.stop = lambda: None, StopRequest()
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
