"""The Arrow type of a column that holds a tensor, and how manifests spell it.

Source: Arrow columnar format 1.5 (fixed-size list, `arrow.fixed_shape_tensor`).
"""

from __future__ import annotations

import re
from functools import cached_property

import msgspec

from iskander.contract.dtypes import BY_ARROW, Dtype
from iskander.errors import ManifestError

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
