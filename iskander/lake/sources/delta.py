"""Delta tables as input, at one version; needs the library `deltalake`.

The table's log names the data files and the values of partition columns. A data file is read like a
plain Parquet file. Data files of a version never change, so their sizes identify them.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs as pafs

from iskander.errors import ConfigError, SourceError, Unsupported
from iskander.lake.job import UNIT_BYTES
from iskander.lake.plan import canonical
from iskander.lake.sources.base import FrozenSource
from iskander.lake.sources.parquet import read_footer
from iskander.lake.sources.places import Stamp, open_as_planned
from iskander.lake.sources.reading import FileReader, Piece, pack_units, target_bytes

if TYPE_CHECKING:
    from deltalake import DeltaTable

SCHEME: Final = "delta://"
READER_VERSIONS: Final = (1, 2, 3)
READER_FEATURES: Final = frozenset({"timestampNtz"})
"""Features that tests show to be read right. The library opens tables with other features too."""
TIMESTAMP_UNIT: Final = "us"
"""Unit of timestamps in the Delta protocol."""
COLUMN_MAPPING: Final = "delta.columnMapping.mode"
_ELSEWHERE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:")
_VERSION = re.compile(r"(.*)@v(\d+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _DataFile:
    path: str
    bytes: int
    rows: int | None
    partition: Mapping[str, str | None]


class DeltaSource(FrozenSource):
    """A Delta table.

    Args:
        uri: `delta://PATH`, `delta://s3://...`, or a folder with a transaction log; `@vN` at its
            end selects a version.
        unit_bytes: Approximate bytes of a unit.

    Raises:
        ConfigError: The library is not installed.
        SourceError: No table, no such version, or a data file that cannot be read.
        Unsupported: The table needs a reader version or a reader feature that is not in
            `READER_VERSIONS` or `READER_FEATURES`, or it maps its columns.
    """

    def __init__(self, uri: str, *, unit_bytes: int = UNIT_BYTES) -> None:
        table, dataset = _open(uri)
        filesystem: pafs.FileSystem = dataset.filesystem
        schema = pa.schema([pa.field(field.name, field.type) for field in dataset.schema])
        files = _data_files(table)
        _require_own_files(uri, files)
        target = target_bytes(sum(file.bytes for file in files), unit_bytes)
        pieces = [piece for each in files for piece in _pieces(each, filesystem, target)]
        digest = hashlib.sha256(schema.serialize())
        for each in files:
            digest.update(canonical({"path": each.path, "bytes": each.bytes}))
        snapshot = {
            "kind": "delta",
            "table": str(table.metadata().id),
            "version": str(table.version()),
            "files": str(len(files)),
            "sha256": digest.hexdigest(),
        }
        reader = FileReader(
            "parquet", schema, [filesystem], is_evolved=True, int96_unit=TIMESTAMP_UNIT
        )
        super().__init__(schema, snapshot, pack_units(pieces, unit_bytes), reader)


def _open(uri: str) -> tuple[DeltaTable, Any]:
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, DeltaProtocolError
    except ImportError as error:
        raise ConfigError(f"{uri}: Delta tables need deltalake; install iskander[delta]") from error
    path = uri.removeprefix(SCHEME)
    match = _VERSION.fullmatch(path)
    version = int(match[2]) if match else None
    try:
        table = DeltaTable(match[1] if match else path, version=version)
        _require_supported(uri, table)
        return table, table.to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise Unsupported(
            f"{uri}: {error}; rewrite the table without this feature, or export it to Parquet"
        ) from error
    except (DeltaError, OSError, ValueError) as error:
        raise SourceError(f"{uri}: cannot open the Delta table: {error}", input=uri) from error


def _require_supported(uri: str, table: DeltaTable) -> None:
    """Require a table whose protocol is supported; the library does not check all of it.

    Raises:
        Unsupported: The protocol is not supported.
    """
    protocol = table.protocol()
    features = set(protocol.reader_features or ())
    mode = table.metadata().configuration.get(COLUMN_MAPPING) or "none"
    if protocol.min_reader_version not in READER_VERSIONS:
        reason = f"it needs reader version {protocol.min_reader_version}"
    elif unknown := sorted(features - READER_FEATURES):
        reason = f"it has the reader features {', '.join(unknown)}"
    elif mode != "none":
        reason = f"it maps its columns ({COLUMN_MAPPING} = {mode})"
    else:
        return
    raise Unsupported(
        f"{uri}: Delta table that cannot be read right: {reason}; supported are the reader "
        f"versions {READER_VERSIONS[0]} to {READER_VERSIONS[-1]} without column mapping, and the "
        f"reader features {', '.join(sorted(READER_FEATURES))}. Rewrite the table without it, or "
        "send its rows from another library to the input `-`",
        input=uri,
        reader_version=protocol.min_reader_version,
        reader_features=" ".join(sorted(features)),
        column_mapping=mode,
    )


def _require_own_files(uri: str, files: Sequence[_DataFile]) -> None:
    """Require files below the table's folder, whose paths are relative."""
    for file in files:
        if _ELSEWHERE.match(file.path):
            raise Unsupported(
                f"{uri}: Delta table that cannot be read: its file {file.path} is outside of the "
                "table's folder, as in a shallow clone; make a deep clone",
                input=uri,
            )


def _data_files(table: DeltaTable) -> list[_DataFile]:
    """Read the data files from the log, sorted by path."""
    actions = pa.table(table.get_add_actions(flatten=True))
    names = list(table.metadata().partition_columns)
    partitions: dict[str, list[str | None]] = {}
    for name in names:
        column = actions.column(f"partition.{name}")
        partitions[name] = column.cast(pa.string()).to_pylist()
    rows = (
        actions.column("num_records").to_pylist()
        if "num_records" in actions.column_names
        else [None] * actions.num_rows
    )
    files = [
        # Paths in the log are URIs.
        _DataFile(
            urllib.parse.unquote(path),
            size,
            rows[index],
            {name: partitions[name][index] for name in names},
        )
        for index, (path, size) in enumerate(
            zip(
                actions.column("path").to_pylist(),
                actions.column("size_bytes").to_pylist(),
                strict=True,
            )
        )
    ]
    return sorted(files, key=lambda each: each.path)


def _pieces(file: _DataFile, filesystem: pafs.FileSystem, target: int) -> Iterator[Piece]:
    """Yield a file as one piece, or as its row groups if it is larger than the target.

    Only larger files are opened.
    """
    stamp = Stamp(file.bytes, None, None)
    if file.bytes <= target:
        yield Piece(0, file.path, stamp, None, file.rows, file.bytes, file.partition)
        return
    with open_as_planned(filesystem, file.path, stamp) as handle:
        try:
            metadata = read_footer(handle, file.path).metadata
        except (pa.ArrowException, OSError) as error:
            raise SourceError(
                f"{file.path}: not a valid Parquet file: {error}", file=file.path
            ) from error
        groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    total = sum(group.total_byte_size for group in groups) or 1
    for index, group in enumerate(groups):
        size = int(file.bytes * group.total_byte_size / total)
        where = (index, index + 1)
        yield Piece(0, file.path, stamp, where, group.num_rows, size, file.partition)
