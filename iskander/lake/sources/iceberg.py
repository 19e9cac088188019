"""Iceberg tables as input, at one snapshot; needs the library `pyiceberg`.

The library resolves changed schemas, partition values and deleted rows. It decodes a data file as a
whole, one file at a time, so a unit needs memory for the read columns of its largest file.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pyarrow as pa

from iskander.errors import ConfigError, SourceChanged, SourceError, Unsupported
from iskander.lake.filters import Condition
from iskander.lake.job import UNIT_BYTES
from iskander.lake.plan import Unit
from iskander.lake.positions import Position, kept_rows
from iskander.lake.sources.base import FrozenSource
from iskander.lake.sources.parquet import Footer, read_footer, require_known_dates
from iskander.lake.sources.places import Stamp
from iskander.lake.sources.reading import Piece, pack_units

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table

FORMAT_VERSIONS: Final = (1, 2)
FILE_FORMATS: Final = ("PARQUET",)
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
        Unsupported: The table has a feature that is not known to be read right.
    """

    def __init__(self, uri: str, *, unit_bytes: int = UNIT_BYTES) -> None:
        from pyiceberg.io.pyarrow import schema_to_pyarrow

        table, wanted = _open(uri)
        _require_supported_table(uri, table)
        current = table.current_snapshot()
        snapshot_id = wanted
        if wanted is None and current is not None:
            snapshot_id = current.snapshot_id
        try:
            scan = table.scan(snapshot_id=snapshot_id)
            # Without a chosen snapshot the table's current columns are read, as other readers do,
            # and not the columns of the time when the last snapshot was written.
            projection = table.schema() if wanted is None else scan.projection()
            tasks = {task.file.file_path: task for task in scan.plan_files()}
        except ValueError as error:
            if "equality deletes" in str(error):
                _reject(uri, "it has equality deletes")
            raise SourceError(f"{uri}: cannot plan the scan: {error}", input=uri) from error
        except OSError as error:
            raise SourceError(f"{uri}: cannot plan the scan: {error}", input=uri) from error
        _require_supported_columns(uri, projection)
        for task in tasks.values():
            _require_supported_files(uri, task)
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
            pa.schema([pa.field(field.name, field.type) for field in schema]),
            snapshot,
            pack_units([_piece(tasks[path]) for path in sorted(tasks)], unit_bytes),
            _Reader(table, projection, tasks),
        )


class _Reader:
    """Implements `UnitReader` for the data files of a scan."""

    def __init__(self, table: Table, projection: Schema, tasks: Mapping[str, FileScanTask]) -> None:
        self._table = table
        self._projection = projection
        self._tasks = tasks

    def batches(
        self,
        unit: Unit,
        target: pa.Schema,
        needed: pa.Schema,
        condition: Condition | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a unit; see `UnitReader.batches`."""
        left = unit.rows_max
        for values in unit.locator["files"]:
            path, size = values["path"], values["bytes"]
            self._require_unchanged(path, size)
            for raw in self._read_file(path, needed.names):
                arrays = [_cast(raw, field) for field in needed]
                batch = pa.RecordBatch.from_arrays(arrays, schema=needed)
                if condition is not None:
                    batch = batch.filter(condition.rows)
                batch = batch.select(target.names)
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left is not None and left <= 0:
                    break
            self._require_unchanged(path, size)
            if left is not None and left <= 0:
                return

    def locate(
        self, unit: Unit, row: int, needed: pa.Schema, condition: Condition | None
    ) -> Position | None:
        """Return the place of a row of a unit; the row number is unknown in a file with deletes."""
        for values in unit.locator["files"]:
            path, first = values["path"], 0
            for raw in self._read_file(path, needed.names):
                arrays = [_cast(raw, field) for field in needed]
                batch = pa.RecordBatch.from_arrays(arrays, schema=needed)
                kept = kept_rows(batch, None if condition is None else condition.rows)
                if row < len(kept):
                    has_deletes = bool(self._tasks[path].delete_files)
                    return Position(path, None if has_deletes else first + kept[row].as_py())
                row -= len(kept)
                first += batch.num_rows
        return None

    def _read_file(self, path: str, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from pyiceberg.exceptions import ResolveError
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        fields = self._projection.select(*names)
        scan = ArrowScan(self._table.metadata, self._table.io, fields, AlwaysTrue())
        try:
            footer = self._footer(path, has_times=_has_times(fields))
            for batch in scan.to_record_batches([self._tasks[path]]):
                require_known_dates(path, batch, footer)
                yield batch
        except (pa.ArrowException, OSError, ValueError, ResolveError) as error:
            raise SourceError(f"{path}: cannot read: {error}", file=path) from error

    def _footer(self, path: str, *, has_times: bool) -> Footer:
        """Read the footer of a file; reject a file that the library would misread.

        Raises:
            SourceError: The file has a feature that would be misread.
        """
        with self._table.io.new_input(path).open() as opened:
            file = opened if isinstance(opened, pa.NativeFile) else pa.PythonFile(opened)
            footer = read_footer(file, path)
        if footer.int96 and has_times:
            raise SourceError(
                f"{path}: columns {', '.join(footer.int96)} have times of the type INT96, which "
                "the library reads right for the years 1677 to 2262 only; write the file again "
                "with TIMESTAMP_MICROS",
                file=path,
            )
        return footer

    def _require_unchanged(self, path: str, planned: int) -> None:
        """Check that a data file exists and has its planned size.

        Raises:
            SourceChanged: The file was changed or deleted, for example by an expiry of snapshots.
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
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, ValidationError
    except ImportError as error:
        raise ConfigError(
            f"{uri}: Iceberg tables need pyiceberg; install iskander[iceberg]"
        ) from error
    catalog, name, snapshot = match.groups()
    try:
        table = load_catalog(catalog).load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise SourceError(f"{uri}: catalog {catalog} has no table {name}", input=uri) from error
    except (ValueError, OSError, KeyError, ValidationError) as error:
        raise SourceError(f"{uri}: cannot open catalog {catalog}: {error}", input=uri) from error
    wanted = None if snapshot is None else int(snapshot)
    if wanted is not None and table.snapshot_by_id(wanted) is None:
        raise SourceError(f"{uri}: the table has no snapshot {wanted}", input=uri)
    return table, wanted


def _require_supported_table(uri: str, table: Table) -> None:
    if table.format_version not in FORMAT_VERSIONS:
        _reject(uri, f"it has format version {table.format_version}")


def _require_supported_columns(uri: str, schema: Schema) -> None:
    """Require that no column, or field of a nested column, has a default value."""
    from pyiceberg.schema import index_by_id

    for field in index_by_id(schema).values():
        if field.initial_default is not None:
            _reject(uri, f"column {field.name!r} has a default value for earlier rows")


def _has_times(schema: Schema) -> bool:
    from pyiceberg.schema import index_by_id
    from pyiceberg.types import TimestampType, TimestamptzType

    kinds = [field.field_type for field in index_by_id(schema).values()]
    return any(isinstance(kind, TimestampType | TimestamptzType) for kind in kinds)


def _require_supported_files(uri: str, task: FileScanTask) -> None:
    """Require that files of data and of deleted positions are unencrypted Parquet files."""
    for file in (task.file, *task.delete_files):
        if file.file_format.name not in FILE_FORMATS:
            _reject(uri, f"{file.file_path} has the format {file.file_format.name}")
        if file.key_metadata:
            _reject(uri, f"{file.file_path} is encrypted")


def _reject(uri: str, reason: str) -> NoReturn:
    raise Unsupported(
        f"{uri}: Iceberg table that cannot be read right: {reason}; supported are the format "
        f"versions {FORMAT_VERSIONS[0]} to {FORMAT_VERSIONS[-1]}, Parquet files, and deletes by "
        "position. Rewrite the table without it, or send its rows from another library to the "
        "input `-`",
        input=uri,
    )


def _piece(task: FileScanTask) -> Piece:
    size = task.file.file_size_in_bytes
    # The number of rows after deletes is unknown before reading.
    rows = None if task.delete_files else task.file.record_count
    return Piece(0, task.file.file_path, Stamp(size, None, None), None, rows, size)


def _cast(batch: pa.RecordBatch, field: pa.Field) -> Any:  # noqa: ANN401
    array = batch.column(batch.schema.get_field_index(field.name))
    return array if array.type == field.type else array.cast(field.type)
