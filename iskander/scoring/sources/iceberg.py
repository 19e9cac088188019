"""Iceberg tables as input, at one snapshot; needs the library `pyiceberg`.

The library resolves changed schemas, partition values and deleted rows. It decodes one data file at
a time as a whole, so that the memory of a unit is that of the read columns of its largest file.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from iskander.errors import ConfigError, SourceChanged, SourceError
from iskander.scoring.job import UNIT_BYTES
from iskander.scoring.plan import Unit
from iskander.scoring.sources.base import FrozenSource
from iskander.scoring.sources.places import Stamp
from iskander.scoring.sources.reading import Piece, packed

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table

_URI = re.compile(r"iceberg://([^/@]+)/([^/@]+\.[^/@]+)(?:@(\d+))?")


class IcebergSource(FrozenSource):
    """An Iceberg table.

    Args:
        uri: `iceberg://CATALOG/NAMESPACE.TABLE`; `@SNAPSHOT` at its end selects a snapshot. The
            catalog is one of pyiceberg's configuration.
        unit_bytes: Approximate bytes of a unit; a data file is not cut.

    Raises:
        ConfigError: The library is not installed.
        SourceError: No such catalog, table or snapshot.
    """

    def __init__(self, uri: str, *, unit_bytes: int = UNIT_BYTES) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        table, wanted = _open(uri)
        current = table.current_snapshot()
        snapshot_id = wanted
        if wanted is None and current is not None:
            snapshot_id = current.snapshot_id
        try:
            scan = table.scan(snapshot_id=snapshot_id)
            # Without a chosen snapshot the columns are those of now, as the table's other readers
            # see them, and not those of the time when the last snapshot was written.
            projection = table.schema() if wanted is None else scan.projection()
            tasks = {task.file.file_path: task for task in scan.plan_files()}
        except (ValueError, OSError) as error:
            raise SourceError(f"{uri}: cannot plan the scan: {error}", input=uri) from error
        schema = schema_to_pyarrow(projection, include_field_ids=False)
        # A snapshot never changes.
        snapshot = {
            "kind": "iceberg",
            "table": str(table.metadata.table_uuid),
            "snapshot": "none" if snapshot_id is None else str(snapshot_id),
            "schema": str(projection.schema_id),
            "files": str(len(tasks)),
        }
        super().__init__(
            pa.schema([pa.field(each.name, each.type) for each in schema]),
            snapshot,
            packed([_piece(tasks[path]) for path in sorted(tasks)], unit_bytes),
            _Reader(table, projection, tasks),
        )


class _Reader:
    """Reader of the data files of a scan."""

    def __init__(self, table: Table, projection: Schema, tasks: Mapping[str, FileScanTask]) -> None:
        self._table = table
        self._projection = projection
        self._tasks = tasks

    def batches(
        self,
        unit: Unit,
        target: pa.Schema,
        needed: pa.Schema,
        expression: pc.Expression | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a unit; see `UnitReader.batches`."""
        left = unit.rows_max
        for values in unit.locator["files"]:
            path, size = values["path"], values["bytes"]
            self._check(path, size)
            for raw in self._read_file(path, needed.names):
                arrays = [_cast(raw, each) for each in needed]
                batch = pa.RecordBatch.from_arrays(arrays, schema=needed)
                if expression is not None:
                    batch = batch.filter(expression)
                batch = batch.select(target.names)
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left is not None and left <= 0:
                    break
            self._check(path, size)
            if left is not None and left <= 0:
                return

    def _read_file(self, path: str, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        fields = self._projection.select(*names)
        scan = ArrowScan(self._table.metadata, self._table.io, fields, AlwaysTrue())
        try:
            yield from scan.to_record_batches([self._tasks[path]])
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path}: cannot read: {error}", file=path) from error

    def _check(self, path: str, planned: int) -> None:
        """Check that a data file exists with its size.

        Raises:
            SourceChanged: It was deleted, for example by an expiry of snapshots.
        """
        file = self._table.io.new_input(path)
        if not file.exists():
            raise SourceChanged(f"{path}: the data file is gone since the plan", file=path)
        if len(file) != planned:
            raise SourceChanged(
                f"{path}: the data file changed since the plan: {planned:,} bytes were planned, it "
                f"has {len(file):,}",
                file=path,
            )


def _open(uri: str) -> tuple[Table, int | None]:
    match = _URI.fullmatch(uri)
    if match is None:
        raise SourceError(f"{uri}: expected iceberg://CATALOG/NAMESPACE.TABLE[@SNAPSHOT]")
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    except ImportError as error:
        raise ConfigError(
            f"{uri}: Iceberg tables need pyiceberg; install iskander[iceberg]"
        ) from error
    catalog, name, snapshot = match.groups()
    try:
        table = load_catalog(catalog).load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise SourceError(f"{uri}: catalog {catalog} has no table {name}", input=uri) from error
    except (ValueError, OSError, KeyError) as error:
        raise SourceError(f"{uri}: cannot open catalog {catalog}: {error}", input=uri) from error
    wanted = None if snapshot is None else int(snapshot)
    if wanted is not None and table.snapshot_by_id(wanted) is None:
        raise SourceError(f"{uri}: the table has no snapshot {wanted}", input=uri)
    return table, wanted


def _piece(task: FileScanTask) -> Piece:
    size = task.file.file_size_in_bytes
    # Only reading tells how many rows remain after deletes.
    rows = None if task.delete_files else task.file.record_count
    return Piece(0, task.file.file_path, Stamp(size, None, None), None, rows, size)


def _cast(batch: pa.RecordBatch, field: pa.Field) -> Any:  # noqa: ANN401
    array = batch.column(batch.schema.get_field_index(field.name))
    return array if array.type == field.type else array.cast(field.type)
