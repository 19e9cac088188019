"""Files as output: one folder, or one file.

A folder has one file or more for each unit, and `_SUCCESS` with the origin of the results at the
end. One file has the rows of all units in order. In a local filesystem staged files are renamed. In
an object store they are copied by the store and deleted afterwards; nothing is uploaded under a
final name, because an upload that fails in the middle would be visible.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from iskander.errors import ConfigError
from iskander.scoring.errors import SourceError
from iskander.scoring.job import Job
from iskander.scoring.journal import Finished
from iskander.scoring.plan import Plan, Unit, canonical
from iskander.scoring.sinks.errors import OutputExists
from iskander.scoring.sinks.schemas import check_columns, check_partitions, plain_schema
from iskander.scoring.sinks.sorting import check_sort
from iskander.scoring.sinks.staging import (
    JOINED,
    Staging,
    check_others,
    check_staged,
    provenance,
    sizes,
)
from iskander.scoring.sinks.storage import Record, storage_of, writing
from iskander.scoring.sinks.writing import (
    Layout,
    Staged,
    check_csv,
    compression_of,
    format_of,
    partition_values,
)
from iskander.scoring.sources.places import locate

SUCCESS = "_SUCCESS"
_METADATA = ("_SUCCESS", "_metadata", "_common_metadata")


class FileSink:
    """A folder of files, or one file.

    Args:
        job: Job with the output. It is one file if its name has the ending of a format and does not
            end with `/`, and no folder of that name exists.

    Raises:
        ConfigError: The options do not fit together.
        OutputError: The filesystem is unknown.
    """

    is_resumable = True

    def __init__(self, job: Job) -> None:
        self._job = job
        self._storage, self._path = storage_of(job.output)
        name = self._path.rpartition("/")[2]
        found = format_of(name)
        with writing(job.output):
            kind = self._storage.kind(self._path)
        self._is_one = found is not None and not job.output.endswith("/") and kind != "folder"
        self._format, compression = found or ("parquet", None)
        self._compression = compression_of(self._format, job.compression or compression)
        if compression is not None and self._compression != compression:
            raise ConfigError(
                f"{job.output}: compression is {job.compression!r}, but the name means "
                f"{compression!r}"
            )
        if self._is_one:
            if job.partition_by:
                raise ConfigError(f"{job.output}: partition_by needs a folder as output")
            if job.overwrite == "append":
                raise ConfigError(f"{job.output}: append needs a folder or a table as output")
        _check_inputs(job)
        self._record = Record(job.state_folder)
        self._staging: Staging | None = None

    def prepare(self, plan: Plan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Check the output and begin; see `Sink.prepare`."""
        job = self._job
        columns = plain_schema(schema)
        check_partitions(job.partition_by, columns)
        check_columns("sort_by", job.sort_by, columns)
        if self._format == "csv":
            check_csv(columns)
        if job.sort_by:
            check_sort(job.sort_by, columns)
        layout = Layout(
            schema=columns,
            metadata=provenance(plan),
            format=self._format,
            compression=self._compression,
            partition_by=job.partition_by,
            sort_by=job.sort_by,
            file_bytes=None if self._is_one else job.file_bytes,
        )
        parent, _, name = self._path.rpartition("/")
        place, prefix = (parent, f".{name}.staging-") if self._is_one else (self._path, "_staging-")
        own = prefix + plan.fingerprint[:16]
        self._staging = Staging(
            self._storage,
            f"{place}/{own}",
            layout,
            is_joined=self._is_one or bool(job.sort_by),
        )
        is_known = is_resumed and self._record.load(plan.fingerprint)
        if is_known and self._record.state != "prepared":
            return
        self._check_free(layout)
        check_others(self._storage, place, prefix, own, is_restart=job.restart)
        if not is_known:
            self._staging.remove()
            self._record.save(fingerprint=plan.fingerprint, state="prepared")

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit; see `Sink.stage`."""
        return self._ready().stage(unit, batches)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit of an earlier run; see `Sink.recover`."""
        if self._record.state != "prepared":
            return Staged(unit.index, self._path, *_counts(finished))
        return self._ready().recover(unit, finished)

    def commit(self, plan: Plan, staged: Sequence[Staged]) -> None:
        """Make all units visible; see `Sink.commit`."""
        if self._record.state == "committed":
            return
        staging = self._ready()
        if self._record.state == "prepared":
            with writing(self._path):
                self._plan_moves(plan, staged)
        with writing(self._path):
            self._move(plan)
        staging.remove()
        self._record.save(state="committed", moves=[], deletes=[])

    def abort(self) -> None:
        """Delete the staged units; see `Sink.abort`."""
        if self._staging is not None and self._record.state == "prepared":
            self._staging.remove()
            self._record.remove()
            if not self._is_one:
                self._storage.remove_empty(self._path.rpartition("/")[0], self._path)

    def finish(self) -> None:
        """Delete the record of the commit; see `Sink.finish`."""
        self._record.remove()

    def _ready(self) -> Staging:
        assert self._staging is not None, "prepare comes first"
        return self._staging

    def _check_free(self, layout: Layout) -> None:
        """Check that the output does not exist, or may be changed.

        Raises:
            OutputExists: It exists.
        """
        mode = self._job.overwrite
        with writing(self._path):
            kind = self._storage.kind(self._path)
            if kind == "none":
                return
            if self._is_one or kind == "file":
                if not self._is_one:
                    raise OutputExists(f"{self._job.output}: is a file, not a folder")
                if mode == "error":
                    raise _exists(self._job.output, "file")
                return
            names = [each for each in self._storage.names(self._path) if not _is_staging(each)]
            if mode == "error" and names:
                raise _exists(self._job.output, "folder with files")
            if mode == "replace":
                self._check_own_files()
            if mode == "append":
                self._check_same_form(layout)

    def _check_own_files(self) -> None:
        """Check that `replace` would delete files of data only."""
        for path in self._old_files():
            name = path.rpartition("/")[2]
            if name not in _METADATA and format_of(name) is None:
                raise OutputExists(
                    f"{self._job.output}: replace deletes data files only, but the folder has "
                    f"{path}; move it, or choose another folder"
                )

    def _check_same_form(self, layout: Layout) -> None:
        """Check that the first data file has the same columns, folders and ending."""
        data = [each for each in self._old_files() if format_of(each.rpartition("/")[2])]
        if not data:
            return
        first = data[0]
        keys = tuple(partition_values(first))
        if not first.endswith(layout.ending) or keys != layout.partition_by:
            raise OutputExists(
                f"{self._job.output}: cannot append files {layout.ending} with the folders "
                f"{list(layout.partition_by)}; the folder has {first}"
            )
        if layout.format == "csv":
            return
        with self._storage.filesystem.open_input_file(f"{self._path}/{first}") as file:
            if layout.format == "parquet":
                found = pq.read_schema(file)
            else:
                found = pa.ipc.open_file(file).schema
        if found.remove_metadata() != layout.file_schema:
            raise OutputExists(
                f"{self._job.output}: cannot append, because the columns differ: {first} has "
                f"{_columns(found)}; the results have {_columns(layout.file_schema)}"
            )

    def _old_files(self) -> list[str]:
        files = self._storage.files(self._path)
        return [each for each in files if not _is_staging(each.partition("/")[0])]

    def _plan_moves(self, plan: Plan, staged: Sequence[Staged]) -> None:
        """Complete all files below the staging folder, and record the moves.

        Nothing of the output changes here, so that a full disk leaves it as it was.
        """
        staging = self._ready()
        self._check_free(staging.layout)
        bytes_of = sizes(staged)
        check_staged(
            plan,
            staged,
            lambda unit: sum(staging.files(unit.name).values()) == bytes_of[unit.index],
        )
        if staging.is_joined:
            staging.join(plan.units, self._job.sort_by)
            folders = [JOINED]
        else:
            folders = [unit.name for unit in plan.units]
        files = [f"{folder}/{path}" for folder in folders for path in staging.files(folder)]
        if not files:
            staging.write_empty()
            files = [f"{JOINED}/{path}" for path in staging.files(JOINED)]
        if self._is_one:
            moves = [[files[0], ""]]
        else:
            mark = f"-{plan.fingerprint[:8]}" if self._job.overwrite == "append" else ""
            moves = [[each, _final_name(each, mark)] for each in files]
        deletes: list[str] = []
        if self._job.overwrite == "replace" and not self._is_one:
            final = {target for _, target in moves}
            deletes = [each for each in self._old_files() if each not in final and each != SUCCESS]
        self._record.save(state="committing", moves=moves, deletes=deletes)

    def _move(self, plan: Plan) -> None:
        """Carry out the recorded moves; safe to repeat after any of them."""
        storage, folder = self._storage, self._ready().folder
        values = self._record.values
        if self._is_one:
            storage.move(f"{folder}/{values['moves'][0][0]}", self._path)
            return
        # A folder without `_SUCCESS` is not complete.
        storage.remove_file(f"{self._path}/{SUCCESS}")
        for source, target in values["moves"]:
            storage.move(f"{folder}/{source}", f"{self._path}/{target}")
        for each in values["deletes"]:
            storage.remove_file(f"{self._path}/{each}")
            parent = f"{self._path}/{each}".rpartition("/")[0]
            storage.remove_empty(self._path, parent)
        storage.write(f"{self._path}/{SUCCESS}", canonical(provenance(plan)) + b"\n")


def _final_name(path: str, mark: str) -> str:
    """Path in the output: without the unit's folder, and with a mark before the ending."""
    inner = path.partition("/")[2]
    if not mark:
        return inner
    folder, slash, name = inner.rpartition("/")
    stem, ending = re.fullmatch(r"([^.]*)(\..*)", name).groups()  # type: ignore[union-attr]
    return f"{folder}{slash}{stem}{mark}{ending}"


def _is_staging(name: str) -> bool:
    return name.startswith(("_staging-", "_iskander"))


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{each.name}: {each.type}" for each in schema)


def _counts(finished: Finished) -> tuple[int, int, str]:
    return finished.rows_out, finished.bytes, finished.sha256


def _exists(output: str, kind: str) -> OutputExists:
    return OutputExists(
        f"{output}: the {kind} exists; use --overwrite append or replace, or another output",
        output=output,
    )


def _check_inputs(job: Job) -> None:
    """Check that the output is not an input, because the commit would change the input.

    Raises:
        ConfigError: It is.
    """
    target = locate(job.output)
    for each in job.inputs:
        try:
            place = locate(each)
        except SourceError:
            # Tables have schemes of their own.
            continue
        if (place.prefix, place.path) == (target.prefix, target.path):
            raise ConfigError(f"{job.output}: is an input too; choose another output")
