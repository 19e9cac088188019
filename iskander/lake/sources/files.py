"""Files as input: Parquet, CSV and Arrow IPC, locally and in object stores.

Planning opens every file once: for its schema, its state, and the row groups of Parquet. It reads
CSV files as a whole, because all values decide about the types of their columns. All files of a job
have one format and one schema. A unit joins small files; large files are cut between row groups
(Parquet) or record batches (Arrow IPC).

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from iskander.arrow.empty_unions import column_with_empty_union
from iskander.errors import SourceError
from iskander.lake.job import UNIT_BYTES
from iskander.lake.plan import canonical
from iskander.lake.sources.base import FrozenSource
from iskander.lake.sources.parquet import read_footer
from iskander.lake.sources.places import (
    FILES_MAX,
    Place,
    Stamp,
    expand,
    locate,
    open_as_planned,
    open_file,
    unquoted,
)
from iskander.lake.sources.reading import (
    COMPRESSIONS,
    FileReader,
    HiveValue,
    Piece,
    csv_names,
    decimals,
    pack_units,
    scan_csv,
)
from iskander.lake.sources.tables import COMMAND, Advice, Tables
from iskander.lake.sources.texts import HIVE, Column

FORMATS: Final = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".arrow": "ipc",
    ".ipc": "ipc",
    ".feather": "ipc",
    **{f".csv{end}": "csv" for end in COMPRESSIONS},
}
MAGIC: Final = {b"PAR1": "parquet", b"ARROW1": "ipc"}
HIVE_NULL: Final = "__HIVE_DEFAULT_PARTITION__"
COUNTED_BATCHES_MAX: Final = 4096
"""Limit of the record batches of an Arrow IPC file whose rows are counted for the plan."""
_THREADS = 16
_CSV_THREADS = 4
_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """A file of the input, as listed; it was not opened yet.

    Attributes:
        filesystem: Index of the filesystem in the inputs.
        path: Path in the filesystem.
        hive: Values of its hive folders by column.
    """

    filesystem: int
    path: str
    hive: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _OpenedFile:
    """What opening a file shows.

    Attributes:
        stamp: State of the file.
        schema: Columns; in CSV files all are strings. None for an empty CSV file.
        groups: Rows and bytes of each row group or record batch; None for CSV.
        columns: Columns of a CSV file, with the types that their values fit.
        rows: Rows of a CSV file.
    """

    stamp: Stamp
    schema: pa.Schema | None
    groups: list[tuple[int | None, int]] | None
    columns: Sequence[Column] = ()
    rows: int | None = None


class FileSource(FrozenSource):
    """Files, globs and folders.

    Args:
        inputs: Paths, URIs or places. Rows are in the order of the inputs, and within an input in
            the order of the files' paths.
        unit_bytes: Approximate bytes of a unit.
        types: Types that a model wants for columns of CSV files and hive folders.
        plain_files: Read files of a table, such as a Delta table, as plain files; otherwise such
            files are an error.
        advice: What the error about files of a table recommends.

    Raises:
        SourceError: No files, files of a table, mixed formats, different schemas, or a damaged
            file.
    """

    def __init__(
        self,
        inputs: Sequence[str | Place],
        *,
        unit_bytes: int = UNIT_BYTES,
        types: Mapping[str, pa.DataType] | None = None,
        plain_files: bool = False,
        advice: Advice = COMMAND,
    ) -> None:
        places = [locate(given) if isinstance(given, str) else given for given in inputs]
        found, root_count = _list_files(places, None if plain_files else Tables(advice))
        filesystems = [place.filesystem for place in places]
        format = _common_format(found, filesystems)
        wanted = dict(types or {})
        files = _open_all(found, filesystems, format, wanted)
        schema = _common_schema(found, files)
        if format == "csv":
            schema = _csv_schema(schema, found, files)
        hive_types = _hive_types(found, schema, wanted) if root_count else {}
        for name, kind in hive_types.items():
            schema = schema.append(pa.field(name, kind))
        pieces = [
            piece
            for each, file in zip(found, files, strict=True)
            for piece in _pieces(each, file, hive_types)
        ]
        super().__init__(
            schema,
            _snapshot(format, found, files, schema),
            pack_units(pieces, unit_bytes),
            FileReader(format, schema, filesystems),
            decimals=decimals(format, schema, hive_types),
        )


def _list_files(places: Sequence[Place], tables: Tables | None) -> tuple[list[_ListedFile], int]:
    """Return the files of all inputs, and the number of inputs with hive folders."""
    found: list[_ListedFile] = []
    seen: set[tuple[str, str]] = set()
    hive_inputs = 0
    for index, place in enumerate(places):
        infos, root = expand(place, None if tables is None else tables.note)
        if tables is not None:
            tables.require_plain(place, (info.path for info in infos))
        for info in infos:
            key = (place.prefix, info.path)
            if key in seen:
                raise SourceError(
                    f"{info.path}: two inputs contain this file; its rows would be scored twice",
                    file=info.path,
                )
            seen.add(key)
            hive = {} if root is None else _hive_values(info.path[len(root) :])
            found.append(_ListedFile(index, info.path, hive))
        hive_inputs += any(listed.hive for listed in found[-len(infos) :])
    if len(found) > FILES_MAX:
        raise SourceError(f"{len(found):,} files; a job reads at most {FILES_MAX:,}")
    return found, hive_inputs


def _hive_values(path: str) -> dict[str, str | None]:
    """Return the values of the folders `name=value` of a path, by name."""
    values: dict[str, str | None] = {}
    for folder in path.split("/")[:-1]:
        name, mark, text = folder.partition("=")
        if mark and name:
            value = unquoted(text)
            values[unquoted(name)] = None if value == HIVE_NULL else value
    return values


def _common_format(found: Sequence[_ListedFile], filesystems: Sequence[pafs.FileSystem]) -> str:
    first: tuple[str, str] | None = None
    for listed in found:
        format = _format(listed, filesystems[listed.filesystem])
        if first is None:
            first = (format, listed.path)
        elif format != first[0]:
            raise SourceError(
                f"{listed.path} is a file of format {format}, {first[1]} of format {first[0]}; "
                "a job reads one format",
                file=listed.path,
            )
    assert first is not None
    return first[0]


def _format(file: _ListedFile, filesystem: pafs.FileSystem) -> str:
    """Return the format of a file: by the end of its name, or else by its first bytes."""
    name = file.path.rpartition("/")[2].lower()
    for end, format in FORMATS.items():
        if name.endswith(end):
            return format
    handle, _ = open_file(filesystem, file.path)
    with handle:
        start = handle.read(8)
    for magic, format in MAGIC.items():
        if start.startswith(magic):
            return format
    raise SourceError(
        f"{file.path}: not a Parquet, CSV or Arrow IPC file; use a glob to select files by name "
        f"({', '.join(FORMATS)})",
        file=file.path,
    )


def _open_all(
    found: Sequence[_ListedFile],
    filesystems: Sequence[pafs.FileSystem],
    format: str,
    types: Mapping[str, pa.DataType],
) -> list[_OpenedFile]:
    """Open the files on a few threads; files with equal schemas share one schema object."""
    schemas: list[pa.Schema] = []

    def with_shared_schema(file: _OpenedFile) -> _OpenedFile:
        if file.schema is None:
            return file
        for schema in schemas:
            if file.schema.equals(schema):
                return replace(file, schema=schema)
        if len(schemas) < _THREADS:
            schemas.append(file.schema)
        return file

    def opened_one(each: _ListedFile) -> _OpenedFile:
        return _open(each.path, filesystems[each.filesystem], format, types)

    files: list[_OpenedFile] = []
    # CSV files are read as a whole, and every open file has blocks in memory.
    threads = _CSV_THREADS if format == "csv" else _THREADS
    with ThreadPoolExecutor(threads, "plan") as executor:
        for start in range(0, len(found), _CHUNK):
            files += map(
                with_shared_schema, executor.map(opened_one, found[start : start + _CHUNK])
            )
    return files


def _open(
    path: str, filesystem: pafs.FileSystem, format: str, types: Mapping[str, pa.DataType]
) -> _OpenedFile:
    handle, stamp = open_file(filesystem, path)
    with handle:
        try:
            if format == "parquet":
                return _open_parquet(handle, path, stamp)
            if format == "ipc":
                return _open_ipc(handle, stamp)
            if stamp.bytes == 0:
                return _OpenedFile(stamp, None, None)
            names = csv_names(handle, path)
            second = open_as_planned(filesystem, path, stamp)
            with second:
                columns, rows = scan_csv(second, path, names, types)
            schema = pa.schema([pa.field(name, pa.string()) for name in names])
            return _OpenedFile(stamp, schema, None, columns, rows)
        except (pa.ArrowException, OSError) as error:
            detail = "the file is empty" if stamp.bytes == 0 else str(error)
            raise SourceError(f"{path}: not a valid {format} file: {detail}", file=path) from error


def _open_parquet(handle: pa.NativeFile, path: str, stamp: Stamp) -> _OpenedFile:
    metadata = read_footer(handle, path).metadata
    groups: list[tuple[int | None, int]] = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        groups.append((group.num_rows, group.total_byte_size))
    # The metadata has sizes before compression; a group's share of the compressed file is similar.
    total = sum(count for _, count in groups)
    scale = stamp.bytes / total if total else 0.0
    scaled = [(rows, int(count * scale)) for rows, count in groups]
    return _OpenedFile(stamp, _without_metadata(metadata.schema.to_arrow_schema()), scaled)


def _open_ipc(handle: pa.NativeFile, stamp: Stamp) -> _OpenedFile:
    reader = pa.ipc.open_file(handle)
    schema, count = reader.schema, reader.num_record_batches
    if column := column_with_empty_union(schema):
        raise pa.ArrowInvalid(f"column {column!r} has a union without fields")
    if not schema.names or count > COUNTED_BATCHES_MAX:
        rows: list[int | None] = [None] * count
    else:
        # Counting reads the smallest column only.
        handle.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=[_smallest_column(schema)])
        reader = pa.ipc.open_file(handle, options=options)
        rows = [reader.get_batch(index).num_rows for index in range(count)]
    return _OpenedFile(
        stamp,
        _without_metadata(schema),
        [(batch_rows, stamp.bytes // count) for batch_rows in rows],
    )


def _smallest_column(schema: pa.Schema) -> int:
    """Return the index of the column with the fewest bytes to read."""
    widths = [_value_bits(field.type) for field in schema]
    return widths.index(min(widths))


def _value_bits(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:
        return 1 << 20


def _without_metadata(schema: pa.Schema) -> pa.Schema:
    """Return the names and types of a schema, without metadata, all columns nullable."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _common_schema(found: Sequence[_ListedFile], files: Sequence[_OpenedFile]) -> pa.Schema:
    """Return the schema that all files have; columns of CSV files may differ in order.

    Raises:
        SourceError: A file has columns or types that differ from the first file.
    """
    first = first_path = None
    seen: list[pa.Schema] = []
    for each, file in zip(found, files, strict=True):
        if file.schema is None:
            continue
        if first is None or first_path is None:
            first, first_path = file.schema, each.path
        elif not any(file.schema is other for other in seen):
            _require_equal(first, first_path, file.schema, each.path)
        if len(seen) < _THREADS:
            seen.append(file.schema)
    if first is None or not first.names:
        raise SourceError(f"{found[0].path}: the input has no columns", file=found[0].path)
    return first


def _require_equal(first: pa.Schema, first_path: str, other: pa.Schema, path: str) -> None:
    if other.equals(first):
        return
    if len(set(first.names)) != len(first.names):
        # Two columns with the same name can be told apart by position only.
        pairs = [(each, kind) for each, kind in zip(first, other, strict=False) if each != kind]
        column = pairs[0][0].name if pairs else first.names[-1]
        raise SourceError(
            f"{path}: columns differ from {first_path}, which has two columns of one name, "
            f"first at {column!r}",
            file=path,
            column=column,
        )
    for name in dict.fromkeys([*first.names, *other.names]):
        expected, got = _type_text(first, name), _type_text(other, name)
        if expected != got:
            raise SourceError(
                f"{path}: column {name!r} is {got}, but {expected} in {first_path}; "
                "all files of a job have one schema",
                file=path,
                column=name,
                expected=expected,
                got=got,
            )


def _type_text(schema: pa.Schema, name: str) -> str:
    indices = schema.get_all_field_indices(name)
    return " and ".join(str(schema.field(index).type) for index in indices) or "absent"


def _csv_schema(
    schema: pa.Schema, found: Sequence[_ListedFile], files: Sequence[_OpenedFile]
) -> pa.Schema:
    """Return the types of CSV columns, which fit the values of all files.

    Raises:
        SourceError: A column that a model reads has values of two types.
    """
    joined: list[Column] = []
    first_path = ""
    for each, file in zip(found, files, strict=True):
        if not joined:
            joined, first_path = list(file.columns), each.path
            continue
        is_same_order = [column.name for column in file.columns] == schema.names
        by_name = {column.name: column for column in file.columns}
        for index, column in enumerate(joined):
            if file.columns:
                other = file.columns[index] if is_same_order else by_name[column.name]
                column.join(other, each.path, first_path)
    return pa.schema([pa.field(each.name, each.type) for each in joined])


def _hive_types(
    found: Sequence[_ListedFile], schema: pa.Schema, wanted: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """Return the types of hive columns: int64 if all values are canonical integers, else string.

    A column that a model reads has the kind of type that the model wants. A column that the files
    contain too is read from the files, and is left out here.

    Raises:
        SourceError: The hive columns of a file differ from those of the first file, or a value has
            not the wanted type.
    """
    names = tuple(found[0].hive)
    columns = {
        name: Column(name, wanted.get(name), HIVE) for name in names if name not in schema.names
    }
    seen: dict[str, set[str | None]] = {name: {None} for name in columns}
    for listed in found:
        if set(listed.hive) != set(names):
            raise SourceError(
                f"{listed.path}: its folders have the columns {', '.join(listed.hive) or 'none'}, "
                f"but those of {found[0].path} have {', '.join(names) or 'none'}",
                file=listed.path,
            )
        for name, column in columns.items():
            value = listed.hive[name]
            if value not in seen[name]:
                seen[name].add(value)
                assert value is not None
                column.add(pa.array([value.encode()]), listed.path, None)
    return {name: column.type for name, column in columns.items()}


def _pieces(
    found: _ListedFile, file: _OpenedFile, hive_types: Mapping[str, pa.DataType]
) -> Iterator[Piece]:
    hive: dict[str, HiveValue] = {}
    for name, kind in hive_types.items():
        value = found.hive[name]
        is_number = value is not None and pa.types.is_integer(kind)
        hive[name] = int(value) if is_number and value is not None else value
    where = (found.filesystem, found.path, file.stamp)
    if file.groups is None:
        rows = 0 if file.stamp.bytes == 0 else file.rows
        yield Piece(*where, None, rows, file.stamp.bytes, hive)
    elif not file.groups:
        yield Piece(*where, (0, 0), 0, 0, hive)
    else:
        for index, (count, size) in enumerate(file.groups):
            yield Piece(*where, (index, index + 1), count, size, hive)


def _snapshot(
    format: str, found: Sequence[_ListedFile], files: Sequence[_OpenedFile], schema: pa.Schema
) -> dict[str, str]:
    digest = hashlib.sha256(schema.serialize())
    for each, file in zip(found, files, strict=True):
        state: dict[str, Any] = {"path": each.path, **file.stamp.to_json()}
        digest.update(canonical(state))
    return {
        "kind": "files",
        "format": format,
        "files": str(len(files)),
        "bytes": str(sum(file.stamp.bytes for file in files)),
        "sha256": digest.hexdigest(),
    }
