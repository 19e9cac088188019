"""Staged units: written, synced and renamed, one folder for each unit.

A staged unit is invisible to readers of the output, because names that begin with `_` or `.` belong
to writers. Staging it again replaces it.

Runs in: the operator's tool; `stage` may be called from several threads, each with its own unit.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq

from iskander import __version__
from iskander.errors import IskanderError
from iskander.scoring.errors import JobConflict
from iskander.scoring.journal import Finished
from iskander.scoring.plan import Plan, Unit, canonical
from iskander.scoring.sinks.errors import OutputError
from iskander.scoring.sinks.schemas import group_rows
from iskander.scoring.sinks.sorting import sorted_batches
from iskander.scoring.sinks.storage import Storage, writing
from iskander.scoring.sinks.writing import Layout, Staged, UnitWriter, digest_of

JOINED = "joined"
"""Folder of the files that a commit makes of all units."""


def provenance(plan: Plan) -> dict[str, str]:
    """Origin of the results, as key-value metadata."""
    return {
        "iskander.digest": plan.digest,
        "iskander.fingerprint": plan.fingerprint,
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
        layout: Form of the output's files.
        is_joined: Units become other files at the commit, by `join`, so that they are staged as
            Arrow IPC files.
    """

    def __init__(self, storage: Storage, folder: str, layout: Layout, *, is_joined: bool) -> None:
        self.storage = storage
        self.folder = folder
        self.layout = layout
        self.is_joined = is_joined
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

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit.

        Raises:
            OutputError: The system rejects to write. Nothing of the unit remains.
        """
        return self._write(unit.index, unit.name, self._unit_layout, batches)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit that an earlier run staged; None if its files are lost."""
        path = f"{self.folder}/{unit.name}"
        with writing(path):
            if sum(self.storage.files(path).values()) != finished.bytes:
                return None
        return Staged(unit.index, path, finished.rows_out, finished.bytes, finished.sha256)

    def files(self, name: str) -> dict[str, int]:
        """Bytes of the files of a staged unit by path below its folder."""
        return self.storage.files(f"{self.folder}/{name}")

    def join(self, units: Sequence[Unit], sort_by: Sequence[str]) -> None:
        """Write all rows to the files of the output, in the order of units or of keys."""
        if not sort_by:
            self._write(-1, JOINED, self.layout, self._rows(units), name="part-00000")
            return
        if self.storage.is_local:
            os.makedirs(self.folder, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="iskander-sort-", dir=self.folder if self.storage.is_local else None
        ) as folder:
            rows = sorted_batches(
                self._rows(units),
                self.layout.schema,
                sort_by,
                folder=folder,
                batch_rows=group_rows(self.layout.schema),
            )
            self._write(-1, JOINED, self.layout, rows, name="part-00000")

    def write_empty(self) -> None:
        """Write one file without rows."""
        self._write(-1, JOINED, self.layout, iter(()), name="part-00000", is_empty=True)

    def rows(self, path: str) -> int:
        """Rows of a Parquet file."""
        with writing(path), self.storage.filesystem.open_input_file(path) as file:
            return int(pq.read_metadata(file).num_rows)

    def remove(self) -> None:
        """Delete all staged units."""
        with writing(self.folder):
            self.storage.remove_folder(self.folder)

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
        partial = self.storage.partial(target)
        with writing(target):
            self.storage.remove_folder(partial)
        try:
            with UnitWriter(self.storage, partial, name or folder, layout) as writer:
                for batch in batches:
                    writer.write(batch)
                files = writer.finish()
                if is_empty:
                    writer.write_empty()
            with writing(target):
                self.storage.publish(target)
        except (IskanderError, OSError, pa.ArrowException):
            # Space for the next attempt.
            with suppress(OSError):
                self.storage.remove_folder(partial)
            raise
        return Staged(
            index,
            target,
            sum(each.rows for each in files),
            sum(each.bytes for each in files),
            digest_of(files),
        )

    def _rows(self, units: Sequence[Unit]) -> Iterator[pa.RecordBatch]:
        """Read the staged units in order."""
        for unit in units:
            folder = f"{self.folder}/{unit.name}"
            for path in self.storage.files(folder):
                try:
                    with self.storage.filesystem.open_input_file(f"{folder}/{path}") as file:
                        reader = pa.ipc.open_file(file)
                        for index in range(reader.num_record_batches):
                            yield reader.get_batch(index).replace_schema_metadata(None)
                except (OSError, pa.ArrowException) as error:
                    raise OutputError(
                        f"{folder}/{path}: cannot read the staged file: {error}", output=folder
                    ) from error


def check_staged(plan: Plan, staged: Sequence[Staged], recover: Callable[[Unit], bool]) -> None:
    """Check that all units of the plan are staged.

    Raises:
        OutputError: The files of a unit are lost.
    """
    missing = {each.index for each in plan.units} - {each.index for each in staged}
    assert not missing, f"units {sorted(missing)[:5]} are not staged"
    for unit in plan.units:
        if not recover(unit):
            raise OutputError(
                f"{unit.name}: the staged files are lost; run again with --resume to score the unit"
            )


def check_others(storage: Storage, folder: str, prefix: str, own: str, *, is_restart: bool) -> None:
    """Check that no other job has staged units for the same output; a restart deletes them.

    Raises:
        JobConflict: Another job has.
    """
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


def sizes(staged: Sequence[Staged]) -> Mapping[int, int]:
    """Bytes of each staged unit by index."""
    return {each.index: each.bytes for each in staged}
