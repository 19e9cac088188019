"""Limits of a schema, checked in its header before pyarrow builds its types.

A short header can describe a very large schema: a flatbuffer may refer to one table or text several
times, and a decimal's scale is an exponent. So the fields are visited in the header first. A field
counts at each reference to it, and the visit ends at the first exceeded limit.

Runs on: gateway loop, and the threads that build plans. Source: Arrow columnar format 1.5,
Schema.fbs.
"""

from __future__ import annotations

import struct
from typing import Final

from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.errors import ContractError, LimitExceeded, MalformedInput

_FIELDS, _SCHEMA_METADATA = 1, 2
_NAME, _TYPE_KIND, _TYPE, _CHILDREN, _METADATA = 0, 2, 3, 5, 6
_KEY, _VALUE = 0, 1
_DECIMAL, _TIMESTAMP, _UNION, _FIXED_BINARY, _FIXED_LIST, _RUN_ENDS = 7, 10, 14, 15, 16, 22
_INTERVAL, _MONTH_DAY_NANO = 11, 2
_PRECISION, _SCALE, _DECIMAL_BITS = 0, 1, 2
_TIME_ZONE, _TYPE_IDS = 1, 1
_DEFAULT_BITS: Final = 128
DECIMAL_DIGITS: Final = {32: 9, 64: 18, 128: 38, 256: 76}
"""Largest precision of a decimal by its bits. Source: Arrow, type.h."""
SCALE_MAX: Final = 38
"""Digits of a decimal's scale, in both directions; 76 for `decimal256`."""
PAIR_BYTES: Final = 8
"""Bytes counted for each pair of metadata in addition to its texts."""
NAME_CHARACTERS: Final = 100
"""Characters of a column's name that an error shows."""


def require_schema_limits(header: bytes, limits: LimitsConfig) -> None:
    """Check the header of a schema message.

    Raises:
        LimitExceeded: The schema has too many columns, fields, levels or bytes of metadata.
        ContractError: A type has no arrays in pyarrow.
        MalformedInput: A size, precision or scale is invalid, or parts of the header overlap.
    """
    message = ipc.read_message(header)
    try:
        _SchemaVisit(header, limits).check_schema(message.table)
    except (struct.error, IndexError):
        raise MalformedInput("the schema header is truncated") from None


class _SchemaVisit:
    """One visit of all fields; raises `struct.error` for a reference out of the header."""

    def __init__(self, header: bytes, limits: LimitsConfig) -> None:
        self._header = header
        self._limits = limits
        self._column = ""
        self._fields = self._metadata_bytes = self._text_bytes = 0

    def check_schema(self, table: int) -> None:
        """Check the schema at this position of the header."""
        limits = self._limits
        fields = ipc.read_tables(self._header, table, _FIELDS, limits.columns)
        if fields is None:
            count = ipc.vector_length(self._header, table, _FIELDS)
            text = f"the batch has {count} columns, limit {limits.columns} (`limits.columns`)"
            raise LimitExceeded(text, wanted=limits.columns)
        self._check_metadata(table, _SCHEMA_METADATA)
        for field in fields:
            self._column = self._read_text(field, _NAME)[:NAME_CHARACTERS]
            self._check_field(field, 1, 1)

    def _check_field(self, field: int, level: int, depth: int) -> None:
        """Check a field and its children.

        `level` counts the fields from the column to this one; `depth` does not count those of
        run-end encoding.
        """
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
            self._read_text(field, _NAME)
        self._check_metadata(field, _METADATA)
        kind = ipc.read_number(header, field, _TYPE_KIND, "<B")
        if kind in (_DECIMAL, _TIMESTAMP, _INTERVAL, _UNION, _FIXED_BINARY, _FIXED_LIST):
            self._check_type(kind, ipc.read_table(header, field, _TYPE))
        children = ipc.read_tables(header, field, _CHILDREN, limits.fields)
        if children is None:
            count = ipc.vector_length(header, field, _CHILDREN)
            text = f"column `{self._column}` has a type of {count} fields"
            text += f", limit {limits.fields} (`limits.fields`)"
            raise LimitExceeded(text, column=self._column, wanted=limits.fields)
        if kind == _UNION and not children:
            text = f"column `{self._column}` has a union without fields, which has no arrays here"
            raise ContractError(text, column=self._column)
        if kind != _RUN_ENDS:
            depth += 1
        for child in children:
            self._check_field(child, level + 1, depth)

    def _check_type(self, kind: int, table: int) -> None:
        """Check the parameters of a type."""
        header, column = self._header, self._column
        if kind == _TIMESTAMP:
            self._read_text(table, _TIME_ZONE)
        elif kind == _INTERVAL:
            if ipc.read_number(header, table, 0, "<h") != _MONTH_DAY_NANO:
                text = f"column `{column}` has intervals of months, or of days and milliseconds"
                text += ", which have no arrays here; send intervals of months, days and ns"
                raise ContractError(text, column=column)
        elif kind == _UNION:
            self._count_bytes(4 * ipc.vector_length(header, table, _TYPE_IDS))
        elif kind == _DECIMAL:
            bits = ipc.read_number(header, table, _DECIMAL_BITS, "<i", _DEFAULT_BITS)
            self._check_decimal(
                bits,
                ipc.read_number(header, table, _PRECISION, "<i"),
                ipc.read_number(header, table, _SCALE, "<i"),
            )
        elif ipc.read_number(header, table, 0, "<i") < 0:
            what = "lists" if kind == _FIXED_LIST else "binary values"
            text = f"column `{column}` has {what} of a negative size"
            raise MalformedInput(text, column=column)

    def _check_decimal(self, bits: int, precision: int, scale: int) -> None:
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

    def _check_metadata(self, table: int, slot: int) -> None:
        """Count and check the custom metadata of a schema or field."""
        limit = self._limits.schema_metadata_bytes
        pairs = ipc.read_tables(self._header, table, slot, len(self._header) // 8)
        if pairs is None:
            raise struct.error  # The header is too short for so many pairs.
        for pair in pairs:
            self._metadata_bytes += PAIR_BYTES
            for part in (_KEY, _VALUE):
                size = ipc.vector_length(self._header, pair, part)
                self._count_bytes(size)
                self._metadata_bytes += size
            if self._metadata_bytes > limit:
                text = f"the metadata of the schema and its fields has more than {limit} bytes"
                raise LimitExceeded(f"{text} (`limits.schema_metadata_bytes`)", wanted=limit)

    def _read_text(self, table: int, slot: int) -> str:
        """Read a text and count its bytes."""
        raw = ipc.read_text(self._header, table, slot)
        self._count_bytes(len(raw))
        return raw.decode(errors="replace")

    def _count_bytes(self, size: int) -> None:
        """Count the bytes of a text or vector: pyarrow copies them at each use."""
        self._text_bytes += size
        if self._text_bytes > len(self._header):
            raise MalformedInput("parts of the schema header overlap: each needs its own bytes")
