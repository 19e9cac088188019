"""Delta tables as input, at one version; needs the library `deltalake`.

The table's log gives the data files and the values of partition columns; Parquet is read as for
plain files. Data files of a version never change, so that their sizes identify them.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from iskander.errors import ConfigError, SourceError, Unsupported
from iskander.scoring.job import UNIT_BYTES
from iskander.scoring.plan import canonical
from iskander.scoring.sources.base import FrozenSource
from iskander.scoring.sources.places import Stamp, opened_as_planned
from iskander.scoring.sources.reading import FileReader, Piece, packed, target_bytes

if TYPE_CHECKING:
    from deltalake import DeltaTable

SCHEME: Final = "delta://"
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
        Unsupported: The table has deletion vectors or another feature that the library rejects.
    """

    def __init__(self, uri: str, *, unit_bytes: int = UNIT_BYTES) -> None:
        table, dataset = _open(uri)
        filesystem: pafs.FileSystem = dataset.filesystem
        schema = pa.schema([pa.field(each.name, each.type) for each in dataset.schema])
        files = _data_files(table)
        target = target_bytes(sum(each.bytes for each in files), unit_bytes)
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
        reader = FileReader("parquet", schema, [filesystem], is_evolved=True)
        super().__init__(schema, snapshot, packed(pieces, unit_bytes), reader)


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
        return table, table.to_pyarrow_dataset()
    except DeltaProtocolError as error:
        raise Unsupported(
            f"{uri}: {error}; rewrite the table without this feature, or export it to Parquet"
        ) from error
    except (DeltaError, OSError, ValueError) as error:
        raise SourceError(f"{uri}: cannot open the Delta table: {error}", input=uri) from error


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
    """Cut a file larger than the target between its row groups; other files are not opened."""
    stamp = Stamp(file.bytes, None, None)
    if file.bytes <= target:
        yield Piece(0, file.path, stamp, None, file.rows, file.bytes, file.partition)
        return
    with opened_as_planned(filesystem, file.path, stamp) as handle:
        try:
            metadata = pq.ParquetFile(handle).metadata
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
