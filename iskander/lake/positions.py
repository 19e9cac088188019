"""Places of rows in the input: the file, and the row in it.

Pure. Runs in: the operator's tool, and reader processes.
"""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc


class Position(NamedTuple):
    """A row of the input.

    Attributes:
        file: Path of the file, or the name of the stream.
        row: Number of the row in the file, from 0; None if it is unknown.
    """

    file: str
    row: int | None


def kept_rows(batch: pa.RecordBatch, condition: pc.Expression | None) -> pa.Array:
    """Return the numbers of the rows of a batch that meet a condition; of all rows for None."""
    numbers = pa.array(range(batch.num_rows), pa.int64())
    if condition is None:
        return numbers
    name = "row"
    while name in batch.schema.names:
        name += "_"
    numbered = pa.RecordBatch.from_arrays(
        [*batch.columns, numbers], names=[*batch.schema.names, name]
    )
    return numbered.filter(condition).column(name)
