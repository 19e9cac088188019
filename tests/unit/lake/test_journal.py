"""State folders: resume, other jobs, torn lines, locks, and a full disk."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from iskander.lake import journal as module
from iskander.lake.errors import JobConflict, StateError
from iskander.lake.journal import JOURNAL, PLAN, Finished, Journal
from iskander.lake.plan import JobPlan, canonical, make_unit

SCHEMA = pa.schema([("a", pa.int64())])


def a_plan(count: int = 4, fingerprint: str = "f" * 64) -> JobPlan:
    units = tuple(make_unit(i, {"file": i}, rows=10, bytes=100) for i in range(count))
    return JobPlan(units, fingerprint, "churn", "3", "d", {"kind": "files"}, SCHEMA)


def done(plan: JobPlan, index: int) -> Finished:
    return Finished(
        index=index,
        name=plan.units[index].name,
        rows_in=10,
        rows_out=9,
        quarantined=1,
        rejected=1,
        bytes=50,
    )


def test_finished_units_are_there_after_a_resume(tmp_path: Path) -> None:
    plan = a_plan()
    with Journal(tmp_path / "a b" / "ü") as journal:
        assert journal.begin(plan) is False
        journal.append(done(plan, 2))
        journal.append(done(plan, 0))
    with Journal(tmp_path / "a b" / "ü") as journal:
        assert journal.begin(plan, must_resume=True) is True
        assert journal.finished() == {2: done(plan, 2), 0: done(plan, 0)}
        assert journal.plan() == plan


def test_unit_is_on_disk_when_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    with Journal(tmp_path) as journal:
        journal.begin(a_plan())
        text = tmp_path / JOURNAL
        monkeypatch.setattr(module.os, "fsync", lambda _: synced.append(text.read_bytes()))
        journal.append(done(a_plan(), 1))
        assert synced and synced[-1] == text.read_bytes()
        assert text.read_bytes().count(b"\n") == 1
        monkeypatch.undo()


def test_repeated_unit_adds_no_line_and_a_changed_one_replaces(tmp_path: Path) -> None:
    plan = a_plan()
    changed = replace(done(plan, 1), bytes=51)
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        for each in (done(plan, 1), done(plan, 1), changed):
            journal.append(each)
        assert len((tmp_path / JOURNAL).read_bytes().splitlines()) == 2
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert journal.finished() == {1: changed}


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_torn_last_line_is_ignored(tmp_path: Path, cut: int) -> None:
    """A line without its end does not count, and the next line does not join it."""
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        journal.append(done(plan, 0))
        journal.append(done(plan, 1))
    text = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(text[:-cut])
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert set(journal.finished()) == {0}
        journal.append(done(plan, 3))
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert set(journal.finished()) == {0, 3}


@pytest.mark.parametrize(
    "line",
    [
        b"{}\n",
        b"nonsense\n",
        b"[1]\n",
        b"\n",
        b"\xff\xfe\n",
        b'{"index": 99}\n',
        b'{"index": ' + b"[" * 5000 + b"\n",
        canonical(asdict(done(a_plan(), 0)) | {"rows_in": "1"}) + b"\n",
        canonical(asdict(done(a_plan(), len(a_plan().units) - 1)) | {"index": -1}) + b"\n",
    ],
)
def test_damaged_line_is_rejected(tmp_path: Path, line: bytes) -> None:
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        journal.append(done(plan, 0))
    text = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(line + text)
    with Journal(tmp_path) as journal, pytest.raises(JobConflict, match="line 1"):
        journal.begin(plan)


def test_line_of_another_plan_is_rejected(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.begin(a_plan())
        journal.append(done(a_plan(), 0))
    text = (tmp_path / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(text.replace(b"part-00000-", b"part-00001-"))
    with Journal(tmp_path) as journal, pytest.raises(JobConflict, match="line 1"):
        journal.begin(a_plan())


def test_other_fingerprint_is_rejected_with_the_reason_unless_restart(tmp_path: Path) -> None:
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        journal.append(done(plan, 0))
    other = replace(plan, fingerprint="e" * 64, version="4", snapshot={"kind": "files", "n": "2"})
    with Journal(tmp_path) as journal, pytest.raises(JobConflict) as caught:
        journal.begin(other)
    assert "version 3, now 4" in caught.value.message
    assert "input changed" in caught.value.message and "--restart" in caught.value.message
    with Journal(tmp_path) as journal:
        assert journal.begin(other, is_restart=True) is False
        assert journal.finished() == {}


@pytest.mark.parametrize(
    ("was", "now", "text"),
    [
        ({"threads": "1"}, {"threads": "2"}, "threads was 1, is 2"),
        ({"batch_rows": 50}, {"batch_rows": 60}, "batch_rows was 50, is 60"),
        ({"filter": None}, {"filter": "a > 1"}, "filter was not given, is a > 1"),
        ({}, {"runtime": "x" * 500}, "runtime was not given, is x"),
        ({}, {}, "its contract or the columns of its output differ"),
    ],
)
def test_values_that_differ_are_named(
    tmp_path: Path, was: dict[str, Any], now: dict[str, Any], text: str
) -> None:
    plan = replace(a_plan(), values={"keep": ["a"], **was})
    with Journal(tmp_path) as journal:
        journal.begin(plan)
    other = replace(plan, fingerprint="e" * 64, values={"keep": ["a"], **now})
    with Journal(tmp_path) as journal, pytest.raises(JobConflict) as caught:
        journal.begin(other, must_resume=True)
    assert f"({text}" in caught.value.message and "keep" not in caught.value.message
    assert len(caught.value.message) < 500


def test_resume_without_an_earlier_run_is_rejected(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal, pytest.raises(JobConflict, match="no earlier run"):
        journal.begin(a_plan(), must_resume=True)


def test_second_process_is_rejected_until_the_first_closes(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(JobConflict, match=str(os.getpid())):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_second_process_is_rejected_without_fcntl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "fcntl", None)
    with Journal(tmp_path), pytest.raises(JobConflict, match="delete lock"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_system_without_locks_is_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    assert module.fcntl is not None
    monkeypatch.setattr(module.fcntl, "flock", flock)
    with pytest.raises(StateError, match="No locks available"):
        Journal(tmp_path)


def test_lock_file_of_a_dead_process_does_not_lock(tmp_path: Path) -> None:
    (tmp_path / module.LOCK).write_text("99999999 and more")
    with Journal(tmp_path):
        assert (tmp_path / module.LOCK).read_text() == str(os.getpid())


def test_removed_state_leaves_no_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    journal = Journal(folder)
    journal.begin(a_plan())
    journal.clear()
    journal.close()
    assert not folder.exists()


def test_removed_state_keeps_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    journal = Journal(tmp_path)
    journal.begin(a_plan())
    journal.clear()
    journal.close()
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_state_folder_without_a_plan_is_deleted_with_its_parent(tmp_path: Path) -> None:
    Journal(tmp_path / "_iskander" / "out").close()
    assert list(tmp_path.iterdir()) == []


def test_state_that_the_system_rejects_names_the_path(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        (tmp_path / module.PLAN).mkdir()
        with pytest.raises(StateError, match=r"plan\.json: .*directory"):
            journal.plan()
        (tmp_path / module.PLAN).rmdir()


def test_state_folder_that_is_a_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    for path in (tmp_path / "state", tmp_path / "state" / "below"):
        with pytest.raises(JobConflict, match="is a file"):
            Journal(path)


def test_forgotten_unit_is_not_finished(tmp_path: Path) -> None:
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        journal.append(done(plan, 0))
        journal.append(done(plan, 1))
        journal.forget(0)
        journal.append(done(plan, 2))
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert set(journal.finished()) == {1, 2}


def test_failed_write_leaves_the_journal_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        write = os.write

        def full(descriptor: int, text: bytes) -> int:
            if len(text) > 40:
                return write(descriptor, text[:40])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(module.os, "write", full)
        with pytest.raises(StateError, match="No space"):
            journal.append(done(plan, 0))
        assert journal.finished() == {}
        monkeypatch.undo()
        journal.append(done(plan, 1))
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert set(journal.finished()) == {1}


def test_units_of_several_threads_are_all_recorded(tmp_path: Path) -> None:
    plan = a_plan(40)
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        threads = [
            threading.Thread(target=journal.append, args=(done(plan, i),)) for i in range(40)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        assert set(journal.finished()) == set(range(40))


def test_crash_between_clearing_and_planning_is_a_new_job(tmp_path: Path) -> None:
    plan = a_plan()
    with Journal(tmp_path) as journal:
        journal.begin(plan)
        journal.append(done(plan, 0))
    (tmp_path / PLAN).unlink()
    with Journal(tmp_path) as journal:
        assert journal.begin(plan) is False
        assert journal.finished() == {}
