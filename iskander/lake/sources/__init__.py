"""Inputs of scoring jobs: files, Delta tables, Iceberg tables, and standard input.

Imports pyarrow; the libraries of table formats are loaded only for their tables.
Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

import pyarrow as pa

from iskander.errors import ConfigError, SourceError
from iskander.lake.filters import Filter
from iskander.lake.job import STREAM, UNIT_BYTES
from iskander.lake.plan import Unit
from iskander.lake.positions import Position


class Source(Protocol):
    """An input in a frozen state, cut into units.

    All methods may be called from several threads; one unit is read by one thread.
    """

    @property
    def schema(self) -> pa.Schema:
        """Columns of the input, with those of hive folders at the end."""

    @property
    def snapshot(self) -> dict[str, str]:
        """State of the input: equal snapshots have equal rows in equal units."""

    @property
    def decimals(self) -> frozenset[str]:
        """Columns whose floating-point numbers are decimal text, which has no binary type."""

    @property
    def is_resumable(self) -> bool:
        """True if a unit can be read again in another process."""

    def units(self) -> list[Unit]:
        """Return the units in a deterministic order; at least one, which may have no rows."""

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Count the rows of a unit after the filter; reads the filter's columns at most."""

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a unit in order.

        Each batch has `batch_rows` rows, except the last one, whatever the sizes of row groups are
        and whatever the filter removes. A unit without rows gives no batch.

        Args:
            unit: A unit of this source, with or without `rows_max`.
            columns: Columns to read, in this order; None for all.
            filter: Condition of the rows; its columns need not be in `columns`.
            batch_rows: Rows of a batch.

        Raises:
            SourceChanged: The data is not what was planned. It can come after the last batch, so
                that no result counts before the iterator has ended.
        """

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        """Find a row of a unit, after the filter, in its file; None if there is no such row.

        It reads the filter's columns again at most, so it is for errors only.
        """

    def close(self) -> None:
        """Release files and connections; safe to repeat."""


def open_source(
    inputs: Sequence[str],
    *,
    unit_bytes: int = UNIT_BYTES,
    types: Mapping[str, pa.DataType] | None = None,
    plain_files: bool = False,
) -> Source:
    """Open the inputs of a job and freeze their state.

    Args:
        inputs: Files, globs, folders and URIs of files; or one table; or `-`.
        unit_bytes: Approximate bytes of one unit.
        types: Types that a model wants of columns of CSV files and hive folders, which have none of
            their own. Each column gets a type that all its values fit.
        plain_files: Read the files of a table as they are; without it they are an error.

    Raises:
        ConfigError: `plain_files` with an input that is no path of files.
        SourceError: An input does not exist or cannot be read, or the inputs do not fit together.
    """
    first = inputs[0]
    if plain_files:
        for each in inputs:
            if each.startswith((DELTA, ICEBERG)) or each == STREAM:
                raise ConfigError(
                    f"--plain-files with the input {each}, which is not a path of files"
                )
        return _files(inputs, unit_bytes, types, plain_files=True)
    is_table = [is_delta(each) or each.startswith(ICEBERG) or each == STREAM for each in inputs]
    if len(inputs) > 1 and any(is_table):
        table = inputs[is_table.index(True)]
        raise SourceError(
            f"{table} cannot be combined with other inputs; a job reads one table, or files"
        )
    if first == STREAM:
        from iskander.lake.sources.stream import StreamSource

        return StreamSource()
    if first.startswith(ICEBERG):
        from iskander.lake.sources.iceberg import IcebergSource

        return IcebergSource(first, unit_bytes=unit_bytes)
    if is_table[0]:
        from iskander.lake.sources.delta import DeltaSource

        return DeltaSource(first, unit_bytes=unit_bytes)
    return _files(inputs, unit_bytes, types, plain_files=False)


def _files(
    inputs: Sequence[str],
    unit_bytes: int,
    types: Mapping[str, pa.DataType] | None,
    *,
    plain_files: bool,
) -> Source:
    from iskander.lake.sources.files import FileSource

    return FileSource(inputs, unit_bytes=unit_bytes, types=types, plain_files=plain_files)


DELTA: Final = "delta://"
ICEBERG: Final = "iceberg://"
_VERSION = re.compile(r"(.*)@v\d+", re.DOTALL)


def is_delta(uri: str) -> bool:
    """Whether an input is a Delta table: by its scheme, or a folder with a transaction log."""
    from iskander.lake.sources.places import locate
    from iskander.lake.sources.tables import DELTA_LOG

    if uri.startswith(DELTA):
        return True
    if uri == STREAM or uri.startswith(ICEBERG):
        return False
    places = [locate(uri)]
    if match := _VERSION.fullmatch(uri):
        places.append(locate(match[1]))
    return any(place.is_folder(f"{place.path}/{DELTA_LOG}") for place in places)
