"""The Arrow type of a column that holds a tensor, and how manifests spell it.

Source: Arrow columnar format 1.5 (fixed-size list, `arrow.fixed_shape_tensor`).
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import NamedTuple

import msgspec

from iskander.contract.dtypes import BY_ARROW, Dtype
from iskander.errors import ManifestError

NUMBER = "number"
"""Any type of numbers, and booleans."""
TEMPORAL = ("date", "time", "timestamp", "duration")
DECIMAL = "decimal"

_LIST = re.compile(r"(?:large_)?list(?:_view)?<(.*)>")
_SIZED = re.compile(r"((?:fixed_size_list<\s*)*)(.*?)((?:\s*>\s*\[\s*\d+\s*\])*)")
_CONVERTED = re.compile(
    r"date|date32|date64|time|time32\[(?:s|ms)\]|time64\[(?:us|ns)\]"
    r"|(?:timestamp|duration)(?:\[(?:s|ms|us|ns)\])?"
    r"|decimal|decimal(?:32|64|128|256)\(\s*\d+\s*,\s*-?\d+\s*\)"
)


class SentType(NamedTuple):
    """A column's type as a manifest declares it.

    Attributes:
        element: Of the innermost values: a line of the table, `number`, or a type that has to be
            converted, such as `timestamp` or `decimal128(10, 2)`.
        shape: Of one element of a list, or of one row.
        is_ragged: Each row is a list of a length of its own.
        is_tensor: It is a `fixed_shape_tensor`.
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
        """Whether its values are strings."""
        return self.element in ("utf8", "binary")

    def __str__(self) -> str:
        text = self.element
        if self.is_tensor:
            text = f"fixed_shape_tensor<{text}>[{', '.join(map(str, self.shape))}]"
        else:
            for size in reversed(self.shape):
                text = f"fixed_size_list<{text}>[{size}]"
        return f"list<{text}>" if self.is_ragged else text

    def admits(self, element: str) -> bool:
        """Whether a column of these innermost values may be sent."""
        if self.element == NUMBER:
            return element in BY_ARROW and bool(BY_ARROW[element].arrow_bits)
        if self.is_text:
            return element in ("utf8", "binary")
        return self.element in (element, _family(element))


def parse_sent_type(text: str) -> SentType:
    """Read a type as manifests spell it.

    Raises:
        ManifestError: The spelling is unknown, or the type is not supported.
    """
    inner, is_ragged = text.strip(), False
    if match := _LIST.fullmatch(inner):
        inner, is_ragged = match[1].strip(), True
        if _LIST.fullmatch(inner):
            raise ManifestError(f"`{text}` is a list of lists, which is not supported")
    sized = _SIZED.fullmatch(inner)
    assert sized is not None
    element = sized[2].strip()
    if element == NUMBER or _CONVERTED.fullmatch(element):
        shape = parse_column_type(f"{sized[1]}int8{sized[3]}").shape
        return SentType(re.sub(r"\s*,\s*", ", ", element), shape, is_ragged)
    if element == "bool8":
        inner = f"{sized[1]}bool{sized[3]}"
    plain = parse_column_type(inner)
    return SentType(plain.dtype_name, plain.shape, is_ragged, plain.is_tensor)


def _family(element: str) -> str:
    word = re.sub("[^a-z].*", "", element)
    return word if word in (*TEMPORAL, DECIMAL) else ""


RANK_MAX = 16
SIZE_DIGITS_MAX = 9

NOT_IN_TENSORS = ("bfloat16", "binary", "utf8")
"""Arrow's `fixed_shape_tensor` holds numbers that Arrow itself knows."""


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
        """The element type's line in the table."""
        return BY_ARROW[self.dtype_name]

    def __str__(self) -> str:
        if self.is_tensor:
            return f"fixed_shape_tensor<{self.dtype_name}>[{', '.join(map(str, self.shape))}]"
        text = self.dtype_name
        for size in reversed(self.shape):
            text = f"fixed_size_list<{text}>[{size}]"
        return text


def parse_column_type(text: str) -> ColumnType:
    """Read a type as manifests spell it: `float32`, `fixed_size_list<float32>[64]`, ...

    Raises:
        ManifestError: The spelling is unknown, or the type is not supported.
    """
    sizes: list[int] = []
    inner = text.strip()
    if match := re.fullmatch(r"fixed_shape_tensor<\s*(\w+)\s*>\s*\[([^\[\]]*)\]", inner):
        shape = tuple(_size(part, text) for part in match[2].split(","))
        has_tensor = match[1] in BY_ARROW and match[1] not in NOT_IN_TENSORS
        _require(has_tensor, f"element type `{match[1]}` of `{text}` is not supported")
        _require(all(shape) and len(shape) <= RANK_MAX, f"`{text}` has an empty or absurd shape")
        return ColumnType(match[1], shape, is_tensor=True)
    while match := re.fullmatch(r"fixed_size_list<(.*)>\s*\[\s*(\d+)\s*\]", inner):
        sizes.append(_size(match[2], text))
        inner = match[1].strip()
    _require(
        inner in BY_ARROW,
        f"Arrow type `{text}` is not supported for a tensor; supported are "
        f"{', '.join(BY_ARROW)}, fixed_size_list<TYPE>[N] to any depth and "
        "fixed_shape_tensor<TYPE>[A, B]",
    )
    _require(all(sizes) and len(sizes) <= RANK_MAX, f"`{text}` has an empty or absurd shape")
    return ColumnType(inner, tuple(sizes))


def _size(part: str, text: str) -> int:
    part = part.strip()
    is_size = part.isascii() and part.isdecimal() and len(part) <= SIZE_DIGITS_MAX
    _require(is_size, f"`{text}` has the size `{part}`, wanted a whole number of elements")
    return int(part)


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ManifestError(message)
