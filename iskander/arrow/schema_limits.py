"""Limits of a schema, checked in its header before pyarrow builds its types.

A field of a few bytes can describe much more: tables and texts of a flatbuffer may be used several
times, and a decimal's scale is an exponent. So the header is walked first: each use of a field
counts, and the walk ends at the first limit.

Runs on: gateway loop, and the threads that build plans. Source: Arrow columnar format 1.5,
Schema.fbs.
"""

from __future__ import annotations

import struct
from typing import Final

from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput

_FIELDS, _SCHEMA_METADATA = 1, 2
_NAME, _TYPE_KIND, _TYPE, _CHILDREN, _METADATA = 0, 2, 3, 5, 6
_KEY, _VALUE = 0, 1
_DECIMAL, _TIMESTAMP, _UNION, _FIXED_BINARY, _FIXED_LIST, _RUN_ENDS = 7, 10, 14, 15, 16, 22
_PRECISION, _SCALE, _DECIMAL_BITS = 0, 1, 2
_TIME_ZONE, _TYPE_IDS = 1, 1
_DEFAULT_BITS: Final = 128
DECIMAL_DIGITS: Final = {32: 9, 64: 18, 128: 38, 256: 76}
"""Largest precision of a decimal by its bits. Source: Arrow, type.h."""
SCALE_MAX: Final = 38
"""Digits of a decimal's scale, in both directions; 76 for `decimal256`."""
PAIR_BYTES: Final = 8
"""Counted for each pair of metadata in addition to its texts."""
NAME_CHARACTERS: Final = 100
"""Part of a column's name in an error."""


def require_schema_limits(header: bytes, limits: LimitsConfig) -> None:
    """Check the header of a schema message.

    Raises:
        LimitExceeded: The schema has too many columns, fields, levels or bytes of metadata.
        MalformedInput: A size, precision or scale is invalid, or parts of the header overlap.
    """
    message = ipc.read_message(header)
    try:
        _Walk(header, limits).schema(message.table)
    except (struct.error, IndexError):
        raise MalformedInput("the schema header is truncated") from None


class _Walk:
    """One walk over the fields of a header; raises `struct.error` outside it."""

    def __init__(self, header: bytes, limits: LimitsConfig) -> None:
        self._header = header
        self._limits = limits
        self._column = ""
        self._fields = self._metadata_bytes = self._text_bytes = 0

    def schema(self, table: int) -> None:
        """Check a schema."""
        limits = self._limits
        fields = ipc.read_tables(self._header, table, _FIELDS, limits.columns)
        if fields is None:
            count = ipc.vector_length(self._header, table, _FIELDS)
            text = f"the batch has {count} columns, limit {limits.columns} (`limits.columns`)"
            raise LimitExceeded(text, wanted=limits.columns)
        self._metadata(table, _SCHEMA_METADATA)
        for field in fields:
            self._column = self._text(field, _NAME)[:NAME_CHARACTERS]
            self._field(field, 1, 1)

    def _field(self, field: int, level: int, depth: int) -> None:
        """Check a field; run-end encoding is a `level`, but adds no `depth`."""
        header, limits = self._header, self._limits
        self._fields += 1
        if self._fields > limits.fields:
            text = (
                f"the schema has more than {limits.fields} fields at all depths (`limits.fields`)"
            )
            raise LimitExceeded(text, wanted=limits.fields)
        if depth > limits.nesting or level > 2 * limits.nesting:
            limit = f"{limits.nesting} levels of nesting (`limits.nesting`)"
            text = f"column `{self._column}` has more than {limit}"
            raise LimitExceeded(text, column=self._column)
        if level > 1:
            self._text(field, _NAME)
        self._metadata(field, _METADATA)
        kind = ipc.read_number(header, field, _TYPE_KIND, "<B")
        if kind in (_DECIMAL, _TIMESTAMP, _UNION, _FIXED_BINARY, _FIXED_LIST):
            self._type(kind, ipc.read_table(header, field, _TYPE))
        children = ipc.read_tables(header, field, _CHILDREN, limits.fields)
        if children is None:
            count = ipc.vector_length(header, field, _CHILDREN)
            text = f"column `{self._column}` has a type of {count} fields"
            text += f", limit {limits.fields} (`limits.fields`)"
            raise LimitExceeded(text, column=self._column, wanted=limits.fields)
        if kind != _RUN_ENDS:
            depth += 1
        for child in children:
            self._field(child, level + 1, depth)

    def _type(self, kind: int, table: int) -> None:
        header, column = self._header, self._column
        if kind == _TIMESTAMP:
            self._text(table, _TIME_ZONE)
        elif kind == _UNION:
            self._count(4 * ipc.vector_length(header, table, _TYPE_IDS))
        elif kind == _DECIMAL:
            bits = ipc.read_number(header, table, _DECIMAL_BITS, "<i", _DEFAULT_BITS)
            self._decimal(
                bits,
                ipc.read_number(header, table, _PRECISION, "<i"),
                ipc.read_number(header, table, _SCALE, "<i"),
            )
        elif ipc.read_number(header, table, 0, "<i") < 0:
            what = "lists" if kind == _FIXED_LIST else "binary values"
            text = f"column `{column}` has {what} of a negative size"
            raise MalformedInput(text, column=column)

    def _decimal(self, bits: int, precision: int, scale: int) -> None:
        digits = DECIMAL_DIGITS.get(bits, 0)
        scale_max = max(digits, SCALE_MAX)
        if not 1 <= precision <= digits:
            text = f"has decimals of {bits} bits with precision {precision}, limits 1 and {digits}"
        elif not -scale_max <= scale <= scale_max:
            text = f"has decimals of {bits} bits with scale {scale}"
            text += f", limits -{scale_max} and {scale_max}"
        else:
            return
        raise MalformedInput(f"column `{self._column}` {text}", column=self._column)

    def _metadata(self, table: int, slot: int) -> None:
        """Count the custom metadata of a schema or field."""
        limit = self._limits.schema_metadata_bytes
        pairs = ipc.read_tables(self._header, table, slot, len(self._header) // 8)
        if pairs is None:
            raise struct.error
        for pair in pairs:
            self._metadata_bytes += PAIR_BYTES
            for part in (_KEY, _VALUE):
                size = ipc.vector_length(self._header, pair, part)
                self._count(size)
                self._metadata_bytes += size
            if self._metadata_bytes > limit:
                text = f"the metadata of the schema and its fields has more than {limit} bytes"
                raise LimitExceeded(f"{text} (`limits.schema_metadata_bytes`)", wanted=limit)

    def _text(self, table: int, slot: int) -> str:
        raw = ipc.read_text(self._header, table, slot)
        self._count(len(raw))
        return raw.decode(errors="replace")

    def _count(self, size: int) -> None:
        """Count the bytes of a text or vector: pyarrow copies them at each use."""
        self._text_bytes += size
        if self._text_bytes > len(self._header):
            raise MalformedInput("parts of the schema header overlap: each needs its own bytes")
