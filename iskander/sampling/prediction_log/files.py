"""An incomplete Parquet file: rows stay in memory until a row group is full.

Runs on: the writer thread of the observer process. Source: Apache Parquet format.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_BYTES: Final = 8 << 20
"""Bytes of rows in memory at which a row group is written."""


class LogFile:
    """A file of one partition and schema. Owns: the file until `finish` or `abandon`.

    Attributes:
        samples: Sampled requests in it.
        buffered_bytes: Bytes of rows that are not written yet.
        written_bytes: Bytes of the file so far.

    Args:
        path: Where to write.
        schema: Schema of all rows.
        compression: Compression, a value of `PredictionLogConfig.compression`.
        opened_ns: Monotonic time.
    """

    def __init__(self, path: Path, schema: pa.Schema, compression: str, opened_ns: int) -> None:
        self.path = path
        self.opened_ns = opened_ns
        self.samples = self.buffered_bytes = 0
        self._schema = schema
        self._batches: list[pa.RecordBatch] = []
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._file = _FullDiskFile(self._descriptor)
        try:
            self._writer = pq.ParquetWriter(self._file, schema, compression=compression)
        except BaseException:
            self._delete()
            raise

    @property
    def written_bytes(self) -> int:
        """Bytes of the file so far."""
        return self._file.bytes

    def add(self, rows: pa.RecordBatch) -> None:
        """Add the rows of a sample; may write a row group.

        Raises:
            OSError: The disk is full, or fails.
        """
        self._batches.append(rows)
        self.buffered_bytes += rows.nbytes
        self.samples += 1
        if self.buffered_bytes >= GROUP_BYTES:
            self.write_group()

    def write_group(self) -> None:
        """Write the rows in memory as a row group; raises as `add`."""
        table = pa.Table.from_batches(self._batches, self._schema)
        self._batches, self.buffered_bytes = [], 0
        if table.num_rows:
            self._writer.write_table(table, row_group_size=table.num_rows)

    def finish(self) -> int:
        """Complete the file on disk; return its bytes. Raises as `add`."""
        self.write_group()
        self._writer.close()
        os.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        return self._file.bytes

    def abandon(self) -> None:
        """Delete the file, which frees its space."""
        self._batches, self.buffered_bytes = [], 0
        self._file.is_dead = True
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()
        self._delete()

    def _delete(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self.path.unlink(missing_ok=True)


class _FullDiskFile:
    """File for pyarrow that counts bytes, and that can be closed on a full disk.

    Attributes:
        bytes: Bytes so far.
        is_dead: Further bytes are ignored.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.bytes = 0
        self.is_dead = self.closed = False

    def write(self, data: object) -> int:
        """Write all of the data."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        rest = view
        while len(rest) and not self.is_dead:
            rest = rest[os.write(self._descriptor, rest) :]
        self.bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.bytes

    def flush(self) -> None:
        """Nothing is buffered."""

    def writable(self) -> bool:
        """Return True."""
        return True

    def readable(self) -> bool:
        """Return False."""
        return False

    def seekable(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Close nothing; the descriptor is the owner's."""
        self.closed = True
