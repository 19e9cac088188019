"""Parquet files: features that pyarrow would misread are rejected before the first row.

| feature | what pyarrow does | here |
| --- | --- | --- |
| encrypted columns | ends the process when it looks at one | error |
| logical type that it does not know, Variant | returns the stored values without the type | error |
| column chunks in other files (`_metadata`) | reads other bytes of the same file | error |
| INT96 outside of 1677 to 2262 | wraps around to another time | error, or read as microseconds |
| dates of the Julian calendar by Spark 2 | takes them for Gregorian dates | error |
| checksums of pages | ignores them | checked |

Runs in: the operator's tool and reader processes, threads of one process.
Source: parquet.thrift and Encryption.md of apache/parquet-format 2.12.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from iskander.errors import SourceError

TAIL_BYTES: Final = 64 << 10
"""Bytes of the first read, which contain the whole footer of most files."""
_LENGTH_BYTES: Final = 8
"""Bytes of the footer's length and of the magic number after it."""
_SIGNATURE_BYTES: Final = 28
"""Bytes of the signature of a footer: a nonce and a tag."""
_MAGIC: Final = b"PAR1"
_ENCRYPTED: Final = b"PARE"
_VARIANT: Final = re.compile(
    r"^ +(?:required|optional|repeated) group field_id=-?\d+ (.*) \(Variant\(\d+\)\) \{$", re.M
)
_LEGACY_KEYS: Final = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_NS_MAX: Final = 2**63 - 1
_GREGORIAN: Final = datetime.date(1582, 10, 15)
_SAME_OFFSETS: Final = datetime.datetime(1900, 1, 1)
"""Before this time, Spark 2 wrote some times with another offset from UTC."""


class Footer(NamedTuple):
    """Footer of a file without features that would be misread.

    Attributes:
        metadata: Metadata of pyarrow.
        int96: Columns of the physical type INT96.
        is_legacy: Whether Spark 2 wrote the file, so that old dates may use the Julian calendar.
    """

    metadata: pq.FileMetaData
    int96: tuple[str, ...]
    is_legacy: bool


def read_footer(file: pa.NativeFile, path: str) -> Footer:
    """Read the footer of a file, and reject features that pyarrow would misread.

    Raises:
        SourceError: The file has a feature that pyarrow would misread.
        ArrowException: The file is not a valid Parquet file.
        OSError: The file is not a valid Parquet file, or cannot be read.
    """
    size = file.size()
    tail = _read_tail(file, min(size, TAIL_BYTES))
    magic, length = tail[-4:], int.from_bytes(tail[-_LENGTH_BYTES:-4], "little")
    if magic == _ENCRYPTED:
        raise _rejected_error(path, "its footer is encrypted")
    if magic == _MAGIC and len(tail) < length + _LENGTH_BYTES <= size:
        tail = _read_tail(file, length + _LENGTH_BYTES)
    metadata = pq.read_metadata(pa.BufferReader(tail))
    # A file with encrypted columns has a signature behind its metadata. The file is rejected before
    # such a column is accessed, because an access makes the library end the process.
    if length - metadata.serialized_size == _SIGNATURE_BYTES:
        raise _rejected_error(path, "it has encrypted columns")
    text = str(metadata.schema)
    _require_known_types(path, metadata.schema, text)
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        if group.num_columns and (other := group.column(0).file_path):
            raise _rejected_error(path, f"its rows are in other files, such as {other!r}")
    columns = map(metadata.schema.column, range(metadata.num_columns))
    int96 = (column.path for column in columns if column.physical_type == "INT96")
    return Footer(
        metadata,
        tuple(int96) if " int96 " in text else (),
        any(key in _LEGACY_KEYS for key in metadata.metadata or {}),
    )


def _read_tail(file: pa.NativeFile, count: int) -> bytes:
    """Read the last `count` bytes."""
    file.seek(file.size() - count)
    return bytes(file.read(count))


def _require_known_types(path: str, schema: pq.ParquetSchema, text: str) -> None:
    if found := _VARIANT.search(text):
        raise _rejected_error(path, f"column {found[1]!r} has the type Variant")
    if " (UNKNOWN)" not in text:
        return
    for index in range(len(schema)):
        column = schema.column(index)
        if column.logical_type.type == "UNDEFINED":
            reason = f"column {column.path!r} has a logical type that pyarrow {pa.__version__}"
            raise _rejected_error(path, f"{reason} does not know")


def _rejected_error(path: str, reason: str) -> SourceError:
    return SourceError(
        f"{path}: Parquet feature that is not supported: {reason}; write the file again without it",
        file=path,
    )


def read_groups(
    file: pa.NativeFile,
    path: str,
    footer: Footer,
    groups: Sequence[int],
    names: Sequence[str],
    *,
    batch_rows: int,
    buffer_bytes: int,
    unit: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Read columns of row groups, one group after the other.

    Args:
        file: The file.
        path: Path of the file, for messages.
        footer: Footer of the file.
        groups: Row groups.
        names: Columns.
        batch_rows: Maximum rows of a batch.
        buffer_bytes: Bytes of one read, whose pages are decoded when they are needed. With 0, the
            columns of a row group are fetched together, with joined requests to an object store.
        unit: Unit of INT96 columns. None: nanoseconds, and a time outside of their range is an
            error.

    Raises:
        SourceError: A time or a date would be misread.
    """

    def open_with_unit(unit: str | None) -> pq.ParquetFile:
        return pq.ParquetFile(
            file,
            metadata=footer.metadata,
            pre_buffer=not buffer_bytes,
            buffer_size=buffer_bytes,
            coerce_int96_timestamp_unit=unit,
            page_checksum_verification=True,
        )

    # A time outside the range of nanoseconds wraps around without an error, so INT96 columns are
    # first read in microseconds and checked.
    int96 = {column.partition(".")[0] for column in footer.int96}
    checked = [name for name in names if name in int96] if unit is None else []
    parquet = open_with_unit(unit)
    for group in groups:
        if checked:
            micros = open_with_unit("us").iter_batches(
                batch_size=batch_rows, row_groups=[group], columns=checked
            )
            for batch in micros:
                _require_values(path, batch, _nanoseconds_problem)
        for batch in parquet.iter_batches(batch_size=batch_rows, row_groups=[group], columns=names):
            require_known_dates(path, batch, footer)
            yield batch


def require_known_dates(path: str, batch: pa.RecordBatch, footer: Footer) -> None:
    """Require that the calendar of all dates is known.

    Raises:
        SourceError: A date of Spark 2 is so old that it may use the Julian calendar.
    """
    if footer.is_legacy:
        _require_values(path, batch, _calendar_problem)


def _require_values(
    path: str, batch: pa.RecordBatch, find_problem: Callable[[pa.Array], str]
) -> None:
    """Raise an error for the first column with a problem.

    `find_problem` returns the problem of an array; empty if there is none.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for values in _value_arrays(column):
            if problem := find_problem(values):
                raise SourceError(f"{path}: column {name!r} has {problem}", file=path, column=name)


def _nanoseconds_problem(array: pa.Array) -> str:
    """Return a problem if times in microseconds do not fit nanoseconds; else an empty text."""
    if not pa.types.is_timestamp(array.type):
        return ""
    found = pc.min_max(array.cast(pa.int64()))
    for value in (found["min"].as_py(), found["max"].as_py()):
        if value is not None and not -_NS_MAX <= value * 1000 <= _NS_MAX - 999:
            return (
                "INT96 times outside of the years 1677 to 2262, which do not fit nanoseconds; "
                "write them as INT64 (TIMESTAMP_MICROS)"
            )
    return ""


def _calendar_problem(array: pa.Array) -> str:
    """Return a problem if dates of Spark 2 may use the Julian calendar; else an empty text."""
    if pa.types.is_date(array.type):
        first = _GREGORIAN
    elif pa.types.is_timestamp(array.type):
        first = _SAME_OFFSETS
    else:
        return ""
    limit = pa.scalar(first).cast(array.type)
    if not pc.any(pc.less(array, limit)).as_py():
        return ""
    return (
        f"dates before {first:%Y-%m-%d} in the calendar of Spark 2; write the file with Spark 3 "
        "and the rebase mode CORRECTED"
    )


def _value_arrays(array: pa.Array) -> Iterator[pa.Array]:
    """Yield the arrays of values that are not nested: of a column, or inside of its type."""
    kind = array.type
    if pa.types.is_struct(kind):
        children = array.flatten()
    elif pa.types.is_map(kind):
        children = [array.keys, array.items]
    elif pa.types.is_nested(kind):
        children = [array.flatten()]
    else:
        yield array
        return
    for child in children:
        yield from _value_arrays(child)
