"""Source read as one batch, for a model whose results depend on other rows of the batch.

The batch has all rows of all inputs, in the order of the plan.

Runs in: the operator's tool, threads of one process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from iskander.client import ModelDescription
from iskander.errors import ContractError, LimitExceeded
from iskander.lake.filters import Filter
from iskander.lake.plan import Unit, make_unit, total_rows
from iskander.lake.positions import Position
from iskander.lake.sources import JobSource

READ_ROWS: Final = 8192
BYTES_MAX: Final = 1 << 30
"""Limit of the bytes of the read columns. The server limits the number of rows."""


class WholeSource:
    """A source whose only unit has all rows, read as one batch.

    Args:
        source: The source to read.
        description: The model, with its limit of rows.
    """

    def __init__(self, source: JobSource, description: ModelDescription) -> None:
        self._source = source
        self._description = description
        self.schema = source.schema
        self.snapshot = source.snapshot
        self.decimals = source.decimals
        self.is_resumable = source.is_resumable

    def units(self) -> list[Unit]:
        """Return one unit, whose locator names the units of the source."""
        units = self._source.units()
        names = {"whole": [each.name for each in units]}
        size = sum(unit.bytes for unit in units)
        return [make_unit(0, names, rows=total_rows(units), bytes=size)]

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Count the rows of the only unit after the filter."""
        del unit
        return sum(self._source.count(each, filter) for each in self._source.units())

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows as one batch, whatever `batch_rows` is; no batch if there are no rows.

        Raises:
            LimitExceeded: There are more rows than one batch may have.
            ContractError: The batches cannot be joined.
        """
        del batch_rows
        parts: list[pa.RecordBatch] = []
        rows = size = 0
        for batch in self._batches(unit.rows_max, columns, filter):
            rows, size = rows + batch.num_rows, size + batch.nbytes
            require_rows(self._description, rows, at_least="at least ")
            if size > BYTES_MAX:
                raise self._description.whole_error(
                    LimitExceeded(f"more than {BYTES_MAX:,} bytes in one batch", wanted=BYTES_MAX)
                )
            parts.append(batch)
        if not parts:
            return
        try:
            yield parts[0] if len(parts) == 1 else pa.concat_batches(parts)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            text = f"the rows of the input cannot be joined to one batch: {error}"
            raise ContractError(text) from None

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        """Return the place of a row, from the unit of the source that contains it."""
        del unit
        units = self._source.units()
        for each in units:
            # A stream is one unit, whose rows cannot be counted.
            rows = self._source.count(each, filter) if len(units) > 1 else row + 1
            if row < rows:
                return self._source.locate(each, row, filter)
            row -= rows
        return None

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _batches(
        self, rows_max: int | None, columns: Sequence[str] | None, filter: Filter | None
    ) -> Iterator[pa.RecordBatch]:
        """Read the units one after another, at most `rows_max` rows."""
        left = rows_max
        for unit in self._source.units():
            for batch in self._source.read(unit, columns, filter, READ_ROWS):
                if left is None:
                    yield batch
                    continue
                yield batch.slice(0, left)
                left -= min(left, batch.num_rows)
                if not left:
                    return


def whole_if_needed(source: JobSource, description: ModelDescription) -> JobSource:
    """Return a `WholeSource` if the model needs all rows in one batch, else the source itself."""
    return WholeSource(source, description) if description.is_whole else source


def require_whole(source: JobSource, description: ModelDescription) -> None:
    """Require a `WholeSource` if the model needs all rows in one batch.

    Raises:
        ContractError: The source reads rows in parts.
    """
    if description.is_whole and not isinstance(source, WholeSource):
        raise ContractError(
            f"model `{description.name}` takes all rows of a table in one request, because "
            f"{description.whole_reason}; here rows are read in parts. Use `iskander score` or "
            "`Client.score`, or set `combine = true` in the manifest if the rows are known to be "
            "independent",
            model=description.name,
        )


def require_rows(description: ModelDescription, rows: int, *, at_least: str = "") -> None:
    """Require that rows are within the server's limit, if the model takes all in one request.

    `at_least` begins the error text if more rows than `rows` may follow.

    Raises:
        LimitExceeded: There are more rows.
    """
    limit = description.limits["rows"]
    if description.is_whole and rows > limit:
        text = (
            f"{at_least}{rows:,} rows in one batch, limit {limit:,} (`{description.rows_setting}`)"
        )
        raise description.whole_error(LimitExceeded(text, wanted=limit, got=rows))
