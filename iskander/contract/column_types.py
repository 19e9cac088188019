"""Arrow types of columns that hold tensors, and their spelling in manifests.

Source: Arrow columnar format 1.5 (fixed-size list, `arrow.fixed_shape_tensor`).
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import msgspec

from iskander.contract.dtypes import BY_ARROW, Dtype
from iskander.contract.validation import require

NUMBER = "number"
"""Any numeric type, and booleans."""
TEMPORAL = ("date", "time", "timestamp", "duration")
DECIMAL = "decimal"
RANK_MAX = 16
CHARACTERS_MAX = 1024
"""Maximum length of a type's text; the expressions below take quadratic time."""
SIZE_DIGITS_MAX = 9
NOT_IN_TENSORS = ("bfloat16", "binary", "utf8")
"""Element types that Arrow's `fixed_shape_tensor` cannot have; Arrow has no bfloat16."""

_LIST = re.compile(r"(?:large_)?list(?:_view)?<(.*)>")
_SIZED = re.compile(r"((?:fixed_size_list<\s*)*)(.*?)((?:\s*>\s*\[\s*\d+\s*\])*)", re.S)
_CONVERTED = re.compile(
    r"date|date32|date64|time|time32\[(?:s|ms)\]|time64\[(?:us|ns)\]"
    r"|(?:timestamp|duration)(?:\[(?:s|ms|us|ns)\])?"
    r"|decimal|decimal(?:32|64|128|256)\(\s*\d+\s*,\s*-?\d+\s*\)"
)


class SentType(NamedTuple):
    """A column's type as a manifest declares it.

    Attributes:
        element: Type of the innermost values: an Arrow name of `dtypes`, `number`, or a type that
            needs conversion, such as `timestamp` or `decimal128(10, 2)`.
        shape: Shape of one element of a list, or of one row.
        is_ragged: Each row is a list of variable length.
        is_tensor: The column is a `fixed_shape_tensor`.
    """

    element: str
    shape: tuple[int, ...] = ()
    is_ragged: bool = False
    is_tensor: bool = False

    @property
    def family(self) -> str:
        """`date`, `time`, `timestamp`, `duration` or `decimal`; empty for any other type."""
        return _family(self.element)

    @property
    def is_text(self) -> bool:
        """Whether the values are strings."""
        return self.element in ("utf8", "binary")

    def __str__(self) -> str:
        text = _type_text(self.element, self.shape, self.is_tensor)
        return f"list<{text}>" if self.is_ragged else text

    def admits(self, element: str) -> bool:
        """Return whether a column with these innermost values is accepted."""
        if self.element == NUMBER:
            return element in BY_ARROW and bool(BY_ARROW[element].arrow_bits)
        if self.is_text:
            return element in ("utf8", "binary")
        return self.element in (element, _family(element))


class ColumnType(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The Arrow type of a column that holds a tensor: element type and shape of one row.

    Shape:
        `()` for a primitive column; one entry a level for nested fixed-size lists; the tensor's
        own shape for `fixed_shape_tensor`. Rows are not counted.
    """

    dtype_name: str
    shape: tuple[int, ...] = ()
    is_tensor: bool = False

    @cached_property
    def dtype(self) -> Dtype:
        """The element type's entry in `dtypes`."""
        return BY_ARROW[self.dtype_name]

    def __str__(self) -> str:
        return _type_text(self.dtype_name, self.shape, self.is_tensor)


def parse_sent_type(text: str) -> SentType:
    """Parse the type of a sent column."""
    _require_short(text)
    inner, is_ragged = text.strip(), False
    if match := _LIST.fullmatch(inner):
        inner, is_ragged = match[1].strip(), True
        require(not _LIST.fullmatch(inner), f"`{text}` is a list of lists, which is not supported")
    sized = _SIZED.fullmatch(inner)
    assert sized is not None
    element = sized[2].strip()
    if element == NUMBER or _CONVERTED.fullmatch(element):
        shape = parse_column_type(f"{sized[1]}int8{sized[3]}").shape
        return SentType(re.sub(r"\s*,\s*", ", ", element), shape, is_ragged)
    if element == "bool8":
        inner = f"{sized[1]}bool{sized[3]}"
    parsed = parse_column_type(inner)
    return SentType(parsed.dtype_name, parsed.shape, is_ragged, parsed.is_tensor)


def parse_column_type(text: str) -> ColumnType:
    """Parse a column type: `float32`, `fixed_size_list<float32>[64]`, ..."""
    _require_short(text)
    sizes: list[int] = []
    inner, is_tensor = text.strip(), False
    if match := re.fullmatch(r"fixed_shape_tensor<\s*(\w+)\s*>\s*\[([^\[\]]*)\]", inner):
        inner, is_tensor = match[1], True
        sizes = [_parse_size(part, text) for part in match[2].split(",")]
        is_supported = inner in BY_ARROW and inner not in NOT_IN_TENSORS
        require(is_supported, f"element type `{inner}` of `{text}` is not supported")
    else:
        while match := re.fullmatch(r"fixed_size_list<(.*)>\s*\[\s*(\d+)\s*\]", inner):
            sizes.append(_parse_size(match[2], text))
            inner = match[1].strip()
        nested = "fixed_size_list<TYPE>[N] to any depth and fixed_shape_tensor<TYPE>[A, B]"
        supported = f"supported are {', '.join(BY_ARROW)}, {nested}"
        problem = f"Arrow type `{text}` is not supported for a tensor; {supported}"
        require(inner in BY_ARROW, problem)
    is_valid = all(sizes) and len(sizes) <= RANK_MAX
    require(is_valid, f"`{text}` has a size of 0, or more than {RANK_MAX} axes")
    return ColumnType(inner, tuple(sizes), is_tensor)


def _require_short(text: str) -> None:
    problem = f"type `{text[:100]}` has {len(text)} characters, limit {CHARACTERS_MAX}"
    require(len(text) <= CHARACTERS_MAX, problem)


def _parse_size(part: str, text: str) -> int:
    part = part.strip()
    is_size = part.isascii() and part.isdecimal() and len(part) <= SIZE_DIGITS_MAX
    require(is_size, f"`{text}` has the size `{part}`, expected a whole number of elements")
    return int(part)


def _type_text(element: str, shape: tuple[int, ...], is_tensor: bool) -> str:
    if is_tensor:
        return f"fixed_shape_tensor<{element}>[{', '.join(map(str, shape))}]"
    for size in reversed(shape):
        element = f"fixed_size_list<{element}>[{size}]"
    return element


def _family(element: str) -> str:
    word = re.sub("[^a-z].*", "", element)
    return word if word in (*TEMPORAL, DECIMAL) else ""
