"""Types of columns whose values are text: columns of CSV files and of hive folders.

All values decide about the type of a column, before the first row is scored. A column that no model
reads gets a type only if every value survives the conversion: converting it back gives the same
text, except for spellings of a boolean or a time, and for trailing zeros that all values have.
Otherwise the column stays text. A column that a model reads gets the kind of type that the model
wants; a value that has not this type is an error with file, row and value.

Runs in: the operator's tool and reader processes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from iskander.errors import SourceError

NULLS: Final = (
    "", "#N/A", "#N/A N/A", "#NA", "N/A", "NA", "NULL", "n/a", "null"
)  # fmt: skip
"""Texts that stand for a missing value, in columns that are not text."""
VALUE_CHARACTERS_MAX: Final = 100
"""Limit of the characters of a value in an error."""
_BOOLS: Final = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"])
_SECONDS: Final = pa.timestamp("s"), pa.timestamp("s", "UTC")
_NANOSECONDS: Final = pa.timestamp("ns"), pa.timestamp("ns", "UTC")
_CALENDAR: Final = (pa.date32(), *_SECONDS, *_NANOSECONDS)
_UNREAD: Final = (
    pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), *_SECONDS, *_NANOSECONDS, pa.float64(),
    pa.string(), pa.binary(),
)  # fmt: skip
"""Types for a column that no model reads; the column gets the first that fits all values."""
HIVE: Final = (pa.int64(), pa.string())
"""Types for a column of hive folders that no model reads."""
_FLOATS: Final = {
    "halffloat": ("float16", "e", 2**11),
    "float": ("float32", "f", 2**24),
    "double": ("float64", "d", 2**53),
}
"""Manifest name, `struct` format, and largest exact integer of floating-point types, by Arrow
name."""
_INTEGER: Final = r"^-?[0-9]+$"
_NUMBER: Final = r"^-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?$"
_NOT_FINITE: Final = r"^[+-]?(?i:nan|inf|infinity)$"
_TRAILING_ZERO: Final = r"\.[0-9]+0$"
_TIME: Final = r"^([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]$"
_TIMESTAMP: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,9})?"
_DIGITS_KEPT: Final = 15
"""Number of decimal digits that float64 always keeps."""
_INTEGERS_KEPT: Final = 2048.0
"""Integers below this number are exact in all floating-point types."""


class _Reason(NamedTuple):
    """The first value that does not fit a type; `row` is None for the value of a hive folder."""

    path: str
    row: int | None
    text: str


class Column:
    """Type inference for one column of text, whose values are added in parts.

    Args:
        name: Name of the column.
        wanted: Type of the model's input; None if no model reads the column.
        unread: Types to try if no model reads the column.
    """

    def __init__(
        self, name: str, wanted: pa.DataType | None, unread: Sequence[pa.DataType] = _UNREAD
    ) -> None:
        self.name = name
        self._wanted = wanted
        self._kinds = list(unread if wanted is None else _types_to_try(wanted))
        self._has_values = False
        self._reasons: dict[pa.DataType, _Reason] = {}
        # For a column that no model reads: fewest and most digits of a value after the decimal
        # point, and whether a value has a trailing zero.
        self._decimals: tuple[int, int] | None = None
        self._has_zeros = False

    @property
    def type(self) -> pa.DataType:
        """Type that all added values fit."""
        if not self._has_values:
            return pa.string() if self._wanted is None else self._wanted
        is_mixed = self._decimals is not None and self._decimals[0] != self._decimals[1]
        if self._kinds[0] == pa.float64() and self._has_zeros and is_mixed:
            return self._kinds[1]  # A float would lose the trailing zeros, which not all have.
        return self._kinds[0]

    def add(self, raw: pa.Array, path: str, first_row: int | None) -> None:
        """Add values.

        Args:
            raw: Values as bytes; null is a missing value.
            path: File, for errors.
            first_row: Row of the first value in the file; None for the value of a folder.

        Raises:
            SourceError: A value has not the wanted type.
        """
        if self._kinds == [pa.binary()]:
            self._has_values = self._has_values or len(raw) > 0
            return
        try:
            text = raw.cast(pa.string())
        except pa.ArrowInvalid:
            self._become_bytes(raw, path, first_row)
            return
        nulls = NULLS[:1] if self._wanted is None else NULLS
        is_value = pc.fill_null(pc.invert(pc.is_in(text, value_set=pa.array(nulls))), False)
        if self._kinds == [pa.string()]:
            self._has_values = True
            return
        is_all = pc.all(is_value, min_count=0).as_py()
        values = text if is_all else text.filter(is_value)
        if not len(values):
            return
        self._has_values = True
        kept = self._fitting(values)
        if kept != self._kinds and self._wanted is not None:
            rows = None if is_all else pc.indices_nonzero(is_value)
            reasons: list[_Reason] = []
            for kind in self._kinds:
                if kind not in kept:
                    index = self._first_unfit(kind, values)
                    row = index if rows is None else rows[index].as_py()
                    row = None if first_row is None else first_row + row
                    reasons.append(_Reason(path, row, values[index].as_py()))
                    self._reasons[kind] = reasons[-1]
            if not kept:
                raise self._error(max(reasons, key=lambda each: each.row or 0))
        self._kinds = kept
        if self._wanted is None and kept[0] == pa.float64():
            self._count_decimals(values)

    def join(self, other: Column, path: str, first_path: str) -> None:
        """Add the values of the same column in another file.

        Raises:
            SourceError: No type fits the values of both files.
        """
        if not other._has_values:
            return
        before, had_values = self.type, self._has_values
        self._has_values = True
        self._kinds = [kind for kind in self._kinds if kind in other._kinds]
        if not self._kinds:
            name = _type_name(self._wanted) if self._wanted is not None else "one type"
            earlier = _type_name(before) if had_values else "none"
            got = _type_name(other.type)
            raise SourceError(
                f"{path}: column {self.name!r} has {got}, but {earlier} in {first_path}; wanted "
                f"{name} in all files",
                file=path,
                column=self.name,
            )
        self._has_zeros = self._has_zeros or other._has_zeros
        spans = [column._decimals for column in (self, other) if column._decimals is not None]
        if spans:
            self._decimals = min(a for a, _ in spans), max(b for _, b in spans)

    def _fitting(self, values: pa.Array) -> list[pa.DataType]:
        """Return the types that these values fit, of the types that all earlier values fit."""
        kept: list[pa.DataType] = []
        # A failing cast visits all values and describes every error, so one value is tried first.
        first = values.slice(0, 1)
        for kind in self._kinds:
            if not self._fits(kind, first):
                continue
            is_sure = kind == pa.float64() and pa.int64() in kept and self._are_small(values)
            if is_sure or self._fits(kind, values):
                kept.append(kind)
        return kept

    def _are_small(self, values: pa.Array) -> bool:
        """Whether the integers are exact in the floating-point type that the column may get."""
        parsed = _parse(pa.int64(), values)
        if parsed is None:
            return False
        limit = _FLOATS.get(str(self._wanted), _FLOATS["double"])[2]
        found = pc.min_max(parsed).as_py()
        return bool(-limit <= found["min"] and found["max"] <= limit)

    def _fits(self, kind: pa.DataType, values: pa.Array) -> bool:
        """Whether all values fit a type; no value is missing."""
        if self._wanted is None:
            return _survive_conversion(kind, values)
        return _are_read_as(kind, values, self._wanted)

    def _first_unfit(self, kind: pa.DataType, values: pa.Array) -> int:
        """Return the index of the first value that does not fit a type, by bisection."""
        start, end = 0, len(values)
        while end - start > 1:
            middle = (start + end) // 2
            if self._fits(kind, values.slice(start, middle - start)):
                start = middle
            else:
                end = middle
        return start

    def _count_decimals(self, values: pa.Array) -> None:
        points = pc.find_substring(values, ".")
        counts = pc.subtract(pc.subtract(pc.binary_length(values), points), 1)
        found = pc.min_max(pc.if_else(pc.less(points, 0), 0, counts)).as_py()
        low, high = self._decimals or (found["min"], found["max"])
        self._decimals = min(low, found["min"]), max(high, found["max"])
        self._has_zeros = self._has_zeros or _any(pc.match_substring_regex(values, _TRAILING_ZERO))

    def _become_bytes(self, raw: pa.Array, path: str, first_row: int | None) -> None:
        """Make this a column of bytes, because a value is not UTF-8.

        An error if a model reads it.
        """
        self._has_values = True
        if self._wanted is None and pa.binary() in self._kinds:
            self._kinds = [pa.binary()]
            return
        for index, value in enumerate(raw):
            try:
                (value.as_py() or b"").decode()
            except UnicodeDecodeError:
                row = None if first_row is None else first_row + index
                reason = _Reason(path, row, repr(value.as_py())[2:-1])
                raise self._error(reason) from None

    def _error(self, reason: _Reason) -> SourceError:
        """Return the error for the value that no type fits.

        If all values are numbers, it names an earlier integer that no float represents exactly.
        """
        number = self._reasons.get(pa.float64())
        is_inexact = number is not None and number.text.strip().lstrip("-").isdigit()
        if is_inexact and _is_float(reason.text):
            assert number is not None
            reason = number
        wanted = _type_name(self._wanted)
        value = reason.text[:VALUE_CHARACTERS_MAX]
        where = "its folder" if reason.row is None else f"row {reason.row}"
        text = f"{reason.path}: column {self.name!r}: {where} has {value!r}"
        if is_inexact and reason is number:
            text += f", which {wanted} cannot represent exactly"
        else:
            text += f"; wanted {wanted}"
        return SourceError(
            text, file=reason.path, column=self.name, row=reason.row, expected=wanted, got=value
        )


def _types_to_try(wanted: pa.DataType) -> tuple[pa.DataType, ...]:
    """Return the types to try for a model's input; the first that fits all values is used."""
    if pa.types.is_string(wanted) or pa.types.is_large_string(wanted):
        return (pa.string(),)
    if pa.types.is_boolean(wanted) or pa.types.is_integer(wanted) or pa.types.is_floating(wanted):
        large = (wanted,) if wanted == pa.uint64() else ()
        return (pa.int64(), *large, pa.bool_(), pa.float64())
    if pa.types.is_date(wanted) or pa.types.is_timestamp(wanted):
        return (*_CALENDAR, *(() if wanted in _CALENDAR else (wanted,)))
    return (wanted,)


def _survive_conversion(kind: pa.DataType, values: pa.Array) -> bool:
    """Whether converting texts to a type and back gives the same texts, up to spelling."""
    if pa.types.is_boolean(kind):
        return _all(pc.is_in(values, value_set=_BOOLS))
    if pa.types.is_time(kind):
        return _all(pc.match_substring_regex(values, _TIME))
    parsed = _parse(kind, values)
    if parsed is None or pa.types.is_string(kind) or pa.types.is_binary(kind):
        return parsed is not None
    if pa.types.is_timestamp(kind):
        end = r"(Z|\+00:00)$" if kind.tz else "$"
        return _all(pc.match_substring_regex(values, _TIMESTAMP + end))
    is_same = pc.equal(parsed.cast(pa.string()), values)
    if _all(is_same):
        return True
    return pa.types.is_floating(kind) and _decimals_survive_conversion(
        values.filter(pc.invert(is_same))
    )


def _decimals_survive_conversion(values: pa.Array) -> bool:
    """Whether float64 keeps the values of texts that are not the shortest texts of a number."""
    is_number = pc.match_substring_regex(values, _NUMBER)
    if not _all(is_number):
        others = values.filter(pc.invert(is_number))
        if not _all(pc.match_substring_regex(others, _NOT_FINITE)):
            return False
        values = values.filter(is_number)
    long = values.filter(pc.greater(pc.binary_length(values), _DIGITS_KEPT))
    short = values.filter(pc.less_equal(pc.binary_length(values), _DIGITS_KEPT))
    if not _all(pc.is_finite(short.cast(pa.float64()))):
        return False
    return all(map(_is_kept, long.to_pylist()))


def _is_kept(text: str) -> bool:
    """Whether the float of a number has the same decimal value as the number."""
    try:
        return Decimal(text) == Decimal(repr(float(text)))
    except InvalidOperation:  # The exponent is out of the range of decimals.
        return False


def _are_read_as(kind: pa.DataType, values: pa.Array, wanted: pa.DataType) -> bool:
    """Whether all texts fit a type, for a model that wants the type `wanted` of this kind."""
    if pa.types.is_boolean(kind):
        return _all(pc.is_in(values, value_set=_BOOLS))
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    parsed = _parse(kind, values)
    if parsed is None and is_number:
        values = pc.utf8_trim(values, " \t")
        parsed = _parse(kind, values)
    if parsed is None:
        return False
    if pa.types.is_integer(kind):
        # Arrow also parses hexadecimal numbers, which are rejected here.
        odd = values.filter(pc.not_equal(parsed.cast(pa.string()), values))
        return _all(pc.match_substring_regex(odd, _INTEGER))
    if not pa.types.is_floating(kind):
        return True
    is_finite = pc.is_finite(parsed)
    if not _all(is_finite):
        endless = values.filter(pc.invert(is_finite))
        if not _all(pc.match_substring_regex(endless, _NOT_FINITE)):
            return False
    large = values.filter(pc.greater_equal(pc.abs(parsed), _INTEGERS_KEPT))
    integers = large.filter(pc.match_substring_regex(large, _INTEGER))
    format = _FLOATS.get(str(wanted), _FLOATS["double"])[1]
    return all(_is_exact(_integer(text), format) for text in integers.to_pylist())


def _parse(kind: pa.DataType, values: pa.Array) -> Any:  # noqa: ANN401
    """Return the texts converted to a type; None if a text does not fit it."""
    try:
        return values.cast(kind)
    except pa.ArrowNotImplementedError:
        # Only pyarrow's CSV reader converts text to this type.
        return values
    except pa.ArrowInvalid:
        return None


def _integer(text: str) -> int:
    """Return the integer of a text, without leading zeros, because Python limits the digits."""
    digits = int(text.lstrip("-0") or "0")
    return -digits if text.startswith("-") else digits


def _is_exact(number: int, format: str) -> bool:
    """Whether a float with this `struct` format can represent an integer exactly."""
    try:
        return int(struct.unpack(format, struct.pack(format, number))[0]) == number
    except OverflowError:
        return False


def _is_float(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def _all(flags: Any) -> bool:  # noqa: ANN401
    return bool(pc.all(flags, min_count=0).as_py())


def _any(flags: Any) -> bool:  # noqa: ANN401
    return bool(pc.any(flags, min_count=0).as_py())


def _type_name(kind: pa.DataType | None) -> str:
    """Return the name of a type in manifests."""
    text = str(kind)
    return _FLOATS.get(text, (text, ""))[0]
