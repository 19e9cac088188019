"""Packing of files into units, and reading of Parquet, CSV and Arrow IPC files.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.fs as pafs

from iskander.errors import SourceChanged, SourceError
from iskander.lake.filters import Condition, Filter
from iskander.lake.plan import Unit, make_unit
from iskander.lake.positions import Position, kept_rows
from iskander.lake.sources.parquet import read_footer, read_groups
from iskander.lake.sources.places import Stamp, check_unchanged, open_as_planned
from iskander.lake.sources.texts import NULLS, Column

UNITS_WANTED: Final = 32
"""Number of units of an input below 32 * `unit_bytes`, so that several streams have work."""
PACKED_BYTES: Final = 4 << 20
"""Smallest target size of a unit; starting a stream costs more than scoring fewer bytes."""
FILES_PER_UNIT: Final = 512
READ_BYTES: Final = 1 << 20
"""Bytes of one read of a local file."""
CSV_BLOCK_BYTES: Final = 4 << 20
"""Bytes of one block of CSV, and limit of the bytes of a row."""
COUNT_ROWS: Final = 65_536
COMPRESSIONS: Final = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

HiveValue = int | str | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A file, or a range of its row groups or record batches; units consist of pieces.

    Attributes:
        filesystem: Index of the file's filesystem in the source.
        path: Path in the filesystem.
        stamp: State of the file when it was planned.
        groups: First row group or record batch, and the one behind the last; None for a whole file.
        rows: Rows before the filter; None if they are unknown.
        bytes: Approximate bytes.
        hive: Values of columns that are not in the file.
    """

    filesystem: int
    path: str
    stamp: Stamp
    groups: tuple[int, int] | None
    rows: int | None
    bytes: int
    hive: Mapping[str, Any] = field(default_factory=dict)


def pack_units(pieces: Sequence[Piece], unit_bytes: int) -> list[Unit]:
    """Join neighboring pieces into units of about `unit_bytes`, or less for a small input.

    An input without pieces has one empty unit. The result depends only on the pieces and on
    `unit_bytes`.
    """
    target = target_bytes(sum(piece.bytes for piece in pieces), unit_bytes)
    units: list[Unit] = []
    waiting: list[Piece] = []
    waiting_bytes = 0
    for piece in pieces:
        is_full = waiting_bytes + piece.bytes > target or len(waiting) >= FILES_PER_UNIT
        if waiting and is_full:
            units.append(_unit(len(units), waiting))
            waiting, waiting_bytes = [], 0
        waiting.append(piece)
        waiting_bytes += piece.bytes
    if waiting or not units:
        units.append(_unit(len(units), waiting))
    return units


def target_bytes(total: int, unit_bytes: int) -> int:
    """Return the target bytes of a unit, with which a small input still has several units."""
    return min(unit_bytes, max(PACKED_BYTES, total // UNITS_WANTED))


def _unit(index: int, pieces: list[Piece]) -> Unit:
    files: list[dict[str, Any]] = []
    for piece in pieces:
        values = {"filesystem": piece.filesystem, "path": piece.path, **piece.stamp.to_json()}
        if piece.hive:
            values["hive"] = dict(piece.hive)
        if piece.groups is not None:
            last = files[-1] if files else {}
            is_next = last.get("path") == piece.path and "groups" in last
            if is_next and last["groups"][1] == piece.groups[0]:
                last["groups"][1] = piece.groups[1]
                continue
            values["groups"] = list(piece.groups)
        files.append(values)
    known = [piece.rows for piece in pieces if piece.rows is not None]
    rows = sum(known) if len(known) == len(pieces) else None
    return make_unit(index, {"files": files}, rows=rows, bytes=sum(each.bytes for each in pieces))


class FileReader:
    """Implements `UnitReader` for files of one format.

    Args:
        format: `parquet`, `csv` or `ipc`.
        schema: Columns of the source, including columns of hive folders.
        filesystems: Filesystems of the locators.
        is_evolved: Whether a file may lack columns, which are read as null, or have narrower types.
        int96_unit: Unit of times of the physical type INT96; None: nanoseconds.
    """

    def __init__(
        self,
        format: str,
        schema: pa.Schema,
        filesystems: Sequence[pafs.FileSystem],
        *,
        is_evolved: bool = False,
        int96_unit: str | None = None,
    ) -> None:
        self._format = format
        self._schema = schema
        self._filesystems = filesystems
        self._is_evolved = is_evolved
        self._int96_unit = int96_unit

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
            if left is not None and left <= 0:
                return
            path, stamp = values["path"], Stamp.from_json(values)
            filesystem = self._filesystems[values["filesystem"]]
            file = open_as_planned(filesystem, path, stamp)
            try:
                batches = self._batches(file, values, filesystem, needed, condition, batch_rows)
                for raw in batches:
                    batch = self._finish_batch(raw, values, target, needed, condition)
                    if left is not None:
                        batch = batch.slice(0, left)
                        left -= batch.num_rows
                    if batch.num_rows:
                        yield batch
                    if left is not None and left <= 0:
                        break
            except (pa.ArrowException, OSError) as error:
                check_unchanged(filesystem, path, stamp)
                raise SourceError(f"{path}: cannot read: {error}", file=path) from error
            finally:
                file.close()
            check_unchanged(filesystem, path, stamp)

    def locate(
        self, unit: Unit, row: int, needed: pa.Schema, condition: Condition | None
    ) -> Position | None:
        """Return the place of a row of a unit; see `UnitReader.locate`."""
        for values in unit.locator["files"]:
            path = values["path"]
            filesystem = self._filesystems[values["filesystem"]]
            with open_as_planned(filesystem, path, Stamp.from_json(values)) as file:
                first = self._first_row(file, values)
                # Without the condition no row group is left out, so that all rows are counted.
                batches = self._batches(file, values, filesystem, needed, None, COUNT_ROWS)
                for raw in batches:
                    batch = self._finish_batch(raw, values, needed, needed, None)
                    kept = kept_rows(batch, None if condition is None else condition.rows)
                    if row < len(kept):
                        return Position(path, first + kept[row].as_py())
                    row -= len(kept)
                    first += batch.num_rows
        return None

    def _first_row(self, file: pa.NativeFile, values: Mapping[str, Any]) -> int:
        """Return the number of rows of a file before the unit's part of it."""
        before = range(values.get("groups", (0, 0))[0])
        if not before:
            return 0
        if self._format == "ipc":
            return sum(batch.num_rows for batch in _read_ipc(file, before, ()))
        metadata = read_footer(file, values["path"]).metadata
        return sum(metadata.row_group(index).num_rows for index in before)

    def _batches(
        self,
        file: pa.NativeFile,
        values: Mapping[str, Any],
        filesystem: pafs.FileSystem,
        needed: pa.Schema,
        condition: Condition | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Read the columns that are in the file; the filter only leaves row groups out."""
        hive = values.get("hive", {})
        wanted = [each for each in needed if each.name not in hive]
        if self._format == "csv":
            return read_csv(file, values["path"], wanted, self._schema, hive)
        if self._format == "ipc":
            return _read_ipc(file, range(*values["groups"]), [column.name for column in wanted])
        footer = read_footer(file, values["path"])
        groups = range(*values.get("groups", (0, footer.metadata.num_row_groups)))
        present = footer.metadata.schema.to_arrow_schema().names
        if self._is_evolved:
            self._require_columns(values, present)
        names = [each.name for each in wanted if each.name in present] or present[:1]
        return read_groups(
            file,
            values["path"],
            footer,
            self._select_groups(file, groups, hive, condition),
            names,
            batch_rows=min(batch_rows, COUNT_ROWS),
            buffer_bytes=READ_BYTES if isinstance(filesystem, pafs.LocalFileSystem) else 0,
            unit=self._int96_unit,
        )

    def _require_columns(self, values: Mapping[str, Any], present: Sequence[str]) -> None:
        """Require that columns which a table's file lacks were added to the table later.

        Raises:
            SourceError: The file has none of the table's columns, or a name differs only in case.
        """
        own = [column.name for column in self._schema if column.name not in values.get("hive", {})]
        if own and not set(own) & set(present):
            raise SourceError(
                f"{values['path']}: the file has none of the table's columns {', '.join(own)}; it "
                f"has {', '.join(present)}",
                file=values["path"],
            )
        letters = {name.casefold(): name for name in present}
        for name in own:
            other = letters.get(name.casefold())
            if name not in present and other is not None:
                raise SourceError(
                    f"{values['path']}: column {name!r} is {other!r} in the file",
                    file=values["path"],
                    column=name,
                )

    def _select_groups(
        self,
        file: pa.NativeFile,
        groups: Iterable[int],
        hive: Mapping[str, Any],
        condition: Condition | None,
    ) -> list[int]:
        """Return the row groups that the filter may need, by statistics and hive values."""
        if condition is None:
            return list(groups)
        # Imported here because it imports pandas.
        import pyarrow.dataset as pads

        partition = pc.scalar(True)
        for name, value in hive.items():
            kind = self._schema.field(name).type
            one = (
                pc.field(name).is_null()
                if value is None
                else pc.field(name) == _scalar(value, kind)
            )
            partition = partition & one
        fragment = pads.ParquetFileFormat().make_fragment(
            file, partition_expression=partition, row_groups=list(groups)
        )
        try:
            subset = fragment.subset(condition.ranges, schema=self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            # Statistics only save reads: all rows are filtered after reading.
            return list(groups)
        return [group.id for group in subset.row_groups]

    def _finish_batch(
        self,
        raw: pa.RecordBatch,
        values: Mapping[str, Any],
        target: pa.Schema,
        needed: pa.Schema,
        condition: Condition | None,
    ) -> pa.RecordBatch:
        """Add the columns of hive folders, filter the rows and select the columns."""
        hive = values.get("hive", {})
        arrays = []
        for column in needed:
            index = raw.schema.get_field_index(column.name)
            if column.name in hive:
                arrays.append(_repeat(hive[column.name], column.type, raw.num_rows))
            elif index >= 0:
                array = raw.column(index)
                arrays.append(array if array.type == column.type else array.cast(column.type))
            elif self._is_evolved:
                arrays.append(pa.nulls(raw.num_rows, column.type))
            else:
                raise SourceChanged(f"{values['path']}: column {column.name!r} is gone")
        batch = pa.RecordBatch.from_arrays(arrays, schema=needed)
        if condition is not None:
            batch = batch.filter(condition.rows)
        return batch.select(target.names)


def _read_ipc(
    file: pa.NativeFile, groups: Iterable[int], names: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    schema = pa.ipc.open_file(file).schema
    fields = [schema.get_field_index(name) for name in names] or [0]
    file.seek(0)
    options = pa.ipc.IpcReadOptions(included_fields=sorted(fields))
    reader = pa.ipc.open_file(file, options=options)
    for index in groups:
        batch = reader.get_batch(index)
        # Offsets in a damaged file could point outside of its buffers.
        batch.validate()
        yield batch


def read_csv(
    file: pa.NativeFile,
    path: str,
    wanted: Sequence[pa.Field],
    schema: pa.Schema,
    hive: Mapping[str, Any],
) -> Iterator[pa.RecordBatch]:
    """Read columns of a CSV file with the types of the source."""
    if file.size() == 0:
        return
    names = [each.name for each in wanted]
    if not names:
        names = [name for name in schema.names if name not in hive][:1]
    types = {column.name: column.type for column in schema if column.name in names}
    with open_csv(file, path, types, names) as reader:
        yield from reader


def open_csv(
    file: pa.NativeFile,
    path: str,
    types: Mapping[str, pa.DataType],
    columns: Sequence[str] | None,
) -> pyarrow.csv.CSVStreamingReader:
    """Open a CSV file, which may be compressed; quoted values may contain line ends."""
    codec = next((name for end, name in COMPRESSIONS.items() if path.lower().endswith(end)), None)
    return pyarrow.csv.open_csv(
        file if codec is None else pa.CompressedInputStream(file, codec),
        read_options=pyarrow.csv.ReadOptions(block_size=CSV_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types=dict(types),
            include_columns=list(columns) if columns else None,
            null_values=list(NULLS),
        ),
    )


def decimals(format: str, schema: pa.Schema, hive: Iterable[str]) -> frozenset[str]:
    """Return the columns whose floating-point numbers are decimal text in files or folders."""
    texts = set(schema.names) if format == "csv" else set(hive)
    return frozenset(
        column.name for column in schema if column.name in texts and column.type == pa.float64()
    )


def csv_names(file: pa.NativeFile, path: str) -> list[str]:
    """Return the names of the columns of a CSV file.

    `file` cannot be used afterwards, because the reader may still read from it.
    """
    with open_csv(file, path, {}, None) as reader:
        return list(reader.schema.names)


def scan_csv(
    file: pa.NativeFile, path: str, names: Sequence[str], wanted: Mapping[str, pa.DataType]
) -> tuple[list[Column], int]:
    """Read a CSV file as text, for the types of its columns and its number of rows.

    Args:
        file: The file, which nothing else reads.
        path: Path of the file.
        names: Names of the columns.
        wanted: Types of the columns that a model reads.

    Raises:
        SourceError: A value of these columns has not the wanted type.
    """
    columns = [Column(name, wanted.get(name)) for name in names]
    rows = 0
    with open_csv(file, path, dict.fromkeys(names, pa.binary()), None) as reader:
        for batch in reader:
            for column, values in zip(columns, batch.columns, strict=True):
                column.add(values, path, rows)
            rows += batch.num_rows
    return columns, rows


def select_fields(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """Return the fields of the named columns, in the order of `columns`; all fields for None.

    Raises:
        SourceError: A column is missing, or the input has two columns of this name.
    """
    names = schema.names if columns is None else list(columns)
    fields = []
    for name in names:
        indices = schema.get_all_field_indices(name)
        if len(indices) > 1:
            raise SourceError(f"the input has {len(indices)} columns {name!r}", column=name)
        if not indices:
            near = difflib.get_close_matches(name, schema.names, n=1)
            hint = f"; the nearest name is {near[0]!r}" if near else ""
            raise SourceError(f"the input has no column {name!r}{hint}", column=name)
        fields.append(schema.field(indices[0]))
    return pa.schema(fields)


def needed_columns(target: pa.Schema, filter: Filter | None) -> list[str]:
    """Return the names of the columns to read: columns of the target and of the filter."""
    extra = filter.columns if filter is not None else ()
    return list(dict.fromkeys([*target.names, *extra]))


def rebatch(batches: Iterator[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Cut and join batches to `batch_rows` rows; only the last batch may be shorter."""
    waiting: list[pa.RecordBatch] = []
    count = 0
    for batch in batches:
        offset = 0
        while offset < batch.num_rows:
            part = batch.slice(offset, batch_rows - count)
            offset += part.num_rows
            waiting.append(part)
            count += part.num_rows
            if count == batch_rows:
                yield _join(waiting)
                waiting, count = [], 0
    if waiting:
        yield _join(waiting)


def _join(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


def _scalar(value: HiveValue, kind: pa.DataType) -> pa.Scalar:
    return pa.scalar(str(value)).cast(kind) if value is not None else pa.scalar(None, kind)


def _repeat(value: HiveValue, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.repeat(_scalar(value, kind), rows)
