"""The Arrow type in which a column is sent, where it need not be the tensor's own.

What differs only in its encoding is one type here: a list is one by 32-bit or 64-bit offsets or as
a view, text has three layouts, a dictionary or runs stand for their values.

Pure. Source: Arrow columnar format 1.5, Schema.fbs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from iskander.contract.columns import parse_column_type
from iskander.contract.dtypes import BY_ARROW
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
