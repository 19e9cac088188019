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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from iskander.errors import ConfigError, IskanderError, Unsupported
from iskander.lake.job import Job
from iskander.lake.plan import JobPlan
from iskander.lake.sinks.apart import INPUT, check_apart
from iskander.lake.sinks.base import (
    StagedSink,
    appended_before_error,
    check_partitioning,
    check_same_columns,
    output_exists_error,
)
from iskander.lake.sinks.errors import OutputError
from iskander.lake.sinks.schemas import table_schema
from iskander.lake.sinks.staging import FINGERPRINT, provenance
from iskander.lake.sinks.storage import RESUMABLE, Storage, writing
from iskander.lake.sinks.writing import Layout, compression_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

ATTEMPT: Final = "iskander.attempt"
"""Property with the id of an attempt, of its snapshot and of a table that it created."""
_URI = re.compile(r"iceberg://([^/@]+)/([^/@]+\.[^/@]+)")


class IcebergSink(StagedSink):
    """An Iceberg table.

    Args:
        job: Job with the output `iceberg://CATALOG/NAMESPACE.TABLE`. The catalog is one of
            pyiceberg's configuration.
        catalog: Catalog to use; None: the catalog with the name in the output is loaded.

    Raises:
        ConfigError: The library is not installed, the URI is not valid, or the output overlaps an
            input.
        OutputError: The catalog cannot be opened.
    """

    def __init__(self, job: Job, catalog: Catalog | None = None) -> None:
        match = _URI.fullmatch(job.output)
        if match is None:
            raise ConfigError(f"{job.output}: expected iceberg://CATALOG/NAMESPACE.TABLE")
        super().__init__(job, job.output)
        self._name = match[2]
        self._catalog = catalog if catalog is not None else _catalog(job.output, match[1])
        self._compression = compression_of("parquet", job.compression)
        self._opened: Table | None = None
        self._columns: pa.Schema | None = None

    def is_complete(self, plan: JobPlan) -> bool:
        """Whether the table has a snapshot of the plan; see `Sink.is_complete`.

        Unless results are appended, it must be the current snapshot, because a later one may
        replace the results. A table without rows has no snapshot, but a property from its creation.
        """
        table = self._table()
        if table is None:
            return False
        current = table.current_snapshot()
        if self._job.overwrite == "append":
            return _has_snapshot(table, FINGERPRINT, plan.fingerprint)
        if current is None:
            return bool(table.properties.get(FINGERPRINT) == plan.fingerprint)
        return _property(current, FINGERPRINT) == plan.fingerprint

    def _is_committed(self, plan: JobPlan) -> bool:
        return _has_attempt(self._table(), self._record.values["attempt"])

    def _layout(self, plan: JobPlan, schema: pa.Schema, *, is_begun: bool) -> Layout:
        job = self._job
        self._columns = columns = table_schema(schema, format="iceberg")
        partition_by = job.partition_by
        table = self._opened = self._table()
        if not is_begun:
            self._check_table(table, plan)
        if table is not None and not (is_begun and job.overwrite == "error"):
            with _as_output_errors(job.output, "cannot open the table"):
                partition_by = _require_appendable(job, table, columns)
        return self._checked_layout(
            plan,
            columns,
            partition_by,
            compression=self._compression,
            has_partition_columns=True,
        )

    def _first_values(self) -> dict[str, Any]:
        """Delete the staged units of an earlier attempt, and choose the place of a new one."""
        earlier = self._record.peek()
        if earlier.get("state") == "prepared" and "attempt" in earlier:
            storage, path, _ = self._place(earlier)
            with writing(path, failure="cannot delete"):
                storage.remove_folder(path)
        location = self._new_location() if self._opened is None else self._opened.location()
        check_apart("output", location, [(INPUT, uri) for uri in self._job.inputs])
        return {"attempt": secrets.token_hex(8), "location": location}

    def _staging_place(self, plan: JobPlan, values: Mapping[str, Any]) -> tuple[Storage, str]:
        return self._place(values)[:2]

    def _place(self, values: Mapping[str, Any]) -> tuple[Storage, str, str]:
        """Return the storage of an attempt's files, their folder, and the prefix of their URIs."""
        from pyiceberg.io import load_file_io
        from pyiceberg.io.pyarrow import PyArrowFileIO

        location = values["location"].rstrip("/")
        folder = f"{location}/data/iskander-{values['attempt']}"
        with _as_output_errors(folder, "cannot open the filesystem"):
            if self._opened is not None:
                io = self._opened.io
            else:
                io = load_file_io(self._catalog.properties, location)
            if not isinstance(io, PyArrowFileIO):
                raise Unsupported(
                    f"{folder}: the catalog uses {type(io).__name__}; set py-io-impl to "
                    "pyiceberg.io.pyarrow.PyArrowFileIO"
                )
            scheme, netloc, path = PyArrowFileIO.parse_location(folder)
            filesystem = io.fs_by_scheme(scheme, netloc)
        assert folder.endswith(path)
        return Storage(filesystem), path, folder.removesuffix(path)

    def _check_free(self, plan: JobPlan, layout: Layout) -> None:
        self._check_table(self._table(), plan)

    def _list_files(
        self, plan: JobPlan, files: Mapping[str, int], check: Callable[[], None]
    ) -> dict[str, Any]:
        check()
        return {"files": list(files)}

    def _publish(self, plan: JobPlan) -> None:
        values = self._record.values
        table = self._table()
        if _has_attempt(table, values["attempt"]):
            return
        self._check_table(table, plan)
        _, folder, prefix = self._place(values)
        self._commit(plan, table, [f"{prefix}{folder}/{path}" for path in values["files"]])

    def _clean(self, plan: JobPlan) -> None:
        """Delete the units that were joined; all other staged files are part of the table now."""
        staging = self._ready()
        if staging.is_joined:
            for unit in plan.units:
                staging.storage.remove_folder(f"{staging.folder}/{unit.name}")

    def _table(self) -> Table | None:
        """Load the table; None if there is none.

        Raises:
            OutputError: The catalog cannot load the table.
        """
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with _as_output_errors(self._job.output, "cannot open the table"):
            try:
                return self._catalog.load_table(self._name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return None

    def _new_location(self) -> str:
        """Return the location for a table that does not exist yet."""
        with _as_output_errors(self._job.output, "cannot create the table"):
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            transaction = self._catalog.create_table_transaction(self._name, self._columns)
            return str(transaction.table_metadata.location)

    def _check_table(self, table: Table | None, plan: JobPlan) -> None:
        """Check that the table does not exist, or may be changed.

        Raises:
            OutputExists: The table exists and may not be changed.
        """
        if table is None:
            return
        if self._job.overwrite == "error":
            raise output_exists_error(self._job.output, "Iceberg table")
        if self._job.overwrite == "append" and _has_snapshot(table, FINGERPRINT, plan.fingerprint):
            raise appended_before_error(self._job.output, plan)

    def _commit(self, plan: JobPlan, table: Table | None, files: list[str]) -> None:
        from pyiceberg.expressions import AlwaysTrue

        values = self._record.values
        properties = {**provenance(plan), ATTEMPT: values["attempt"]}
        with _as_output_errors(self._job.output, "the commit failed", "run again with --resume"):
            if table is None:
                layout = self._ready().layout
                created = self._catalog.create_table_transaction(
                    self._name,
                    layout.schema,
                    location=values["location"],
                    properties={ATTEMPT: values["attempt"], FINGERPRINT: plan.fingerprint},
                )
                if layout.partition_by:
                    with created.update_spec() as spec:
                        for name in layout.partition_by:
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


@contextmanager
def _as_output_errors(output: str, failure: str, advice: str = RESUMABLE) -> Iterator[None]:
    """Convert errors of a catalog to `OutputError` during the block.

    Errors of this project are not converted.
    """
    try:
        yield
    except (IskanderError, AssertionError):
        raise
    except Exception as error:
        # Catalogs use many libraries, whose errors have no common base.
        raise OutputError(f"{output}: {failure}: {error}; {advice}", output=output) from error


def _has_files(table: Table) -> bool:
    return next(iter(table.scan().plan_files()), None) is not None


def _has_attempt(table: Table | None, attempt: str) -> bool:
    """Whether the snapshot of this attempt, or the empty table that it created, exists."""
    if table is None:
        return False
    return table.properties.get(ATTEMPT) == attempt or _has_snapshot(table, ATTEMPT, attempt)


def _has_snapshot(table: Table, name: str, value: str) -> bool:
    return any(_property(snapshot, name) == value for snapshot in table.snapshots())


def _property(snapshot: Any, name: str) -> str | None:  # noqa: ANN401
    summary = snapshot.summary
    return None if summary is None else summary.additional_properties.get(name)


def _require_appendable(job: Job, table: Table, columns: pa.Schema) -> tuple[str, ...]:
    """Require that rows with these columns can be added; return the table's partition columns.

    Raises:
        OutputExists: The columns or the partitions differ.
        Unsupported: The partitions are no columns.
    """
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.transforms import IdentityTransform

    partition_by = []
    for key in table.spec().fields:
        if not isinstance(key.transform, IdentityTransform):
            raise Unsupported(
                f"{job.output}: the table is partitioned by {key.transform}({key.name}); results "
                "are written to tables with plain partition columns only"
            )
        partition_by.append(table.schema().find_column_name(key.source_id) or key.name)
    check_partitioning(job.output, job.partition_by, partition_by)
    found = schema_to_pyarrow(table.schema(), include_field_ids=False)
    check_same_columns(job.output, table_schema(found, format="iceberg"), columns)
    return tuple(partition_by)


def _catalog(output: str, name: str) -> Catalog:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise ConfigError(
            f"{output}: Iceberg tables need pyiceberg; install iskander[iceberg]"
        ) from error
    with _as_output_errors(output, f"cannot open catalog {name}"):
        return load_catalog(name)
