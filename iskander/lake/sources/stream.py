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

from iskander.errors import SourceError, Unsupported
from iskander.lake.filters import Filter
from iskander.lake.plan import Unit, unit
from iskander.lake.positions import Position
from iskander.lake.sources.reading import needed_columns, projected, rebatched


class StreamSource:
    """A stream of record batches.

    Args:
        file: Binary file with the stream; None is standard input.

    Raises:
        SourceError: It does not begin with an Arrow IPC stream.
    """

    is_resumable = False
    decimals: frozenset[str] = frozenset()

    def __init__(self, file: Any = None) -> None:  # noqa: ANN401
        try:
            self._reader = pa.ipc.open_stream(sys.stdin.buffer if file is None else file)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"standard input is not an Arrow IPC stream: {error}") from error
        self.schema = self._reader.schema.remove_metadata()
        # Nothing tells whether two streams are equal: each one is a job of its own.
        self.snapshot = {"kind": "stream", "token": secrets.token_hex(16)}
        self._was_read = False

    def units(self) -> list[Unit]:
        """Return the one unit; its rows are unknown."""
        return [unit(0, {"stream": "-"}, rows=None, bytes=0)]

    def count(self, unit: Unit, filter: Filter | None) -> int:
        """Reject to count: that would consume the rows.

        Raises:
            Unsupported: Always.
        """
        raise Unsupported("rows of a stream cannot be counted before they are read")

    def read(
        self, unit: Unit, columns: Sequence[str] | None, filter: Filter | None, batch_rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Read the stream; see `Source.read`.

        Raises:
            Unsupported: It was read before.
        """
        target = projected(self.schema, columns)
        # Names are checked here, and the expression is made for all columns of the stream.
        expression = filter.expression(self.schema) if filter is not None else None
        names = needed_columns(target, filter)
        if self._was_read:
            raise Unsupported("a stream on standard input is read once; use a file to read again")
        self._was_read = True
        return rebatched(self._batches(target, names, expression, unit.rows_max), batch_rows)

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
        """Return the row of the stream; it is unknown after a filter, for no row is left."""
        return Position("standard input", row if filter is None else None)

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()
