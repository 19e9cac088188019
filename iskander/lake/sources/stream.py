"""Arrow IPC stream on standard input: one unit that is read once.

Runs in: the operator's tool, one thread.
"""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow.empty_unions import column_with_empty_union
from iskander.errors import SourceError, Unsupported
from iskander.lake.filters import Filter
from iskander.lake.plan import Unit, make_unit
from iskander.lake.positions import Position
from iskander.lake.sources.reading import needed_columns, rebatch, select_fields


class StreamSource:
    """A stream of record batches.

    Args:
        file: Binary file with the stream; None is standard input.

    Raises:
        SourceError: The file does not begin with an Arrow IPC stream.
    """

    is_resumable = False
    decimals: frozenset[str] = frozenset()

    def __init__(self, file: Any = None) -> None:  # noqa: ANN401
        try:
            self._reader = pa.ipc.open_stream(sys.stdin.buffer if file is None else file)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"standard input is not an Arrow IPC stream: {error}") from error
        if column := column_with_empty_union(self._reader.schema):
            raise SourceError(f"standard input: column {column!r} has a union without fields")
        self.schema = self._reader.schema.remove_metadata()
        # Two streams cannot be compared, so every stream is another job.
        self.snapshot = {"kind": "stream", "token": secrets.token_hex(16)}
        self._was_read = False

    def units(self) -> list[Unit]:
        """Return the only unit, whose number of rows is unknown."""
        return [make_unit(0, {"stream": "-"}, rows=None, bytes=0)]

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Raise an error, because counting would consume the rows.

        Raises:
            Unsupported: Always.
        """
        raise Unsupported("rows of a stream cannot be counted before they are read")

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the stream; see `JobSource.read`.

        Raises:
            Unsupported: The stream was read before.
        """
        target = select_fields(self.schema, columns)
        # Names are checked here, before the first batch; the filter may use all columns.
        expression = filter.expression(self.schema) if filter is not None else None
        names = needed_columns(target, filter)
        if self._was_read:
            raise Unsupported("a stream on standard input is read once; use a file to read again")
        self._was_read = True
        return rebatch(self._batches(target, names, expression, unit.rows_max), batch_rows)

    def _batches(
        self,
        target: pa.Schema,
        names: list[str],
        expression: pc.Expression | None,
        left: int | None,
    ) -> Iterator[pa.RecordBatch]:
        try:
            for raw in self._reader:
                raw.validate()
                batch = raw.select(names)
                if expression is not None:
                    batch = batch.filter(expression)
                batch = batch.select(target.names).replace_schema_metadata(None)
                if left is not None:
                    batch = batch.slice(0, left)
                    left -= batch.num_rows
                if batch.num_rows:
                    yield batch
                if left is not None and left <= 0:
                    return
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"standard input: the stream is damaged: {error}") from error

    def locate(self, unit: Unit, row: int, filter: Filter | None) -> Position | None:
        """Return the row number in the stream; None after a filter, whose removed rows are gone."""
        return Position("standard input", row if filter is None else None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
