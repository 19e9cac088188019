"""Private folder for unfinished files, which one process at a time uses.

    FOLDER/slot-0/lock           held by the process
    FOLDER/slot-0/writing/       incomplete files; of a dead process they are deleted
    FOLDER/slot-0/ready/         complete files on their way to an object store

Several gateway processes, and an old and a new server, may share a folder: each takes the first
free slot, with the complete files that its last owner left there.

Runs on: the observer process. Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import shutil
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
        slot = self._claim(folder)
        self.writing, self.ready = slot / "writing", slot / "ready"
        shutil.rmtree(self.writing, ignore_errors=True)
        self.writing.mkdir()

    def _claim(self, folder: Path) -> Path:
        for number in range(SLOTS_MAX):
            slot = folder / f"slot-{number}"
            slot.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(slot / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                continue
            return slot
        raise OSError(f"{folder}: all {SLOTS_MAX} slots are in use")

    def left_over(self) -> list[Path]:
        """Complete files that an earlier process left, oldest first."""
        return sorted(path for path in self.ready.rglob("*") if path.is_file())

    def release(self) -> None:
        """Release the slot for another process."""
        os.close(self._lock)
