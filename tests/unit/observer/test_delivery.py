"""Uploads: files that wait, failures, and files of ended processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import eventually

from iskander.clock import now_ns
from iskander.observer.prediction_log import delivery
from iskander.observer.prediction_log.counts import Counts
from iskander.observer.prediction_log.delivery import Complete, Uploads
from iskander.observer.prediction_log.workspace import Workspace

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
    monkeypatch.setattr(delivery, "pause_s", lambda failures: 0.05)
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
    """Those in other slots than the own, after a while without own files."""
    monkeypatch.setattr(delivery, "IDLE_S", 0.05)
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
