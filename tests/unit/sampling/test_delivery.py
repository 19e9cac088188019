"""Uploads: files that wait, failures, and files of ended processes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import eventually

from iskander.foundation.clock import now_ns
from iskander.sampling.prediction_log import delivery
from iskander.sampling.prediction_log.counts import Counts
from iskander.sampling.prediction_log.delivery import Complete, Uploads
from iskander.sampling.prediction_log.workspace import Workspace

NS_PER_S = 1_000_000_000


class Spool:
    """Uploads to a folder, which stands for an object store."""

    def __init__(self, root: Path) -> None:
        self.store = root / "store"
        self.counts = Counts()
        self.workspace = Workspace(root / "spool")
        self.uploads = Uploads(f"file://{self.store}", self.workspace, 1 << 20, self.counts)

    def deliver(self, name: str) -> Path:
        """Deliver a file of one sample; return where it waits."""
        path = self.workspace.writing / name
        path.write_bytes(name.encode())
        relative = f"model=m/{name}"
        self.uploads.deliver(Complete(path, relative, 1, len(name)))
        return self.workspace.ready / relative

    def stored(self) -> list[str]:
        return sorted(path.name for path in self.store.glob("model=m/*"))

    def count(self, name: str) -> int:
        counts: dict[str, int] = self.counts.report()["counts"]
        return counts.get(name, 0)

    def close(self) -> None:
        self.uploads.close(now_ns() + 20 * NS_PER_S)
        assert not self.uploads._thread.is_alive()
        self.workspace.release()


@pytest.fixture
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spool]:
    monkeypatch.setattr(delivery, "backoff", lambda *_: 0.05)
    made = Spool(tmp_path)
    yield made
    made.close()
    assert made.counts.spooled_bytes == 0


def test_file_that_cannot_be_deleted_is_uploaded_again(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next files follow."""
    failures: list[OSError] = []
    unlink = Path.unlink

    def fail_once(self: Path, **options: Any) -> None:
        if not failures:
            failures.append(OSError("read-only file system"))
            raise failures[0]
        unlink(self, **options)

    monkeypatch.setattr(Path, "unlink", fail_once)
    for name in ("a", "b"):
        spool.deliver(name)
    eventually(lambda: spool.count("files") == 2, what="both files")
    assert failures and spool.stored() == ["a", "b"]
    assert not list(spool.workspace.ready.rglob("*"))


def test_file_that_somebody_has_deleted_delays_no_other(spool: Spool) -> None:
    """It is counted as lost."""
    with spool.uploads._changed:
        spool.deliver("a").unlink()
        spool.deliver("b")
    eventually(lambda: spool.count("files") == 1, what="the other file")
    assert spool.stored() == ["b"] and spool.count("write_failed") == 1


def test_files_of_ended_processes_are_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those in other slots than the own, too."""
    monkeypatch.setattr(delivery, "ADOPT_S", 0.05)
    others = [Workspace(tmp_path / "spool") for _ in range(2)]
    for number, other in enumerate(others):
        (other.ready / "model=m").mkdir(parents=True)
        (other.ready / "model=m" / f"{number}").write_bytes(b"whole")
    others[1].release()
    spool = Spool(tmp_path)
    assert spool.workspace.writing == others[1].writing
    eventually(lambda: spool.stored() == ["1"], what="the file of the own slot")
    others[0].release()
    eventually(lambda: spool.stored() == ["0", "1"], what="the file of the other slot")
    eventually(lambda: spool.count("files") == 2, what="the count")
    spool.close()


def leave(root: Path, slot: int) -> None:
    """A complete file of an ended process."""
    folder = root / "spool" / f"slot-{slot}" / "ready" / "model=m"
    folder.mkdir(parents=True)
    (folder / f"left-{slot}").write_bytes(b"whole")


def test_files_of_ended_processes_are_uploaded_between_own_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is never a long time without a file of the own process."""
    monkeypatch.setattr(delivery, "ADOPT_S", 0.2)
    spool = Spool(tmp_path)
    leave(tmp_path, 1)
    numbers = itertools.count()

    def is_uploaded() -> bool:
        spool.deliver(str(next(numbers)))
        return "left-1" in spool.stored()

    eventually(is_uploaded, what="the file of the other slot")
    spool.close()


def test_slot_with_an_error_keeps_no_other_files_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither files that were moved before it, nor those of later slots."""
    monkeypatch.setattr(delivery, "ADOPT_S", 0.05)
    spool = Spool(tmp_path)
    (tmp_path / "spool" / "slot-2" / "lock").mkdir(parents=True)
    for slot in (1, 3):
        leave(tmp_path, slot)
    eventually(lambda: spool.stored() == ["left-1", "left-3"], what="the files of other slots")
    eventually(lambda: "slot-2" in spool.counts.report()["failure"], what="the error")
    spool.close()


def test_adopted_file_that_somebody_has_deleted_delays_no_other(spool: Spool) -> None:
    spool.workspace.ready.mkdir()
    kept = spool.workspace.ready / "kept"
    kept.write_bytes(b"whole")
    with spool.uploads._changed:
        spool.uploads._add([kept.with_name("deleted"), kept])
        spool.deliver("a")
    eventually(lambda: spool.count("files") == 2, what="the other files")
    assert (spool.store / "kept").exists()


def test_folder_is_not_deleted_while_a_file_is_moved_into_it(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The upload of the folder's last file ends meanwhile."""
    rename = os.rename
    threads: list[threading.Thread] = []

    def rename_late(source: Path, target: Path) -> None:
        uploaded = target.with_name("uploaded")
        threads.append(threading.Thread(target=spool.uploads._remove, args=(uploaded,)))
        threads[0].start()
        threads[0].join(0.2)
        rename(source, target)

    monkeypatch.setattr(os, "rename", rename_late)
    spool.deliver("a")
    threads[0].join(20)
    eventually(lambda: spool.stored() == ["a"], what="the file")


def test_new_files_do_not_shorten_the_pause_after_a_failure(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the end does."""
    monkeypatch.setattr(delivery, "backoff", lambda *_: 600.0)
    attempts: list[Complete] = []
    upload = spool.uploads._upload

    def fail_once(file: Complete) -> bool:
        attempts.append(file)
        if len(attempts) == 1:
            raise OSError("service unavailable")
        return upload(file)

    monkeypatch.setattr(spool.uploads, "_upload", fail_once)
    spool.deliver("0")
    eventually(lambda: spool.counts.report()["failure"], what="the failure")
    for name in "1234":
        spool.deliver(name)
        time.sleep(0.02)  # Time for an attempt that must not follow.
    assert len(attempts) == 1
    spool.uploads.close(now_ns() + 20 * NS_PER_S)
    assert spool.stored() == ["0", "1", "2", "3", "4"]
