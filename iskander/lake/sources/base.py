"""Source of files and tables, whose schema, snapshot and units are fixed.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pyarrow as pa

from iskander.lake.filters import Condition, Filter
from iskander.lake.plan import Unit
from iskander.lake.positions import Position
from iskander.lake.sources.reading import COUNT_ROWS, needed_columns, rebatch, select_fields


class UnitReader(Protocol):
    """Reads the units of one input; several threads use it."""

    def batches(
        self,
        unit: Unit,
        target: pa.Schema,
        needed: pa.Schema,
        condition: Condition | None,
        batch_rows: int,
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a unit, in batches of any size.

        Args:
            unit: The unit, with or without `rows_max`.
            target: Columns of the batches.
            needed: Columns to read: columns of the target and of the filter.
            condition: Condition of the rows.
            batch_rows: Rows of the batches that the caller makes of these batches.

        Raises:
            SourceChanged: The data differs from the planned data.
        """

    def locate(
        self, unit: Unit, row: int, needed: pa.Schema, condition: Condition | None
    ) -> Position | None:
        """Return the place of a row of a unit, after the condition; see `JobSource.locate`.

        Args:
            unit: The unit.
            row: Number of the row in the unit, after the condition.
            needed: Columns to read: columns of the condition, or else one column.
            condition: Condition of the rows.
        """


class FrozenSource:
    """A source whose schema, snapshot and units are given; see `JobSource`.

    Args:
        schema: Columns.
        snapshot: State of the input.
        units: Units in order.
        reader: Reader of the units.
        decimals: Columns whose floating-point numbers are decimal text in the input.
    """

    is_resumable = True

    def __init__(
        self,
        schema: pa.Schema,
        snapshot: dict[str, str],
        units: list[Unit],
        reader: UnitReader,
        *,
        decimals: frozenset[str] = frozenset(),
    ) -> None:
        self.schema = schema
        self.decimals = decimals
        self.snapshot = snapshot
        self._units = units
        self._reader = reader

    def units(self) -> list[Unit]:
        """Return the units in the order of the inputs and of their files' paths."""
        return self._units

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Count rows of a unit after the filter; reads the columns of the filter only."""
        if filter is None and unit.rows is not None:
            return unit.rows
        columns = filter.columns if filter is not None else self.schema.names[:1]
        return sum(batch.num_rows for batch in self.read(unit, columns, filter, COUNT_ROWS))

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read a unit; see `JobSource.read`. Names and types are checked before the first batch."""
        target = select_fields(self.schema, columns)
        condition = filter.condition(self.schema) if filter is not None else None
        names = needed_columns(target, filter)
        needed = pa.schema([self.schema.field(name) for name in names])
        batches = self._reader.batches(unit, target, needed, condition, batch_rows)
        return rebatch(batches, batch_rows)

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        """Return the place of a row; see `JobSource.locate`."""
        columns = filter.columns if filter is not None else self.schema.names[:1]
        condition = filter.condition(self.schema) if filter is not None else None
        return self._reader.locate(unit, row, select_fields(self.schema, columns), condition)

    def close(self) -> None:
        """Do nothing, because nothing stays open between units."""
