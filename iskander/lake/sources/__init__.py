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


class JobSource(Protocol):
    """An input of a job, whose state is fixed when it is opened, cut into units.

    All methods may be called from several threads; one unit is read by one thread.
    """

    @property
    def schema(self) -> pa.Schema:
        """Columns of the input; columns of hive folders are at the end."""

    @property
    def snapshot(self) -> dict[str, str]:
        """State of the input; inputs with equal snapshots have equal rows in equal units."""

    @property
    def decimals(self) -> frozenset[str]:
        """Columns of floating-point numbers that the input has as decimal text."""

    @property
    def is_resumable(self) -> bool:
        """Whether a unit can be read again in another process."""

    def units(self) -> list[Unit]:
        """Return the units in a deterministic order: at least one, which may have no rows."""

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Count the rows of a unit after the filter; only columns of the filter are read."""

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a unit in order.

        Every batch except the last has `batch_rows` rows, whatever the sizes of row groups are and
        whatever the filter removes. A unit without rows has no batch.

        Args:
            unit: A unit of this source, with or without `rows_max`.
            columns: Columns to read, in this order; None for all.
            filter: Condition of the rows; its columns need not be in `columns`.
            batch_rows: Rows of a batch.

        Raises:
            SourceChanged: The data differs from the planned data. The error can come after the last
                batch, so a result counts only after the end of the iterator.
        """

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        """Return the place of row number `row` of a unit, after the filter; None if there is none.

        The filter's columns are read again, so the method is for errors only.
        """

    def close(self) -> None:
        """Release files and connections; safe to repeat."""


def open_source(
    inputs: Sequence[str],
    *,
    unit_bytes: int = UNIT_BYTES,
    types: Mapping[str, pa.DataType] | None = None,
    plain_files: bool = False,
) -> JobSource:
    """Open the inputs of a job, and fix their state.

    Args:
        inputs: Files, globs, folders and URIs of files; or one table; or `-`.
        unit_bytes: Approximate bytes of one unit.
        types: Types that a model wants for columns of CSV files and hive folders, which are text. A
            column gets a type that all its values fit.
        plain_files: Read files of a table as plain files; otherwise such files are an error.

    Raises:
        ConfigError: `plain_files` is set, and an input is no path of files.
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
    is_table = [is_delta(uri) or uri.startswith(ICEBERG) or uri == STREAM for uri in inputs]
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
) -> JobSource:
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
