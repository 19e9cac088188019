"""Delta tables as output, in one commit; needs the library `deltalake`.

Data files are staged below the table's folder, moved to their final names, and added to the log
in one commit with the transaction `app_id=FINGERPRINT`. Files without a commit are invisible, and
the log tells whether a commit that was interrupted took place.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from iskander.errors import ConfigError, Unsupported
from iskander.scoring.job import Job
from iskander.scoring.journal import Finished
from iskander.scoring.plan import Plan, Unit
from iskander.scoring.sinks.errors import OutputError, OutputExists
from iskander.scoring.sinks.schemas import check_columns, check_partitions, table_schema
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
from iskander.scoring.sinks.writing import Layout, Staged, compression_of, partition_values

if TYPE_CHECKING:
    from deltalake import DeltaTable

SCHEME: Final = "delta://"
_STAGING: Final = "_staging-"
_WRITER_VERSION_MAX: Final = 2
_REJECTED_SETTINGS: Final = ("delta.constraints.", "delta.columnMapping.mode")
"""Settings of tables whose rows or files a writer must treat in a way that is not made here."""


class DeltaSink:
    """A Delta table.

    Args:
        job: Job with the output `delta://PATH`, or the folder of a table.

    Raises:
        ConfigError: The library is not installed.
        OutputError: The filesystem is unknown.
    """

    is_resumable = True

    def __init__(self, job: Job) -> None:
        self._deltalake = _library(job.output)
        self._job = job
        self._uri = job.output.removeprefix(SCHEME)
        self._storage, self._path = storage_of(self._uri)
        self._location = self._path if self._storage.is_local else self._uri.partition("?")[0]
        self._compression = compression_of("parquet", job.compression)
        self._record = Record(job.state_folder)
        self._staging: Staging | None = None
        self._partition_by = job.partition_by
        self._table_schema: pa.Schema | None = None

    def prepare(self, plan: Plan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Check the table and begin; see `Sink.prepare`."""
        job = self._job
        columns = table_schema(schema, format="delta")
        is_known = is_resumed and self._record.load(plan.fingerprint)
        is_begun = is_known and self._record.state != "prepared"
        table = self._table()
        if not is_begun:
            self._check_free(table)
        if table is not None and not (is_begun and job.overwrite == "error"):
            columns, self._partition_by = _checked(job, table, columns)
        check_partitions(self._partition_by, columns)
        check_columns("sort_by", job.sort_by, columns)
        if job.sort_by:
            check_sort(job.sort_by, columns)
        self._table_schema = columns
        layout = Layout(
            schema=columns,
            metadata=provenance(plan),
            compression=self._compression,
            partition_by=self._partition_by,
            sort_by=job.sort_by,
            file_bytes=job.file_bytes,
        )
        own = _STAGING + plan.fingerprint[:16]
        self._staging = Staging(
            self._storage, f"{self._path}/{own}", layout, is_joined=bool(job.sort_by)
        )
        if is_begun:
            return
        earlier = None if table is None else table.transaction_version(plan.fingerprint)
        if earlier is not None and job.overwrite == "append":
            raise OutputExists(
                f"{job.output}: the table has the results of this job already (transaction "
                f"{plan.fingerprint[:8]}, version {earlier}); nothing is appended twice"
            )
        check_others(self._storage, self._path, _STAGING, own, is_restart=job.restart)
        if not is_known:
            self._staging.remove()
            self._record.save(
                fingerprint=plan.fingerprint, state="prepared", transaction=(earlier or 0) + 1
            )

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit; see `Sink.stage`."""
        return self._ready().stage(unit, batches)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit of an earlier run; see `Sink.recover`."""
        if self._record.state != "prepared":
            return Staged(
                unit.index, self._path, finished.rows_out, finished.bytes, finished.sha256
            )
        return self._ready().recover(unit, finished)

    def commit(self, plan: Plan, staged: Sequence[Staged]) -> None:
        """Add all files to the log; see `Sink.commit`."""
        if self._record.state == "committed":
            return
        staging = self._ready()
        with writing(self._path):
            if self._record.state == "prepared":
                self._plan_moves(plan, staged)
            values = self._record.values
            table = self._table()
            done = None if table is None else table.transaction_version(plan.fingerprint)
            if done is None or done < values["transaction"]:
                # Another program may have created the table since the files were listed.
                self._check_table(table)
                for file in values["files"]:
                    self._storage.move(
                        f"{staging.folder}/{file['source']}", f"{self._path}/{file['path']}"
                    )
                self._commit(plan, table, values)
        staging.remove()
        self._record.save(state="committed", files=[])

    def abort(self) -> None:
        """Delete the staged units; see `Sink.abort`."""
        if self._staging is not None and self._record.state == "prepared":
            self._staging.remove()
            self._record.remove()
            self._storage.remove_empty(self._path.rpartition("/")[0], self._path)

    def finish(self) -> None:
        """Delete the record of the commit; see `Sink.finish`."""
        self._record.remove()

    def _ready(self) -> Staging:
        assert self._staging is not None, "prepare comes first"
        return self._staging

    def _table(self) -> DeltaTable | None:
        """Open the table at its latest version; None if there is none.

        Raises:
            OutputError: It cannot be opened.
        """
        try:
            if not self._deltalake.DeltaTable.is_deltatable(self._location):
                return None
            table: DeltaTable = self._deltalake.DeltaTable(self._location)
            return table
        except (self._deltalake.exceptions.DeltaError, OSError, ValueError) as error:
            raise OutputError(
                f"{self._job.output}: cannot open the Delta table: {error}", output=self._uri
            ) from error

    def _check_table(self, table: DeltaTable | None) -> None:
        if table is not None and self._job.overwrite == "error":
            raise OutputExists(
                f"{self._job.output}: the Delta table exists; use --overwrite append or replace, "
                "or another output"
            )

    def _check_free(self, table: DeltaTable | None) -> None:
        """Check the table, or that its folder has nothing else.

        Raises:
            OutputExists: The table exists and may not be changed, or other files do.
        """
        self._check_table(table)
        if table is not None:
            return
        with writing(self._path):
            if self._storage.kind(self._path) == "file":
                raise OutputExists(f"{self._job.output}: is a file, not a folder")
            names = [
                each for each in self._storage.names(self._path) if not each.startswith(_STAGING)
            ]
        if names:
            raise OutputExists(
                f"{self._job.output}: the folder has files, but is no Delta table; choose another "
                "output"
            )

    def _plan_moves(self, plan: Plan, staged: Sequence[Staged]) -> None:
        staging = self._ready()
        table = self._table()
        self._check_free(table)
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
        version = self._record.values["transaction"]
        # Names of live files are never used again: each transaction has its own.
        mark = plan.fingerprint[:8] + (f"-{version}" if version > 1 else "")
        files = []
        for folder in folders:
            for path, size in staging.files(folder).items():
                files.append(
                    {
                        "source": f"{folder}/{path}",
                        "path": path.removesuffix(".parquet") + f"-{mark}.parquet",
                        "bytes": size,
                        "rows": staging.rows(f"{staging.folder}/{folder}/{path}"),
                        "partition": partition_values(path),
                    }
                )
        self._record.save(state="committing", files=files)

    def _commit(self, plan: Plan, table: DeltaTable | None, values: dict[str, Any]) -> None:
        from deltalake.transaction import AddAction, create_table_with_add_actions

        assert self._table_schema is not None
        actions = [
            AddAction(
                path=file["path"],
                size=file["bytes"],
                partition_values=file["partition"],
                modification_time=0,
                data_change=True,
                stats=json.dumps({"numRecords": file["rows"]}),
            )
            for file in values["files"]
        ]
        properties = self._deltalake.CommitProperties(
            custom_metadata=provenance(plan),
            app_transactions=[self._deltalake.Transaction(plan.fingerprint, values["transaction"])],
        )
        names = list(self._partition_by)
        try:
            if table is None:
                create_table_with_add_actions(
                    self._location,
                    self._deltalake.Schema.from_arrow(self._table_schema),
                    actions,
                    mode="error",
                    partition_by=names,
                    commit_properties=properties,
                )
            else:
                table.create_write_transaction(
                    [*actions],
                    mode="overwrite" if self._job.overwrite == "replace" else "append",
                    schema=table.schema(),
                    partition_by=names,
                    commit_properties=properties,
                )
        except (self._deltalake.exceptions.DeltaError, OSError, ValueError) as error:
            raise OutputError(
                f"{self._job.output}: the commit failed: {error}; the table is unchanged, "
                "run again with --resume",
                output=self._uri,
            ) from error


def _checked(job: Job, table: DeltaTable, columns: pa.Schema) -> tuple[pa.Schema, tuple[str, ...]]:
    """Check that rows of these columns can be added, and return the table's schema and partitions.

    Raises:
        OutputExists: The columns or the partitions differ.
        Unsupported: The table has features that need another writer.
    """
    metadata = table.metadata()
    for name, value in metadata.configuration.items():
        is_off = name == "delta.columnMapping.mode" and value == "none"
        if name.startswith(_REJECTED_SETTINGS) and not is_off:
            raise Unsupported(
                f"{job.output}: the table has {name}; write a new table, and merge it"
            )
    protocol = table.protocol()
    if protocol.min_writer_version > _WRITER_VERSION_MAX and any(
        "generationExpression" in str(each.metadata) or "invariants" in str(each.metadata)
        for each in table.schema().fields
    ):
        raise Unsupported(f"{job.output}: the table has generated columns; write a new table")
    partition_by = tuple(metadata.partition_columns)
    if job.partition_by and job.partition_by != partition_by:
        raise OutputExists(
            f"{job.output}: partition_by is {list(job.partition_by)}; the table has "
            f"{list(partition_by)}"
        )
    found = table_schema(pa.schema(table.schema().to_arrow()), format="delta")
    wanted = {each.name: each.type for each in found}
    given = {each.name: each.type for each in columns}
    if wanted != given:
        raise OutputExists(
            f"{job.output}: the columns differ: the table has {_columns(wanted)}; the results have "
            f"{_columns(given)}"
        )
    return columns, partition_by


def _columns(types: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {types[name]}" for name in sorted(types))


def _library(output: str) -> Any:  # noqa: ANN401
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError as error:
        raise ConfigError(
            f"{output}: Delta tables need deltalake; install iskander[delta]"
        ) from error
    return deltalake
