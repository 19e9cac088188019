"""Files as output: one folder, or one file.

A folder has one file or more for each unit, and `_SUCCESS` with the origin of the results at the
end. One file has the rows of all units in order. In a local filesystem staged files are renamed. In
an object store they are copied by the store and deleted afterwards; nothing is uploaded under a
final name, because an upload that fails in the middle would be visible.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from iskander.errors import ConfigError
from iskander.lake.job import Job
from iskander.lake.plan import JobPlan, canonical
from iskander.lake.sinks.base import StagedSink, columns_text, output_exists_error
from iskander.lake.sinks.errors import OutputExists
from iskander.lake.sinks.schemas import plain_schema
from iskander.lake.sinks.staging import FINGERPRINT, provenance
from iskander.lake.sinks.storage import Storage, storage_of, writing
from iskander.lake.sinks.writing import (
    Layout,
    check_csv,
    compression_of,
    format_of,
    partition_values,
)

SUCCESS = "_SUCCESS"
_METADATA = ("_SUCCESS", "_metadata", "_common_metadata")


class FileSink(StagedSink):
    """An output that is a folder of files, or one file.

    Args:
        job: Job with the output. The output is one file if its name has the ending of a format and
            does not end with `/`, and no folder of that name exists.

    Raises:
        ConfigError: The options do not fit together, or the output overlaps an input.
        OutputError: The filesystem is unknown.
    """

    def __init__(self, job: Job) -> None:
        self._storage, path = storage_of(job.output)
        super().__init__(job, path)
        name = self._path.rpartition("/")[2]
        found = format_of(name)
        with writing(job.output):
            kind = self._storage.kind(self._path)
        self._is_one_file = found is not None and not job.output.endswith("/") and kind != "folder"
        self._format, compression = found or ("parquet", None)
        self._compression = compression_of(self._format, job.compression or compression)
        if compression is not None and self._compression != compression:
            raise ConfigError(
                f"{job.output}: compression is {job.compression!r}, but the name means "
                f"{compression!r}"
            )
        if self._is_one_file:
            if job.partition_by:
                raise ConfigError(f"{job.output}: partition_by needs a folder as output")
            if job.overwrite == "append":
                raise ConfigError(f"{job.output}: append needs a folder or a table as output")
        # The staging folder lies beside a single file, but inside an output folder.
        parent, _, name = path.rpartition("/")
        self._place = parent if self._is_one_file else path
        self._prefix = f".{name}.staging-" if self._is_one_file else "_staging-"
        self._folder = None if self._is_one_file else path

    def is_complete(self, plan: JobPlan) -> bool:
        """Whether `_SUCCESS`, or the metadata of a single file, is of this plan; see `Sink`."""
        path = self._path if self._is_one_file else f"{self._path}/{SUCCESS}"
        with writing(path, failure="cannot read"):
            if self._storage.kind(path) != "file":
                return False
            try:
                return self._origin(path).get(FINGERPRINT) == plan.fingerprint
            except ValueError:
                # A file of another program; pyarrow's errors about contents are ValueErrors too.
                return False

    def _is_committed(self, plan: JobPlan) -> bool:
        if self._is_one_file and self._format == "csv":
            with writing(self._path, failure="cannot read"):
                return self._storage.kind(self._path) == "file"
        return self.is_complete(plan)

    def _origin(self, path: str) -> dict[str, str]:
        """Read the origin of the results from `_SUCCESS`, or from the metadata of a single file."""
        if self._is_one_file and self._format == "csv":
            return {}
        with self._storage.filesystem.open_input_file(path) as file:
            if not self._is_one_file:
                values = json.loads(file.read())
                return values if isinstance(values, dict) else {}
            metadata = _read_schema(file, self._format).metadata or {}
        return {key.decode(): value.decode() for key, value in metadata.items()}

    def _layout(self, plan: JobPlan, schema: pa.Schema, *, is_begun: bool) -> Layout:
        columns = plain_schema(schema)
        if self._format == "csv":
            check_csv(columns)
        options: dict[str, Any] = {"format": self._format, "compression": self._compression}
        if self._is_one_file:
            options["file_bytes"] = None
        layout = self._checked_layout(plan, columns, self._job.partition_by, **options)
        if not is_begun:
            self._check_free(plan, layout)
        return layout

    def _staging_place(self, plan: JobPlan, values: Mapping[str, Any]) -> tuple[Storage, str]:
        return self._storage, f"{self._place}/{self._prefix}{plan.fingerprint[:16]}"

    def _check_free(self, plan: JobPlan, layout: Layout) -> None:
        mode = self._job.overwrite
        with writing(self._path):
            kind = self._storage.kind(self._path)
            if kind == "none":
                return
            if self._is_one_file or kind == "file":
                if not self._is_one_file:
                    raise OutputExists(f"{self._job.output}: is a file, not a folder")
                if mode == "error":
                    raise output_exists_error(self._job.output, "file")
                return
            names = [name for name in self._storage.names(self._path) if not _is_staging(name)]
            if mode == "error" and names:
                raise output_exists_error(self._job.output, "folder with files")
            if mode == "replace":
                self._check_own_files()
            if mode == "append":
                self._check_same_layout(layout)

    def _check_own_files(self) -> None:
        """Check that `replace` would delete data files only."""
        for path in self._old_files():
            name = path.rpartition("/")[2]
            if name not in _METADATA and format_of(name) is None:
                raise OutputExists(
                    f"{self._job.output}: replace deletes data files only, but the folder has "
                    f"{path}; move it, or choose another folder"
                )

    def _check_same_layout(self, layout: Layout) -> None:
        """Check that the first data file has the columns, folders and ending of the results."""
        data = [path for path in self._old_files() if format_of(path.rpartition("/")[2])]
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
            found = _read_schema(file, layout.format)
        if found.remove_metadata() != layout.file_schema:
            raise OutputExists(
                f"{self._job.output}: cannot append, because the columns differ: {first} has "
                f"{columns_text(found)}; the results have {columns_text(layout.file_schema)}"
            )

    def _old_files(self) -> list[str]:
        files = self._storage.files(self._path)
        return [path for path in files if not _is_staging(path.partition("/")[0])]

    def _list_files(
        self, plan: JobPlan, files: Mapping[str, int], check: Callable[[], None]
    ) -> dict[str, Any]:
        names = list(files) or [self._ready().write_empty()]
        check()
        if self._is_one_file:
            return {"moves": [[names[0], ""]]}
        mark = f"-{plan.fingerprint[:8]}" if self._job.overwrite == "append" else ""
        moves = [[each, _final_name(each, mark)] for each in names]
        deletes: list[str] = []
        if self._job.overwrite == "replace":
            final = {target for _, target in moves}
            deletes = [path for path in self._old_files() if path not in final and path != SUCCESS]
        return {"moves": moves, "deletes": deletes}

    def _publish(self, plan: JobPlan) -> None:
        storage, folder = self._storage, self._ready().folder
        values = self._record.values
        if self._is_one_file:
            storage.move(f"{folder}/{values['moves'][0][0]}", self._path)
            return
        # A folder without `_SUCCESS` is not complete.
        storage.remove_file(f"{self._path}/{SUCCESS}")
        for source, target in values["moves"]:
            storage.move(f"{folder}/{source}", f"{self._path}/{target}")
        for path in values["deletes"]:
            storage.remove_file(f"{self._path}/{path}")
            parent = f"{self._path}/{path}".rpartition("/")[0]
            storage.remove_empty(self._path, parent)
        storage.write(f"{self._path}/{SUCCESS}", canonical(provenance(plan)) + b"\n")


def _final_name(path: str, mark: str) -> str:
    """Return the path in the output: without the unit's folder, with `mark` before the ending."""
    inner = path.partition("/")[2]
    if not mark:
        return inner
    folder, slash, name = inner.rpartition("/")
    stem, ending = re.fullmatch(r"([^.]*)(\..*)", name).groups()  # type: ignore[union-attr]
    return f"{folder}{slash}{stem}{mark}{ending}"


def _is_staging(name: str) -> bool:
    return name.startswith(("_staging-", "_iskander"))


def _read_schema(file: pa.NativeFile, format: str) -> pa.Schema:
    return pq.read_schema(file) if format == "parquet" else pa.ipc.open_file(file).schema
