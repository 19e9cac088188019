"""Private folder for unfinished files, which one process at a time uses.

    FOLDER/slot-0/lock           held by the process
    FOLDER/slot-0/writing/       incomplete files; of a dead process they are deleted
    FOLDER/slot-0/ready/         complete files on their way to an object store

Several gateway processes, and an old and a new server, may share a folder: each takes the first
free slot, with the complete files that its last owner left there. Those in other free slots are
taken over later.

Runs on: the observer process. Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SLOTS_MAX: Final = 256


class Workspace:
    """A slot of a folder. Owns: its lock, until the process exits.

    Attributes:
        writing: Folder of incomplete files.
        ready: Folder of complete files.

    Raises:
        OSError: The folder cannot be written, or all slots are in use.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        slot = self._claim(folder)
        self.writing, self.ready = slot / "writing", slot / "ready"
        shutil.rmtree(self.writing, ignore_errors=True)
        self.writing.mkdir()

    def _claim(self, folder: Path) -> Path:
        for number in range(SLOTS_MAX):
            slot = folder / f"slot-{number}"
            slot.mkdir(parents=True, exist_ok=True)
            lock = _lock(slot)
            if lock is not None:
                self._lock_descriptor = lock
                return slot
        raise OSError(f"{folder}: all {SLOTS_MAX} slots are in use")

    def left_over(self) -> list[Path]:
        """Complete files that an earlier process left, oldest first."""
        return _files_in(self.ready)

    def adopt(self) -> Iterator[Path]:
        """Take over the complete files of slots without an owner; yield where they are now.

        Raises:
            OSError: The error of a slot, after the files of the others.
        """
        failure: OSError | None = None
        for slot in self._folder.glob("slot-*"):
            try:
                yield from self._adopt_slot(slot)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure

    def _adopt_slot(self, slot: Path) -> Iterator[Path]:
        lock = _lock(slot)
        if lock is None:
            return
        try:
            for path in _files_in(slot / "ready"):
                target = self.ready / path.relative_to(slot / "ready")
                target.parent.mkdir(parents=True, exist_ok=True)
                yield path.rename(target)
        finally:
            os.close(lock)

    def release(self) -> None:
        """Release the slot for another process."""
        os.close(self._lock_descriptor)


def _lock(slot: Path) -> int | None:
    """Lock a slot; return the descriptor that keeps the lock, or None if it is in use."""
    descriptor = os.open(slot / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
