"""The lock that shows which worker of a slot runs."""

from __future__ import annotations

from pathlib import Path

from iskander.interprocess.control.attach import LockFile


def test_lock_is_held_by_one_worker(tmp_path: Path) -> None:
    first, second = LockFile(tmp_path / "worker-0.lock"), LockFile(tmp_path / "worker-0.lock")
    assert first.acquire() and first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    second.release()


def test_lock_in_a_folder_that_its_gateway_removed_is_not_acquired(tmp_path: Path) -> None:
    folder = tmp_path / "removed"
    lock = LockFile(folder / "worker-0.lock")
    assert not lock.acquire()
    folder.mkdir()
    assert lock.acquire()
    lock.release()
