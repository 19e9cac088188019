"""The Arrow type of a column of results: what one tensor can be, and lists and structs of several.

    fixed_size_list<struct<label: utf8, score: float32>>[5]    leaves  label  utf8     [5]
                                                                       score  float32  [5]

A leaf is one tensor. Its shape is made of the lists around it, from the outer one inwards.

Pure. Source: Arrow columnar format 1.5 (list, fixed-size list and struct layouts).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from iskander.contract.column_types import RANK_MAX, parse_column_type
from iskander.errors import ManifestError

_FIELD = re.compile(r"\s*([^<>\[\]:,.\s][^<>\[\]:,.]*?)\s*:")
_SIZE = re.compile(r"\s*\[\s*(\d{1,9})\s*\]")
_COMMA = re.compile(r"\s*,")
_WORD = re.compile(r"\s*(\w+)\s*")


class Value(msgspec.Struct, frozen=True):
    """The innermost values, as the table of element types calls them."""

    dtype_name: str

    def __str__(self) -> str:
        return self.dtype_name


class ListOf(msgspec.Struct, frozen=True):
    """A list in each row; `size` is None where the type does not say how long."""

    item: ResultType
    size: int | None

    def __str__(self) -> str:
        if self.size is None:
            return f"list<{self.item}>"
        return f"fixed_size_list<{self.item}>[{self.size}]"


class StructOf(msgspec.Struct, frozen=True):
    """Fields by name."""

    fields: tuple[tuple[str, ResultType], ...]

    def __str__(self) -> str:
        return f"struct<{', '.join(f'{name}: {kind}' for name, kind in self.fields)}>"


ResultType = Value | ListOf | StructOf


class Leaf(NamedTuple):
    """What one tensor is in a column.

    Attributes:
        path: Names of the fields on the way to it; empty where there is no struct.
        sizes: Of the lists on the way to it; None where the type does not say.
    """

    path: tuple[str, ...]
    dtype_name: str
    sizes: tuple[int | None, ...]


def parse_result_type(text: str) -> ResultType | None:
    """Read a type with a list or a struct in it; None where one tensor is the whole column.

    Raises:
        ManifestError: The spelling is unknown, or the type is not supported.
    """
    if not re.search(r"(?<!\w)(?:list|struct)\s*<", text):
        return None
    kind, end = _parse(text, 0, 0)
    if text[end:].strip():
        raise _misspelt(text, end)
    return kind


def leaves_of(kind: ResultType) -> list[Leaf]:
    """Every tensor that a column of this type is made of, in the order of its fields."""
    if isinstance(kind, ListOf):
        return [leaf._replace(sizes=(kind.size, *leaf.sizes)) for leaf in leaves_of(kind.item)]
    if isinstance(kind, StructOf):
        return [
            leaf._replace(path=(name, *leaf.path))
            for name, field in kind.fields
            for leaf in leaves_of(field)
        ]
    return [Leaf((), kind.dtype_name, ())]


def _parse(text: str, at: int, depth: int) -> tuple[ResultType, int]:
    if depth > RANK_MAX:
        raise ManifestError(f"`{text}` is nested deeper than {RANK_MAX} levels")
    word = _WORD.match(text, at)
    if word is None:
        raise _misspelt(text, at)
    name, at = word[1], word.end()
    if not text.startswith("<", at):
        # The other reader of types knows which values there are, and says so.
        return Value(parse_column_type(name).dtype_name), at
    if name == "struct":
        return _parse_struct(text, at + 1, depth)
    if name not in ("list", "fixed_size_list"):
        raise _misspelt(text, at)
    item, at = _parse(text, at + 1, depth + 1)
    at = _past(text, at, ">")
    if name == "list":
        return ListOf(item, None), at
    size = _SIZE.match(text, at)
    if size is None or not int(size[1]):
        raise _misspelt(text, at)
    return ListOf(item, int(size[1])), size.end()


def _parse_struct(text: str, at: int, depth: int) -> tuple[StructOf, int]:
    fields: list[tuple[str, ResultType]] = []
    while True:
        field = _FIELD.match(text, at)
        if field is None:
            raise _misspelt(text, at)
        kind, at = _parse(text, field.end(), depth + 1)
        fields.append((field[1], kind))
        if comma := _COMMA.match(text, at):
            at = comma.end()
            continue
        names = [name for name, _ in fields]
        if len({*names}) < len(names):
            raise ManifestError(f"`{text}` has two fields of one name")
        return StructOf(tuple(fields)), _past(text, at, ">")


def _past(text: str, at: int, sign: str) -> int:
    rest = text[at:].lstrip()
    if not rest.startswith(sign):
        raise _misspelt(text, at)
    return len(text) - len(rest) + len(sign)


def _misspelt(text: str, at: int) -> ManifestError:
    return ManifestError(
        f"`{text}` cannot be read from character {at + 1} on; wanted list<TYPE>, "
        "fixed_size_list<TYPE>[N], struct<NAME: TYPE, ...> or the name of a type of values"
    )
