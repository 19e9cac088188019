"""Arrow types of result columns: tensors, and lists and structs of tensors.

    fixed_size_list<struct<label: utf8, score: float32>>[5]    leaves  label  utf8     [5]
                                                                       score  float32  [5]

A leaf is one tensor. Its shape has the sizes of the enclosing lists, outermost first.

Pure. Source: Arrow columnar format 1.5 (list, fixed-size list and struct layouts).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from iskander.contract.column_types import RANK_MAX, ColumnType, parse_column_type
from iskander.contract.validation import require
from iskander.errors import ManifestError

_FIELD = re.compile(r"\s*([^<>\[\]:,.\s][^<>\[\]:,.]*?)\s*:")
_SIZE = re.compile(r"\s*\[\s*(?!0+\s*\])(\d{1,9})\s*\]", re.ASCII)
_END = re.compile(r"\s*>")
_COMMA = re.compile(r"\s*,")
_WORD = re.compile(r"\s*(\w+)\s*")


class Value(msgspec.Struct, frozen=True):
    """Type of the innermost values of a column; `dtype_name` is an Arrow name of `dtypes`."""

    dtype_name: str

    def __str__(self) -> str:
        return self.dtype_name


class ListOf(msgspec.Struct, frozen=True):
    """Type of a list in each row; `size` is None for a variable length."""

    item: ResultType
    size: int | None

    def __str__(self) -> str:
        if self.size is None:
            return f"list<{self.item}>"
        return f"fixed_size_list<{self.item}>[{self.size}]"


class StructOf(msgspec.Struct, frozen=True):
    """Type of a struct: its fields by name."""

    fields: tuple[tuple[str, ResultType], ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(f'{name}: {kind}' for name, kind in self.fields)}>"


ResultType = Value | ListOf | StructOf


class Leaf(NamedTuple):
    """One tensor of a column.

    Attributes:
        path: Names of the enclosing struct fields.
        sizes: Sizes of the enclosing lists, outermost first; None for a variable length.
    """

    path: tuple[str, ...]
    dtype_name: str
    sizes: tuple[int | None, ...]


def parse_result_type(text: str) -> ResultType | None:
    """Parse a type with a list or a struct; return None if one tensor is the whole column."""
    if not re.search(r"(?<!\w)(?:list|struct)\s*<", text):
        return None
    kind, end = _parse(text, 0, 0)
    if text[end:].strip():
        raise _syntax_error(text, end)
    return kind


def leaves_of(kind: ResultType | ColumnType) -> list[Leaf]:
    """Return every tensor of a column of this type, in field order."""
    if isinstance(kind, ListOf):
        return [leaf._replace(sizes=(kind.size, *leaf.sizes)) for leaf in leaves_of(kind.item)]
    if isinstance(kind, StructOf):
        return [
            leaf._replace(path=(name, *leaf.path))
            for name, field in kind.fields
            for leaf in leaves_of(field)
        ]
    return [Leaf((), kind.dtype_name, () if isinstance(kind, Value) else kind.shape)]


def _parse(text: str, at: int, depth: int) -> tuple[ResultType, int]:
    require(depth <= RANK_MAX, f"`{text}` is nested deeper than {RANK_MAX} levels")
    word = _match_at(_WORD, text, at)
    name, at = word[1], word.end()
    if not text.startswith("<", at):
        return Value(parse_column_type(name).dtype_name), at
    if name == "struct":
        return _parse_struct(text, at + 1, depth)
    if name not in ("list", "fixed_size_list"):
        raise _syntax_error(text, at)
    item, at = _parse(text, at + 1, depth + 1)
    at = _match_at(_END, text, at).end()
    if name == "list":
        return ListOf(item, None), at
    size = _match_at(_SIZE, text, at)
    return ListOf(item, int(size[1])), size.end()


def _parse_struct(text: str, at: int, depth: int) -> tuple[StructOf, int]:
    fields: list[tuple[str, ResultType]] = []
    while True:
        field = _match_at(_FIELD, text, at)
        kind, at = _parse(text, field.end(), depth + 1)
        fields.append((field[1], kind))
        if comma := _COMMA.match(text, at):
            at = comma.end()
            continue
        is_distinct = len({name for name, _ in fields}) == len(fields)
        require(is_distinct, f"`{text}` has two fields of one name")
        return StructOf(tuple(fields)), _match_at(_END, text, at).end()


def _match_at(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    match = pattern.match(text, at)
    if match is None:
        raise _syntax_error(text, at)
    return match


def _syntax_error(text: str, at: int) -> ManifestError:
    return ManifestError(
        f"`{text}` cannot be read from character {at + 1} on; expected list<TYPE>, "
        "fixed_size_list<TYPE>[N], struct<NAME: TYPE, ...> or the name of an element type"
    )
