"""State folder of a job: the plan, finished units, and a lock against a second process.

`plan.json` is replaced as a whole; `journal.jsonl` grows by one line for a unit. Both files are on
disk when a call returns, so that a unit in the journal survives a crash of the machine.

Runs in: the operator's tool; `append` may be called from several threads.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

from iskander.lake.errors import JobConflict, StateError
from iskander.lake.execution import differences
from iskander.lake.job import PARENT
from iskander.lake.plan import JobPlan, canonical, decode_plan, encode_plan

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:
    fcntl = None

PLAN: Final = "plan.json"
JOURNAL: Final = "journal.jsonl"
LOCK: Final = "lock"
_LOCK_ATTEMPTS: Final = 10


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A unit whose staged output is complete.

    Attributes:
        index: Index of the unit in the plan.
        name: Name of the unit.
        rows_in: Rows that were read, after the filter.
        rows_out: Rows in the staged output.
        quarantined: Rows in the quarantine folder.
        rejected: Rows that the model or the server rejected.
        bytes: Bytes of the staged output.
    """

    index: int
    name: str
    rows_in: int
    rows_out: int
    quarantined: int
    rejected: int
    bytes: int


class Journal:
    """The state of one job in a folder, which no other process uses until `close`.

    Args:
        folder: State folder; it is created with its parents.

    Raises:
        JobConflict: Another process uses the folder.
        StateError: The folder cannot be created or locked. Every method raises it too, if the
            folder cannot be read or written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        with _as_state_errors(self.folder):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise JobConflict(f"{self.folder}: the state folder is a file") from error
            self._lock: int | None = _lock(self.folder / LOCK)
        self._mutex = threading.Lock()
        self._lines: int | None = None
        self._plan: JobPlan | None = None
        self._finished: dict[int, Finished] = {}

    def __enter__(self) -> Journal:
        """Return the journal, which is closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, plan: JobPlan, *, is_restart: bool = False, must_resume: bool = False) -> bool:
        """Begin or resume a job.

        Args:
            plan: Plan of the job as it is now.
            is_restart: Delete the state of an earlier job.
            must_resume: Raise an error instead of beginning a new job.

        Returns:
            True if an earlier run is resumed.

        Raises:
            JobConflict: The folder has the state of another job, or has none although `must_resume`
                is set.
        """
        if is_restart:
            self.clear()
        earlier = self.plan()
        if earlier is None:
            if must_resume:
                raise JobConflict(f"{self.folder}: no earlier run to resume; omit --resume")
            with _as_state_errors(self.folder):
                _replace_file(self.folder / JOURNAL, b"")
                _replace_file(self.folder / PLAN, encode_plan(plan))
        elif earlier.fingerprint != plan.fingerprint:
            raise JobConflict(
                f"{self.folder}: has the state of another job ({_differences(earlier, plan)}); "
                "use --restart to delete it, or another --state folder",
                earlier=earlier.fingerprint,
                fingerprint=plan.fingerprint,
            )
        self._plan = plan
        self._finished = self.finished_of(plan)
        with _as_state_errors(self.folder):
            self._lines = _open_lines(self.folder / JOURNAL)
        return earlier is not None

    @property
    def has_plan(self) -> bool:
        """Whether the folder has the state of a job."""
        return (self.folder / PLAN).exists()

    def plan(self) -> JobPlan | None:
        """Read the plan of the earlier run; None if there is none.

        Raises:
            JobConflict: The plan is not readable.
        """
        with _as_state_errors(self.folder):
            try:
                return decode_plan((self.folder / PLAN).read_bytes())
            except FileNotFoundError:
                return None

    def is_of_another(self, plan: JobPlan) -> bool:
        """Whether the folder has the state of a job with a plan other than this one.

        Raises:
            JobConflict: The plan in the folder is not readable.
        """
        earlier = self.plan()
        return earlier is not None and earlier.fingerprint != plan.fingerprint

    def finished_of(self, plan: JobPlan) -> dict[int, Finished]:
        """Read the finished units of an earlier run of a plan; the folder is not changed.

        Raises:
            JobConflict: A line is damaged, or names a unit of another plan.
        """
        with _as_state_errors(self.folder):
            return _read_finished(self.folder / JOURNAL, plan)

    def finished(self) -> dict[int, Finished]:
        """Return the finished units by their index."""
        with self._mutex:
            return dict(self._finished)

    def append(self, finished: Finished) -> None:
        """Record a finished unit, which is on disk when this returns.

        A repetition with equal values changes nothing. A line that a full disk cuts off is ignored
        later.
        """
        with self._mutex, _as_state_errors(self.folder):
            assert self._lines is not None and self._plan is not None, "begin comes first"
            unit = self._plan.units[finished.index]
            assert unit.name == finished.name, f"unit {finished.index} has the name {unit.name}"
            if self._finished.get(finished.index) == finished:
                return
            start = os.lseek(self._lines, 0, os.SEEK_END)
            try:
                _write_all(self._lines, canonical(asdict(finished)) + b"\n")
                os.fsync(self._lines)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._lines, start)
                raise
            self._finished[finished.index] = finished

    def forget(self, index: int) -> None:
        """Remove a unit from the journal, because its staged output is lost.

        The unit is scored again.
        """
        with self._mutex, _as_state_errors(self.folder):
            assert self._lines is not None, "begin comes first"
            self._finished.pop(index, None)
            lines = b"".join(
                canonical(asdict(finished)) + b"\n" for finished in self._finished.values()
            )
            os.close(self._lines)
            self._lines = None
            _replace_file(self.folder / JOURNAL, lines)
            self._lines = _open_lines(self.folder / JOURNAL)

    def clear(self) -> None:
        """Delete the plan and the journal, and keep the lock until `close`."""
        with self._mutex, _as_state_errors(self.folder):
            self._close_lines()
            # The plan goes first: a journal without a plan is no state.
            for name in (PLAN, JOURNAL):
                (self.folder / name).unlink(missing_ok=True)
            _sync_folder(self.folder)
            self._finished, self._plan = {}, None

    def close(self) -> None:
        """Close the files and release the lock; safe to repeat.

        A folder without a plan is deleted, and its parent `_iskander` too if that is empty then.
        """
        with self._mutex:
            self._close_lines()
            if self._lock is None:
                return
            is_empty = not (self.folder / PLAN).exists()
            if is_empty and fcntl is not None:
                # Before the lock is released: afterwards another process may have created the file.
                (self.folder / LOCK).unlink(missing_ok=True)
            _unlock(self._lock, self.folder / LOCK)
            self._lock = None
            if is_empty:
                with suppress(OSError):
                    self.folder.rmdir()
                    if self.folder.parent.name == PARENT:
                        self.folder.parent.rmdir()

    def _close_lines(self) -> None:
        if self._lines is not None:
            os.close(self._lines)
            self._lines = None


@contextmanager
def _as_state_errors(folder: Path) -> Iterator[None]:
    """Convert errors of the system to `StateError` with the path."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{error.filename or folder}: the state of the job cannot be read or written: "
            f"{error.strerror}"
        ) from error


def _read_finished(path: Path, plan: JobPlan) -> dict[int, Finished]:
    """Read the finished units; ignore a last line that was cut off.

    Raises:
        JobConflict: Another line is damaged, or names a unit of another plan.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    finished = {}
    # A line without a line end was cut off by a crash, even if it can be decoded.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            unit = _decode_line(line)
        except (ValueError, TypeError, RecursionError) as error:
            raise JobConflict(
                f"{path}: line {number} is damaged; start again with --restart"
            ) from error
        is_unit = 0 <= unit.index < len(plan.units)
        if not is_unit or plan.units[unit.index].name != unit.name:
            raise JobConflict(f"{path}: line {number} is not of this plan; use --restart")
        finished[unit.index] = unit
    return finished


def _decode_line(line: bytes) -> Finished:
    """Decode a line; raise ValueError or TypeError if it is damaged."""
    unit = Finished(**json.loads(line))
    numbers = {name: value for name, value in asdict(unit).items() if name != "name"}
    if not all(type(value) is int for value in numbers.values()):
        raise ValueError(f"wanted numbers, got {numbers}")
    return unit


def _open_lines(path: Path) -> int:
    """Open the journal for appending; remove a last line that was cut off."""
    lines = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
    try:
        text = path.read_bytes()
        os.ftruncate(lines, text.rfind(b"\n") + 1)
        os.lseek(lines, 0, os.SEEK_END)
    except OSError:
        os.close(lines)
        raise
    return lines


def _differences(earlier: JobPlan, plan: JobPlan) -> str:
    parts = []
    if earlier.model != plan.model:
        parts.append(f"model {earlier.model}, now {plan.model}")
    elif earlier.version != plan.version:
        parts.append(f"model version {earlier.version}, now {plan.version}")
    elif earlier.digest != plan.digest:
        parts.append("the files of the model changed")
    if earlier.program != plan.program:
        parts.append(f"made by {earlier.program}, now {plan.program}")
    if earlier.snapshot != plan.snapshot:
        parts.append("the input changed")
    parts += differences(earlier.values, plan.values)
    return "; ".join(parts) or "its contract or the columns of its output differ"


def _replace_file(path: Path, text: bytes) -> None:
    """Write a file as a whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Write new and renamed entries of a folder to disk, if the system supports that."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]


def _lock(path: Path) -> int:
    """Lock a file for this process; the system releases the lock if the process dies.

    Without fcntl, the existence of the file is the lock. The file stays if the process dies, and
    has the id of that process.
    """
    if fcntl is None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError as error:
            raise _in_use_error(path) from error
        _write_all(descriptor, str(os.getpid()).encode())
        return descriptor
    for _ in range(_LOCK_ATTEMPTS):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise _in_use_error(path) from error
            raise
        # Another process may have removed the file between the two calls: then it locks nothing.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)
    raise _in_use_error(path)


def _unlock(descriptor: int, path: Path) -> None:
    if fcntl is None:
        os.close(descriptor)
        path.unlink(missing_ok=True)
    else:
        # Closing releases the lock. The file stays, because another process may have opened it.
        os.close(descriptor)


def _in_use_error(path: Path) -> JobConflict:
    try:
        pid = path.read_text()[:20] or "unknown"
    except OSError:
        pid = "unknown"
    hint = "" if fcntl is not None else f"; delete {path.name} if that process is gone"
    return JobConflict(f"{path.parent}: process {pid} uses the state folder{hint}")
