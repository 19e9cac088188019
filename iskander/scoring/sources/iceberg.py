"""Iceberg tables as input, at one snapshot; needs the library `pyiceberg`.

The library resolves changed schemas, partition values and deleted rows. It decodes one data file at
a time as a whole, so that the memory of a unit is that of the read columns of its largest file.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from iskander.errors import ConfigError
from iskander.scoring.errors import SourceChanged, SourceError
from iskander.scoring.filters import Filter
from iskander.scoring.job import UNIT_BYTES
from iskander.scoring.plan import Unit
from iskander.scoring.sources.places import Stamp
from iskander.scoring.sources.reading import (
    COUNT_ROWS,
    Piece,
    needed_columns,
    packed,
    projected,
    rebatched,
)

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

SCHEME: Final = "iceberg://"
_URI = re.compile(r"iceberg://([^/@]+)/([^/@]+\.[^/@]+)(?:@(\d+))?")


class IcebergSource:
    """An Iceberg table.

    Args:
        uri: `iceberg://CATALOG/NAMESPACE.TABLE`; `@SNAPSHOT` at its end selects a snapshot. The
            catalog is one of pyiceberg's configuration.
        unit_bytes: Approximate bytes of a unit; a data file is not cut.

    Raises:
        ConfigError: The library is not installed.
        SourceError: No such catalog, table or snapshot.
    """

    is_resumable = True

    def __init__(self, uri: str, *, unit_bytes: int = UNIT_BYTES) -> None:
        self._uri = uri
        self._table, wanted = _open(uri)
        current = self._table.current_snapshot()
        self._snapshot_id = wanted
        if wanted is None and current is not None:
            self._snapshot_id = current.snapshot_id
        self._scan = self._table.scan(snapshot_id=self._snapshot_id)
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        try:
            # Without a chosen snapshot the columns are those of now, as the table's other readers
            # see them, and not those of the time when the last snapshot was written.
            self._projection = self._table.schema() if wanted is None else self._scan.projection()
            tasks = list(self._scan.plan_files())
        except (ValueError, OSError) as error:
            raise SourceError(f"{uri}: cannot plan the scan: {error}", input=uri) from error
        self._schema = schema_to_pyarrow(self._projection, include_field_ids=False)
        self._schema = pa.schema([pa.field(each.name, each.type) for each in self._schema])
        self._tasks = {task.file.file_path: task for task in tasks}
        self._units = packed(
            [_piece(self._tasks[path]) for path in sorted(self._tasks)], unit_bytes
        )

    @property
    def schema(self) -> pa.Schema:
        """Columns of the table at the snapshot."""
        return self._schema

    @property
    def snapshot(self) -> dict[str, str]:
        """Identity of the table and of its snapshot, which never changes."""
        return {
            "kind": "iceberg",
            "table": str(self._table.metadata.table_uuid),
            "snapshot": "none" if self._snapshot_id is None else str(self._snapshot_id),
            "schema": str(self._projection.schema_id),
            "files": str(len(self._tasks)),
        }

    def units(self) -> list[Unit]:
        """Return the units in the order of the files' paths."""
        return self._units

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Count rows of a unit after the filter."""
        if filter is None and unit.rows is not None:
            return unit.rows
        columns = filter.columns if filter is not None else self._schema.names[:1]
        return sum(batch.num_rows for batch in self.read(unit, columns, filter, COUNT_ROWS))

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read a unit; see `Source.read`."""
        target = projected(self._schema, columns)
        expression = filter.expression(self._schema) if filter is not None else None
        names = needed_columns(target, filter)
        needed = pa.schema([self._schema.field(name) for name in names])
        return rebatched(self._batches(unit, target, needed, expression), batch_rows)

    def _batches(
        self, unit: Unit, target: pa.Schema, needed: pa.Schema, expression: pc.Expression | None
    ) -> Iterator[pa.RecordBatch]:
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

    def close(self) -> None:
        """Nothing stays open between units."""


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
