"""Staged units: written, synced and renamed, one folder for each unit.

A staged unit is invisible to readers of the output, because they ignore names that begin with `_`
or `.`. A unit that is staged again replaces the earlier one.

Runs in: the operator's tool; `stage` may be called from several threads, each with its own unit.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from iskander import __version__
from iskander.errors import Cancelled
from iskander.lake.errors import JobConflict
from iskander.lake.journal import Finished
from iskander.lake.plan import JobPlan, Unit, canonical
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sinks.schemas import group_rows
from iskander.lake.sinks.sorting import sorted_batches
from iskander.lake.sinks.storage import Storage, writing
from iskander.lake.sinks.writing import Layout, Staged, UnitWriter

JOINED: Final = "joined"
"""Name of the folder with the files that a commit makes of all units."""
PARTIAL: Final = ".partial"
SORT: Final = "sort"
"""Name of the folder for temporary files of a sort, in the state folder."""
ABORT_S: Final = 10.0
"""Limit of the time that `abort` waits for threads that write; a disk may hang."""
FINGERPRINT: Final = "iskander.fingerprint"
"""Key of the plan's fingerprint in the origin of the results."""


EXECUTION: Final = ("batch_rows", "max_batch_rows", "providers", "runtime", "threads")
"""Names of the plan's values that are in the origin of the results."""


def provenance(plan: JobPlan) -> dict[str, str]:
    """Return the origin of the results, as key-value metadata."""
    execution = {f"iskander.{name}": str(plan.values.get(name, "unknown")) for name in EXECUTION}
    return {
        **execution,
        "iskander.digest": plan.digest,
        FINGERPRINT: plan.fingerprint,
        "iskander.input": canonical(plan.snapshot).decode(),
        "iskander.model": plan.model,
        "iskander.product": f"iskander {__version__}",
        "iskander.version": plan.version,
    }


class Staging:
    """Staged units of one job.

    Args:
        storage: Storage of the output.
        folder: Folder of the staged units; no other job uses it.
        layout: Layout of the output's files.
        state_folder: Local folder for the temporary files of a sort. Files of a killed process stay
            until the next sort or `remove`.
        is_joined: Whether a commit joins all units to new files; units are then staged as Arrow IPC
            files.
    """

    def __init__(
        self, storage: Storage, folder: str, layout: Layout, state_folder: str, *, is_joined: bool
    ) -> None:
        self.storage = storage
        self.folder = folder
        self.layout = layout
        self.is_joined = is_joined
        self._sort_folder = Path(state_folder, SORT)
        self._unit_layout = layout
        if is_joined:
            self._unit_layout = replace(
                layout,
                format="ipc",
                compression="lz4",
                partition_by=(),
                sort_by=(),
                file_bytes=None,
                metadata={},
            )
        self._reset()

    def _reset(self) -> None:
        """Start without writers, and with a name for partial units that no other process uses."""
        self._token = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._writing = 0
        self._is_aborted = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for another process that writes units of the same job."""
        return {name: value for name, value in vars(self).items() if name != "_changed"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit.

        Raises:
            OutputError: The unit cannot be written; nothing of it remains.
            Cancelled: The job was aborted.
        """
        return self._write(unit.index, unit.name, self._unit_layout, batches)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit that an earlier run staged; None if its files are lost."""
        path = f"{self.folder}/{unit.name}"
        with writing(path, failure="cannot read"):
            if sum(self.files(unit.name).values()) != finished.bytes:
                return None
        return Staged(unit.index, path, finished.rows_out, finished.bytes)

    def complete(
        self, plan: JobPlan, staged: Sequence[Staged], check: Callable[[], None]
    ) -> dict[str, int]:
        """Verify all units, and join them if the output needs it.

        Args:
            plan: Plan of the job.
            staged: All units of the plan.
            check: Raises an exception to stop.

        Returns:
            Bytes of the output's files by path below the folder.

        Raises:
            OutputError: The files of a unit are lost, or the system rejects to write.
        """
        wanted = {each.index: each.bytes for each in staged}
        missing = [each.name for each in plan.units if each.index not in wanted]
        assert not missing, f"units {missing[:5]} are not staged"
        files: dict[str, int] = {}
        for unit in plan.units:
            check()
            found = self.files(unit.name)
            if sum(found.values()) != wanted[unit.index]:
                raise OutputError(
                    f"{unit.name}: the staged files are lost; run again with --resume to score "
                    "the unit"
                )
            files.update({f"{unit.name}/{path}": size for path, size in found.items()})
        if not self.is_joined:
            return files
        self._join(plan.units, check)
        return {f"{JOINED}/{path}": size for path, size in self.files(JOINED).items()}

    def files(self, name: str) -> dict[str, int]:
        """Return the bytes of the files of a staged unit, by path below its folder."""
        return self.storage.files(f"{self.folder}/{name}")

    def write_empty(self) -> str:
        """Write one file without rows, and return its path below the folder."""
        self._write(-1, JOINED, self.layout, iter(()), name="part-00000", is_empty=True)
        return f"{JOINED}/{next(iter(self.files(JOINED)))}"

    def rows(self, path: str) -> int:
        """Return the number of rows of a Parquet file below the folder."""
        path = f"{self.folder}/{path}"
        with (
            writing(path, failure="cannot read"),
            self.storage.filesystem.open_input_file(path) as file,
        ):
            return int(pq.read_metadata(file).num_rows)

    def remove_partial(self) -> None:
        """Delete the incomplete units of processes that were killed."""
        with writing(self.folder, failure="cannot delete"):
            for name in self.storage.names(self.folder):
                if name.endswith(PARTIAL):
                    self.storage.remove_folder(f"{self.folder}/{name}")

    def remove(self) -> None:
        """Delete all staged units, and the temporary files of a sort."""
        self._remove_sort()
        with writing(self.folder, failure="cannot delete"):
            self.storage.remove_folder(self.folder)

    def abort(self) -> None:
        """Delete all staged units; from now on, `stage` fails in all threads."""
        with self._changed:
            self._is_aborted = True
            self._changed.wait_for(lambda: self._writing == 0, ABORT_S)
        self.remove()

    def _join(self, units: Sequence[Unit], check: Callable[[], None]) -> None:
        """Write all rows to the files of the output, in the order of units or of keys."""
        rows = self._read_staged(units, check)
        if not self.layout.sort_by:
            self._write(-1, JOINED, self.layout, rows, name="part-00000")
            return
        folder = str(self._sort_folder)
        self._remove_sort()
        with writing(folder):
            os.makedirs(folder)
        try:
            with closing(
                sorted_batches(
                    rows,
                    self.layout.schema,
                    self.layout.sort_by,
                    folder=folder,
                    batch_rows=group_rows(self.layout.schema),
                )
            ) as ordered:
                self._write(
                    -1, JOINED, self.layout, _check_between(ordered, check), name="part-00000"
                )
        finally:
            self._remove_sort()

    def _remove_sort(self) -> None:
        shutil.rmtree(self._sort_folder, ignore_errors=True)

    @contextmanager
    def _while_writing(self, target: str) -> Iterator[None]:
        """Mark the block as writing to disk, so that `abort` waits for its end.

        Raises:
            Cancelled: The job was aborted.
            OutputError: A write in the block failed.
        """
        with self._changed:
            if self._is_aborted:
                raise Cancelled(f"{target}: not written, because the job was aborted")
            self._writing += 1
        try:
            with writing(target):
                yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _write(
        self,
        index: int,
        folder: str,
        layout: Layout,
        batches: Iterator[pa.RecordBatch],
        *,
        name: str | None = None,
        is_empty: bool = False,
    ) -> Staged:
        target = f"{self.folder}/{folder}"
        # An object store publishes a file as a whole, so no partial name is needed.
        partial = f"{target}.{self._token}{PARTIAL}" if self.storage.is_local else target
        with self._while_writing(target):
            self.storage.remove_folder(partial)
        try:
            with UnitWriter(self.storage, partial, name or folder, layout) as writer:
                for batch in batches:
                    with self._while_writing(target):
                        writer.write(batch)
                with self._while_writing(target):
                    files = writer.finish()
                    if is_empty:
                        writer.write_empty()
                    self.storage.publish(partial, target)
        except Exception:
            # Frees the space. An object store creates the parent of a deleted folder again.
            with suppress(OSError):
                self.storage.remove_folder(self.folder if self._is_aborted else partial)
            raise
        return Staged(
            index, target, sum(each.rows for each in files), sum(file.bytes for file in files)
        )

    def _read_staged(
        self, units: Sequence[Unit], check: Callable[[], None]
    ) -> Iterator[pa.RecordBatch]:
        """Read the staged units in order."""
        for unit in units:
            check()
            folder = f"{self.folder}/{unit.name}"
            with writing(folder, failure="cannot read the staged files"):
                for path in self.files(unit.name):
                    with self.storage.filesystem.open_input_file(f"{folder}/{path}") as file:
                        reader = pa.ipc.open_file(file)
                        for index in range(reader.num_record_batches):
                            check()
                            yield reader.get_batch(index).replace_schema_metadata(None)


def _check_between(
    batches: Iterator[pa.RecordBatch], check: Callable[[], None]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        check()
        yield batch


def check_others(staging: Staging, prefix: str, *, is_restart: bool) -> None:
    """Check that no other job has staged units for the same output; delete them for a restart.

    Args:
        staging: Staged units of this job.
        prefix: Prefix of the names of all staging folders of the output.
        is_restart: Delete the units of other jobs.

    Raises:
        JobConflict: Another job has staged units.
    """
    storage = staging.storage
    folder, _, own = staging.folder.rpartition("/")
    with writing(folder):
        for name in storage.names(folder):
            if not name.startswith(prefix) or name == own:
                continue
            if not is_restart:
                raise JobConflict(
                    f"{folder}/{name}: has staged units of another job for this output; use "
                    "--restart to delete them, or resume that job"
                )
            storage.remove_folder(f"{folder}/{name}")
