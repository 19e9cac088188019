"""Delta tables as output, in one commit; needs the library `deltalake`.

Data files are staged below the table's folder, moved to their final names, and added to the log
in one commit with the transaction `app_id=FINGERPRINT`. Files without a commit are invisible, and
the log tells whether a commit that was interrupted took place.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from iskander.errors import ConfigError, Unsupported
from iskander.lake.job import Job
from iskander.lake.plan import JobPlan
from iskander.lake.sinks.base import (
    StagedSink,
    appended_before_error,
    check_partitioning,
    check_same_columns,
    output_exists_error,
)
from iskander.lake.sinks.errors import OutputExists
from iskander.lake.sinks.schemas import table_schema
from iskander.lake.sinks.staging import FINGERPRINT, provenance
from iskander.lake.sinks.storage import RESUMABLE, Storage, storage_of, writing
from iskander.lake.sinks.writing import Layout, compression_of, partition_values

if TYPE_CHECKING:
    from deltalake import DeltaTable

SCHEME: Final = "delta://"
_STAGING: Final = "_staging-"
_WRITER_VERSION_MAX: Final = 2
_REJECTED_SETTINGS: Final = ("delta.constraints.", "delta.columnMapping.mode")
"""Settings of tables for which a writer must check rows or name columns, which this one does
not."""


class DeltaSink(StagedSink):
    """A Delta table.

    Args:
        job: Job with the output `delta://PATH`, or the folder of a table.

    Raises:
        ConfigError: The library is not installed, or the output overlaps an input.
        OutputError: The filesystem is unknown.
    """

    _prefix = _STAGING

    def __init__(self, job: Job) -> None:
        self._deltalake = _library(job.output)
        self._uri = job.output.removeprefix(SCHEME)
        self._storage, path = storage_of(self._uri)
        super().__init__(job, path)
        self._folder = path
        self._location = path if self._storage.is_local else self._uri.partition("?")[0]
        self._compression = compression_of("parquet", job.compression)
        self._transaction = 1

    def is_complete(self, plan: JobPlan) -> bool:
        """Whether the table has a transaction of the plan; see `Sink.is_complete`.

        Unless results are appended, the transaction must be in the latest commit, because a later
        commit may replace the results.
        """
        table = self._table()
        if table is None or not self._last_transaction(table, plan):
            return False
        if self._job.overwrite == "append":
            return True
        with self._as_output_errors("cannot read the log"):
            return bool(table.history(1)[0].get(FINGERPRINT) == plan.fingerprint)

    def _is_committed(self, plan: JobPlan) -> bool:
        wanted: int = self._record.values["transaction"]
        return self._last_transaction(self._table(), plan) >= wanted

    def _last_transaction(self, table: DeltaTable | None, plan: JobPlan) -> int:
        """Return the number of the plan's latest transaction, or 0."""
        with self._as_output_errors("cannot read the log"):
            return 0 if table is None else table.transaction_version(plan.fingerprint) or 0

    def _layout(self, plan: JobPlan, schema: pa.Schema, *, is_begun: bool) -> Layout:
        job = self._job
        columns = table_schema(schema, format="delta")
        partition_by = job.partition_by
        table = self._table()
        if not is_begun:
            self._check_table(table)
        if table is not None and not (is_begun and job.overwrite == "error"):
            with self._as_output_errors("cannot read the log"):
                partition_by = _require_appendable(job, table, columns)
        earlier = self._last_transaction(table, plan)
        if earlier and not is_begun and job.overwrite == "append":
            raise appended_before_error(job.output, plan)
        self._transaction = earlier + 1
        return self._checked_layout(plan, columns, partition_by, compression=self._compression)

    def _first_values(self) -> dict[str, Any]:
        return {"transaction": self._transaction}

    def _staging_place(self, plan: JobPlan, values: Mapping[str, Any]) -> tuple[Storage, str]:
        return self._storage, f"{self._path}/{_STAGING}{plan.fingerprint[:16]}"

    def _check_free(self, plan: JobPlan, layout: Layout) -> None:
        self._check_table(self._table())

    def _as_output_errors(
        self, failure: str, advice: str = RESUMABLE
    ) -> AbstractContextManager[None]:
        """Convert errors of the system and of the library to `OutputError` during the block."""
        return writing(
            self._job.output,
            self._deltalake.exceptions.DeltaError,
            ValueError,
            failure=failure,
            advice=advice,
        )

    def _table(self) -> DeltaTable | None:
        """Open the table at its latest version; None if there is none.

        Raises:
            OutputError: The table cannot be opened.
        """
        with self._as_output_errors("cannot open the Delta table"):
            if not self._deltalake.DeltaTable.is_deltatable(self._location):
                return None
            table: DeltaTable = self._deltalake.DeltaTable(self._location)
            return table

    def _check_table(self, table: DeltaTable | None) -> None:
        """Check that the table may be changed; without a table, that its folder is empty.

        Raises:
            OutputExists: The table exists and may not be changed, or the folder has other files.
        """
        if table is not None:
            self._require_mode(table)
            return
        with writing(self._path):
            if self._storage.kind(self._path) == "file":
                raise OutputExists(f"{self._job.output}: is a file, not a folder")
            names = [
                name for name in self._storage.names(self._path) if not name.startswith(_STAGING)
            ]
        if names:
            raise OutputExists(
                f"{self._job.output}: the folder has files, but is no Delta table; choose another "
                "output"
            )

    def _require_mode(self, table: DeltaTable | None) -> None:
        if table is not None and self._job.overwrite == "error":
            raise output_exists_error(self._job.output, "Delta table")

    def _list_files(
        self, plan: JobPlan, files: Mapping[str, int], check: Callable[[], None]
    ) -> dict[str, Any]:
        version = self._record.values["transaction"]
        # A transaction never reuses the names of live files: its number is in the names.
        mark = plan.fingerprint[:8] + (f"-{version}" if version > 1 else "")
        planned = []
        for source, size in files.items():
            check()
            path = source.partition("/")[2]
            planned.append(
                {
                    "source": source,
                    "path": path.removesuffix(".parquet") + f"-{mark}.parquet",
                    "bytes": size,
                    "rows": self._ready().rows(source),
                    "partition": partition_values(path),
                }
            )
        return {"files": planned}

    def _publish(self, plan: JobPlan) -> None:
        values, folder = self._record.values, self._ready().folder
        table = self._table()
        if self._last_transaction(table, plan) >= values["transaction"]:
            return
        # Another program may have created the table since the files were listed.
        self._require_mode(table)
        for file in values["files"]:
            self._storage.move(f"{folder}/{file['source']}", f"{self._path}/{file['path']}")
        self._commit(plan, table, values)

    def _commit(self, plan: JobPlan, table: DeltaTable | None, values: dict[str, Any]) -> None:
        from deltalake.transaction import AddAction, create_table_with_add_actions

        layout = self._ready().layout
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
        names = list(layout.partition_by)
        with self._as_output_errors("the commit failed", "run again with --resume"):
            if table is None:
                create_table_with_add_actions(
                    self._location,
                    self._deltalake.Schema.from_arrow(layout.schema),
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


def _require_appendable(job: Job, table: DeltaTable, columns: pa.Schema) -> tuple[str, ...]:
    """Require that rows with these columns can be added; return the table's partition columns.

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
        "generationExpression" in str(field.metadata) or "invariants" in str(field.metadata)
        for field in table.schema().fields
    ):
        raise Unsupported(f"{job.output}: the table has generated columns; write a new table")
    partition_by = tuple(metadata.partition_columns)
    check_partitioning(job.output, job.partition_by, partition_by)
    found = table_schema(pa.schema(table.schema().to_arrow()), format="delta")
    check_same_columns(job.output, found, columns)
    return partition_by


def _library(output: str) -> Any:  # noqa: ANN401
    try:
        import deltalake
        import deltalake.exceptions
    except ImportError as error:
        raise ConfigError(
            f"{output}: Delta tables need deltalake; install iskander[delta]"
        ) from error
    return deltalake
