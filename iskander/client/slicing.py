"""Cuts and joins record batches to a server's limits on rows and bytes.

A cut is a slice without a copy, except for columns of text views or list views: a slice of such a
column contains the text or elements of all rows, so the text or elements of its own rows are
copied. A view inside another type is not copied, and counts with the bytes of all rows.

Runs on: the caller's threads. Pure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow.columns import is_list_view
from iskander.errors import ContractError, LimitExceeded

ROWS_MIN = 8192
"""Smallest batch that is not joined with neighbouring batches, in rows."""
VIEW_BYTES_MIN = 1 << 16
"""Size of a batch above which views are copied; unused bytes of smaller ones are sent."""


def cut_and_join(
    batches: Iterable[pa.RecordBatch],
    *,
    rows_max: int,
    bytes_max: int,
    string_bytes_max: int | None = None,
    rows_min: int = ROWS_MIN,
    strings: Sequence[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of batches, in order, in batches within the limits.

    Args:
        batches: Batches of one schema.
        rows_max: Limit of the rows of a batch, `limits.rows` of the server.
        bytes_max: Limit of the bytes of a batch, `limits.bytes` of the server.
        string_bytes_max: Limit of the string bytes of a batch, `limits.string_bytes` of the server.
        rows_min: Smaller batches are joined to this number of rows; 0: no batches are joined.
        strings: `string_columns` of the schema, if they are known.

    Returns:
        Batches with rows; a single batch without rows if no batch has rows.

    Raises:
        LimitExceeded: A single row exceeds a limit on bytes.
    """
    limits = _Limits(rows_max, bytes_max, string_bytes_max)
    # A joined batch has a bitmap of nulls for all rows, and is at most twice as large as its parts.
    limits_of_join = _Limits(rows_max, max(bytes_max // 2, 1), string_bytes_max)
    pending: list[pa.RecordBatch] = []
    size = _NOTHING
    empty: pa.RecordBatch | None = None
    has_rows, row = False, 0
    for batch in batches:
        if not batch.num_rows:
            empty = batch
            continue
        has_rows = True
        if strings is None:
            strings = string_columns(batch.schema)
        for part in _cut(batch, limits, row, strings):
            if pending and limits_of_join.parts_needed(size.plus(part.size)) > 1:
                yield from _join_if_possible(pending)
                pending = []
            size = size.plus(part.size) if pending else part.size
            pending.append(part.batch)
            if size.rows >= rows_min:
                yield from _join_if_possible(pending)
                pending = []
        row += batch.num_rows
    yield from _join_if_possible(pending)
    if empty is not None and not has_rows:
        yield empty


def join_to_one(
    batches: Iterable[pa.RecordBatch],
    *,
    rows_max: int,
    bytes_max: int,
    string_bytes_max: int,
    rows_setting: str = "limits.rows",
) -> pa.RecordBatch:
    """Return the rows of one or more batches as one batch.

    Args:
        batches: Batches of one schema, which are read until they exceed a limit.
        rows_max: Limit of the rows.
        bytes_max: Limit of the bytes, `limits.bytes` of the server.
        string_bytes_max: Limit of the string bytes, `limits.string_bytes` of the server.
        rows_setting: Setting of the server that limits the rows.

    Raises:
        LimitExceeded: The batches exceed a limit.
        ContractError: The batches cannot be joined.
    """
    limits = _Limits(rows_max, bytes_max, string_bytes_max, rows_setting)
    parts: list[pa.RecordBatch] = []
    rows = read_bytes = 0
    checked_bytes = bytes_max
    for batch in batches:
        if not batch.num_rows and parts:
            continue
        rows += batch.num_rows
        limits.require(_Size(rows, 0, 0), "at least ")
        parts.append(batch)
        read_bytes += batch.nbytes
        if read_bytes > checked_bytes:
            # The joined batch may be smaller: dictionaries are counted once.
            part = _measure(_join_or_raise(parts), limits, string_columns(batch.schema))
            limits.require(part.size, "at least ")
            parts = [part.batch]
            read_bytes, checked_bytes = part.size.bytes, part.size.bytes + bytes_max
    part = _measure(_join_or_raise(parts), limits, string_columns(parts[0].schema))
    limits.require(part.size)
    return part.batch


def _join_or_raise(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    try:
        return pa.concat_batches(batches)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ContractError(f"the batches cannot be joined to one: {error}") from None


class _Size(NamedTuple):
    rows: int
    bytes: int
    string_bytes: int

    def plus(self, other: _Size) -> _Size:
        return _Size(
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.string_bytes + other.string_bytes,
        )


_NOTHING = _Size(0, 0, 0)


class _Part(NamedTuple):
    batch: pa.RecordBatch
    size: _Size


class _Limits(NamedTuple):
    rows: int
    bytes: int
    string_bytes: int | None
    rows_setting: str = "limits.rows"

    def parts_needed(self, size: _Size) -> int:
        """Return the number of batches that a size needs; 1 if it is within the limits."""
        count = max(-(-size.rows // self.rows), -(-size.bytes // self.bytes))
        if self.string_bytes is None:
            return count
        return max(count, -(-size.string_bytes // self.string_bytes))

    def require(self, size: _Size, quantifier: str = "") -> None:
        """Raise LimitExceeded if the size of a batch is above a limit."""
        for name, count, limit in self._named_counts(size):
            if count > limit:
                text = f"{quantifier}{count:,} {name.replace('_', ' ')} in one batch, "
                setting = self.rows_setting if name == "rows" else f"limits.{name}"
                text += f"limit {limit:,} (`{setting}`)"
                raise LimitExceeded(text, wanted=limit, got=count)

    def require_row(self, size: _Size, row: int) -> None:
        """Raise LimitExceeded if the size of one row is above a limit."""
        for name, count, limit in self._named_counts(size):
            if count > limit:
                text = f"row {row} alone has {count} {name.replace('_', ' ')}, "
                text += f"limit {limit} (`limits.{name}`)"
                raise LimitExceeded(text, row=row, wanted=limit, got=count)

    def _named_counts(self, size: _Size) -> list[tuple[str, int, int]]:
        named = [("rows", size.rows, self.rows), ("bytes", size.bytes, self.bytes)]
        if self.string_bytes is not None:
            named.append(("string_bytes", size.string_bytes, self.string_bytes))
        return named


def _cut(
    batch: pa.RecordBatch, limits: _Limits, row: int, strings: Sequence[int]
) -> Iterator[_Part]:
    """Yield parts of a batch within the limits; `row` is the number of the batch's first row."""
    rows = batch.num_rows
    if rows <= limits.rows:
        part = _measure(batch, limits, strings)
        count = limits.parts_needed(part.size)
        if count <= 1:
            yield part
            return
        if rows == 1:
            limits.require_row(part.size, row)
        batch = part.batch
    else:
        count = -(-rows // limits.rows)
    length = -(-rows // min(count, rows))
    for start in range(0, rows, length):
        yield from _cut(batch.slice(start, length), limits, row + start, strings)


def _join_if_possible(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if len(batches) > 1:
        # Dictionaries may not fit one index type together, and some types cannot be joined.
        with contextlib.suppress(pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return [pa.concat_batches(batches)]
    return batches


def _measure(batch: pa.RecordBatch, limits: _Limits, strings: Sequence[int]) -> _Part:
    """Return a batch with its size; drop unused bytes of views if the batch is large."""
    size = _size(batch, strings)
    is_large = size.bytes > VIEW_BYTES_MIN or limits.parts_needed(size) > 1
    if is_large and any(_is_view(field.type) for field in batch.schema):
        columns = [_copy_own_values(column) for column in batch.columns]
        batch = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        size = _size(batch, strings)
    return _Part(batch, size)


def _size(batch: pa.RecordBatch, strings: Sequence[int]) -> _Size:
    """Return the rows of a batch, the bytes of its message, and the bytes of its strings."""
    message_bytes = pa.ipc.get_record_batch_size(batch)
    string_bytes = 0
    for index in strings:
        string_bytes += _string_bytes(batch.column(index))
    return _Size(batch.num_rows, message_bytes, string_bytes)


def string_columns(schema: pa.Schema) -> list[int]:
    """Return the indices of the columns that may contain strings, at any depth."""
    is_primitive = pa.types.is_primitive
    return [index for index, kind in enumerate(schema.types) if not is_primitive(kind)]


def _copy_own_values(column: Any) -> Any:  # noqa: ANN401
    """Return a column of views without the text or elements of other rows."""
    if is_list_view(column.type):
        return pa.concat_arrays([column])
    if not _is_text_view(column.type):
        return column
    plain = pa.large_utf8() if pa.types.is_string_view(column.type) else pa.large_binary()
    return column.cast(plain).cast(column.type)


def _is_view(kind: Any) -> bool:  # noqa: ANN401
    return _is_text_view(kind) or is_list_view(kind)


def _is_text_view(kind: Any) -> bool:  # noqa: ANN401
    return bool(pa.types.is_string_view(kind) or pa.types.is_binary_view(kind))


def _string_bytes(array: Any) -> int:  # noqa: ANN401
    """Return the bytes of an array's decoded strings at any depth; a little more for views."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _string_bytes(array.storage)
    if _is_text(kind):
        return int(pc.sum(pc.binary_length(array)).as_py() or 0)
    if _is_text_view(kind):
        return int(array.nbytes)
    if pa.types.is_dictionary(kind):
        return _dictionary_string_bytes(array)
    return sum(map(_string_bytes, _children(array)))


def _children(array: Any) -> list[Any]:  # noqa: ANN401
    """Return the values of a list, the decoded values of runs, or the fields of a map or struct."""
    kind = array.type
    if pa.types.is_run_end_encoded(kind):
        return [] if pa.types.is_primitive(kind.value_type) else [pc.run_end_decode(array)]
    if pa.types.is_union(kind) or not kind.num_fields:
        return []
    if pa.types.is_map(array.type):
        start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
        return [child.slice(start, end - start) for child in (array.keys, array.items)]
    children = array.flatten()
    return children if isinstance(children, list) else [children]


def _dictionary_string_bytes(array: Any) -> int:  # noqa: ANN401
    values = _plain_text(array.dictionary)
    if values is None:
        return 0
    lengths = pc.binary_length(values)
    return int(pc.sum(lengths.take(array.indices).cast(pa.int64())).as_py() or 0)


def _plain_text(values: Any) -> Any | None:  # noqa: ANN401
    """Return text in a layout whose lengths pyarrow can compute; None if it is no text."""
    if _is_text_view(values.type):
        return values.cast(pa.large_binary())
    return values if _is_text(values.type) else None


def _is_text(kind: Any) -> bool:  # noqa: ANN401
    return kind in (pa.utf8(), pa.large_utf8(), pa.binary(), pa.large_binary())
