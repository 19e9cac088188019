"""Adds the place in the input, a file and a row, to the error of a batch.

A batch joins rows of several files, without the rows that the filter removes, so the row number in
a server's error is not one of a file. The place is looked up after the failure; until then it costs
nothing.

Runs in: the operator's tool, threads of one process; reader processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from iskander.errors import IskanderError
from iskander.lake.filters import Filter
from iskander.lake.plan import Unit
from iskander.lake.positions import Position
from iskander.lake.rows import is_row_error
from iskander.lake.sources import JobSource

FILE: Final = "file"
"""Field of an error: the file that has the row of the field `row`."""


def with_place(
    error: IskanderError,
    source: JobSource,
    unit: Unit,
    filter: Filter | None,
    *,
    first: int,
    batch: pa.RecordBatch,
    columns: Mapping[str, str],
) -> IskanderError:
    """Return an error that names the place of its row, or of all rows of the batch.

    Args:
        error: The error; its field `row` counts from the first row of the batch.
        source: The input.
        unit: The unit of the batch.
        filter: Condition of the rows.
        first: Number of the batch's first row in the unit, after the filter.
        batch: The rows, with the columns of the input.
        columns: Name of the column of the input, by name of the model's input.

    Returns:
        An error of the same class with the fields `file` and `row`; the error itself if values of
        rows are not its reason, or if it has a place already.
    """
    rows = batch.num_rows
    if not rows or not is_row_error(error) or FILE in error.fields:
        return error
    given = error.fields.get("row", _first_null(error, batch, columns))
    known = given if isinstance(given, int) and 0 <= given < rows else None
    ends = (0, rows - 1) if known is None else (known, known)
    begin, end = (_place_of_row(source, unit, filter, first + offset) for offset in ends)
    text, row = error.message, None if known is None else begin.row
    if begin.row is None or end.row is None:
        names = dict.fromkeys((begin.file, end.file))
        where = f"input {' to '.join(names)}, in a batch of {rows:,} rows"
    elif known is not None:
        where = f"input {begin.file}, row {row} (from 0)"
        text = re.sub(rf"\brow {known}\b", f"row {row}", text, count=1)
    elif begin.file == end.file:
        where = f"input {begin.file}, rows {begin.row} to {end.row} (from 0)"
    else:
        where = f"input {begin.file} from row {begin.row} (from 0) to {end.file}, row {end.row}"
    fields = {**error.fields, FILE: begin.file, "row": row}
    found = type(error)(f"{where}: {text}", retry_after_ms=error.retry_after_ms, **fields)
    # Attributes of this one error: its fault and status, and notes.
    own = {k: v for k, v in vars(error).items() if k not in ("message", "fields")}
    vars(found).update(own)
    return found


def _first_null(
    error: IskanderError, batch: pa.RecordBatch, columns: Mapping[str, str]
) -> int | None:
    """Return the row of the first null, for an error that has only the number of nulls."""
    name = columns.get(error.column or "", error.column or "")
    if "nulls" not in error.fields or batch.schema.names.count(name) != 1:
        return None
    found = pc.index(batch.column(name).is_null(), pa.scalar(value=True)).as_py()
    return None if found < 0 else int(found)


def _place_of_row(source: JobSource, unit: Unit, filter: Filter | None, row: int) -> Position:
    """Return the place of a row of a unit.

    The name of the unit if the input cannot be read again.
    """
    try:
        found = source.locate(unit, row, filter)
    except (IskanderError, OSError, pa.ArrowException):
        found = None
    return found or Position(unit.name, None)
