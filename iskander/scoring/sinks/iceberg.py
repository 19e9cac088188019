"""Iceberg tables as output, in one snapshot; needs the library `pyiceberg`.

Data files are staged at their final place below the table's location; files without a snapshot are
invisible. The commit adds all of them in one snapshot with the origin of the results as its
properties; `replace` has a second snapshot before it, that deletes, in the same commit of the
catalog. A new table appears with its snapshot.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
import secrets
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
from iskander.scoring.sinks.staging import JOINED, Staging, check_staged, provenance, sizes
from iskander.scoring.sinks.storage import Record, Storage, writing
from iskander.scoring.sinks.writing import Layout, Staged, compression_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table

ATTEMPT: Final = "iskander.attempt"
"""Property of the snapshot, and of a table that the job created."""
FINGERPRINT: Final = "iskander.fingerprint"
_URI = re.compile(r"iceberg://([^/@]+)/([^/@]+\.[^/@]+)")


class IcebergSink:
    """An Iceberg table.

    Args:
        job: Job with the output `iceberg://CATALOG/NAMESPACE.TABLE`. The catalog is one of
            pyiceberg's configuration.
        catalog: Catalog to use; None loads it by its name.

    Raises:
        ConfigError: The library is not installed, or the URI is not valid.
        OutputError: The catalog cannot be opened.
    """

    is_resumable = True

    def __init__(self, job: Job, catalog: Catalog | None = None) -> None:
        match = _URI.fullmatch(job.output)
        if match is None:
            raise ConfigError(f"{job.output}: expected iceberg://CATALOG/NAMESPACE.TABLE")
        self._name = match[2]
        self._job = job
        self._catalog = catalog if catalog is not None else _catalog(job.output, match[1])
        self._compression = compression_of("parquet", job.compression)
        self._record = Record(job.state_folder)
        self._staging: Staging | None = None
        self._schema: pa.Schema | None = None
        self._folder = self._prefix = ""
        self._is_done = False
        self._partition_by = job.partition_by

    def prepare(self, plan: Plan, schema: pa.Schema, *, is_resumed: bool) -> None:
        """Check the table and begin; see `Sink.prepare`."""
        job = self._job
        columns = table_schema(schema, format="iceberg")
        is_known = is_resumed and self._record.load(plan.fingerprint)
        is_begun = is_known and self._record.state != "prepared"
        table = self._table()
        if not is_begun:
            self._check_free(table, plan)
        if table is not None and not (is_begun and job.overwrite == "error"):
            self._partition_by = _checked(job, table, columns)
        check_partitions(self._partition_by, columns)
        check_columns("sort_by", job.sort_by, columns)
        if job.sort_by:
            check_sort(job.sort_by, columns)
        self._schema = columns
        if not is_known:
            self._remove_earlier(table)
            location = table.location() if table is not None else self._new_location()
            self._record.save(
                fingerprint=plan.fingerprint,
                state="prepared",
                attempt=secrets.token_hex(8),
                location=location,
            )
        values = self._record.values
        self._is_done = _is_committed(table, values["attempt"])
        self._folder = _folder(values)
        storage, path, self._prefix = _storage(self._io(table), self._folder)
        layout = Layout(
            schema=columns,
            metadata=provenance(plan),
            compression=self._compression,
            partition_by=self._partition_by,
            has_partition_columns=True,
            sort_by=job.sort_by,
            file_bytes=job.file_bytes,
        )
        self._staging = Staging(storage, path, layout, is_joined=bool(job.sort_by))

    def stage(self, unit: Unit, batches: Iterator[pa.RecordBatch]) -> Staged:
        """Write a unit; see `Sink.stage`."""
        return self._ready().stage(unit, batches)

    def recover(self, unit: Unit, finished: Finished) -> Staged | None:
        """Find a unit of an earlier run; see `Sink.recover`."""
        if self._is_done:
            return Staged(
                unit.index, self._folder, finished.rows_out, finished.bytes, finished.sha256
            )
        return self._ready().recover(unit, finished)

    def commit(self, plan: Plan, staged: Sequence[Staged]) -> None:
        """Add all files in one snapshot; see `Sink.commit`."""
        if self._record.state == "committed":
            return
        staging = self._ready()
        values = self._record.values
        with writing(self._folder):
            table = self._table()
            if not _is_committed(table, values["attempt"]):
                self._check_free(table, plan)
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
                self._record.save(state="committing")
                files = [
                    f"{self._prefix}{staging.folder}/{folder}/{path}"
                    for folder in folders
                    for path in staging.files(folder)
                ]
                self._commit(plan, table, files)
            if staging.is_joined:
                for unit in plan.units:
                    staging.storage.remove_folder(f"{staging.folder}/{unit.name}")
        self._record.save(state="committed")

    def abort(self) -> None:
        """Delete the staged units; see `Sink.abort`."""
        if self._staging is not None and self._record.state == "prepared":
            self._staging.remove()
            self._record.remove()

    def finish(self) -> None:
        """Delete the record of the commit; see `Sink.finish`."""
        self._record.remove()

    def _ready(self) -> Staging:
        assert self._staging is not None, "prepare comes first"
        return self._staging

    def _table(self) -> Table | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        try:
            return self._catalog.load_table(self._name)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        except (ValueError, OSError, KeyError) as error:
            raise OutputError(
                f"{self._job.output}: cannot open the table: {error}", output=self._name
            ) from error

    def _new_location(self) -> str:
        """Location of a table that is not created yet."""
        assert self._schema is not None
        with writing(self._job.output):
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            transaction = self._catalog.create_table_transaction(self._name, self._schema)
            return str(transaction.table_metadata.location)

    def _io(self, table: Table | None) -> FileIO:
        from pyiceberg.io import load_file_io

        if table is not None:
            return table.io
        return load_file_io(self._catalog.properties, self._record.values["location"])

    def _remove_earlier(self, table: Table | None) -> None:
        """Delete the staged units of an earlier job of this state folder that did not commit."""
        earlier = self._record.peek()
        if earlier.get("state") != "prepared" or "attempt" not in earlier:
            return
        self._record.values = earlier
        storage, path, _ = _storage(self._io(table), _folder(earlier))
        with writing(path):
            storage.remove_folder(path)
        self._record.values = {}

    def _check_free(self, table: Table | None, plan: Plan) -> None:
        if table is None:
            return
        if self._job.overwrite == "error":
            raise OutputExists(
                f"{self._job.output}: the Iceberg table exists; use --overwrite append or replace, "
                "or another output"
            )
        if self._job.overwrite == "append" and any(
            _property(each, FINGERPRINT) == plan.fingerprint for each in table.snapshots()
        ):
            raise OutputExists(
                f"{self._job.output}: the table has the results of this job already (fingerprint "
                f"{plan.fingerprint[:8]}); nothing is appended twice"
            )

    def _commit(self, plan: Plan, table: Table | None, files: list[str]) -> None:
        from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
        from pyiceberg.expressions import AlwaysTrue

        values = self._record.values
        properties = {**provenance(plan), ATTEMPT: values["attempt"]}
        try:
            if table is None:
                created = self._catalog.create_table_transaction(
                    self._name,
                    self._schema,
                    location=values["location"],
                    properties={ATTEMPT: values["attempt"]},
                )
                if self._partition_by:
                    with created.update_spec() as spec:
                        for name in self._partition_by:
                            spec.add_identity(name)
                if files:
                    created.add_files(files, snapshot_properties=properties)
                created.commit_transaction()
                return
            with table.transaction() as transaction:
                if self._job.overwrite == "replace" and _has_files(table):
                    transaction.delete(AlwaysTrue(), snapshot_properties=properties)
                if files:
                    transaction.add_files(files, snapshot_properties=properties)
        except (
            CommitFailedException, TableAlreadyExistsError, ValueError, OSError, pa.ArrowException,
        ) as error:  # fmt: skip
            raise OutputError(
                f"{self._job.output}: the commit failed: {error}; the table is unchanged, "
                "run again with --resume",
                output=self._name,
            ) from error


def _has_files(table: Table) -> bool:
    return next(iter(table.scan().plan_files()), None) is not None


def _folder(values: dict[str, Any]) -> str:
    return f"{values['location'].rstrip('/')}/data/iskander-{values['attempt']}"


def _is_committed(table: Table | None, attempt: str) -> bool:
    """Whether the snapshot of this attempt, or the empty table that it created, exists."""
    if table is None:
        return False
    return table.properties.get(ATTEMPT) == attempt or any(
        _property(each, ATTEMPT) == attempt for each in table.snapshots()
    )


def _property(snapshot: Any, name: str) -> str | None:  # noqa: ANN401
    summary = snapshot.summary
    return None if summary is None else summary.additional_properties.get(name)


def _checked(job: Job, table: Table, columns: pa.Schema) -> tuple[str, ...]:
    """Check that rows of these columns can be added, and return the partition columns.

    Raises:
        OutputExists: The columns or the partitions differ.
        Unsupported: The partitions are no columns.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.transforms import IdentityTransform

    partition_by = []
    for each in table.spec().fields:
        if not isinstance(each.transform, IdentityTransform):
            raise Unsupported(
                f"{job.output}: the table is partitioned by {each.transform}({each.name}); results "
                "are written to tables with plain partition columns only"
            )
        partition_by.append(table.schema().find_column_name(each.source_id) or each.name)
    if job.partition_by and list(job.partition_by) != partition_by:
        raise OutputExists(
            f"{job.output}: partition_by is {list(job.partition_by)}; the table has {partition_by}"
        )
    found = table_schema(
        schema_to_pyarrow(table.schema(), include_field_ids=False), format="iceberg"
    )
    wanted = {each.name: each.type for each in found}
    given = {each.name: each.type for each in columns}
    if wanted != given:
        raise OutputExists(
            f"{job.output}: the columns differ: the table has {_columns(wanted)}; the results have "
            f"{_columns(given)}"
        )
    return tuple(partition_by)


def _columns(types: dict[str, Any]) -> str:
    return ", ".join(f"{name}: {types[name]}" for name in sorted(types))


def _storage(io: FileIO, folder: str) -> tuple[Storage, str, str]:
    """Storage of the table's files, the folder's path in it, and the text before paths in URIs."""
    from pyiceberg.io.pyarrow import PyArrowFileIO

    if not isinstance(io, PyArrowFileIO):
        raise Unsupported(
            f"{folder}: the catalog uses {type(io).__name__}; set py-io-impl to "
            "pyiceberg.io.pyarrow.PyArrowFileIO"
        )
    scheme, netloc, path = PyArrowFileIO.parse_location(folder)
    with writing(folder):
        filesystem = io.fs_by_scheme(scheme, netloc)
    assert folder.endswith(path)
    return Storage(filesystem), path, folder.removesuffix(path)


def _catalog(output: str, name: str) -> Catalog:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise ConfigError(
            f"{output}: Iceberg tables need pyiceberg; install iskander[iceberg]"
        ) from error
    try:
        return load_catalog(name)
    except (ValueError, OSError, KeyError) as error:
        raise OutputError(f"{output}: cannot open catalog {name}: {error}", output=name) from error
