"""An input of a manifest that is more than a column of the tensor's own type: what it makes.

    [[inputs]]   ->  the tensor, and the mask and lengths beside it
                 ->  the entry again, with every default that the graph decides filled in

Keys that belong to another kind of column, or that contradict each other, are refused by name.

Decided once, when a model is loaded. Pure; runs in the worker that loaded the graph and in the
operator's tool.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from iskander.contract.column_types import (
    DECIMAL,
    NUMBER,
    TEMPORAL,
    ColumnType,
    SentType,
    parse_sent_type,
)
from iskander.contract.dtypes import BY_ARROW, BY_ONNX, Dtype
from iskander.contract.graph import GraphTensor
from iskander.contract.manifest import InputColumn, Value
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ManifestError

FLOATS = ("float16", "float32", "float64", "bfloat16")
INDEXES = ("int32", "int64")
PLAIN_KEYS = {"tensor", "column", "type", "nullable"}
LIST_KEYS = ("max_length", "padding", "truncate", "lengths", "buckets")
_FILE = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


class BuiltInput(NamedTuple):
    """What an entry makes.

    Attributes:
        specs: Its tensor, then those of mask and lengths.
        source: The entry, with its defaults; None where the column is the tensor as it comes.
    """

    specs: list[TensorSpec]
    source: InputColumn | None


def tensors_of(entry: InputColumn) -> list[str]:
    """The graph's inputs that an entry feeds."""
    return [entry.tensor, *(name for name in (entry.mask, entry.lengths) if name)]


def columns_of(entry: InputColumn) -> tuple[str, ...]:
    """The names of an entry's columns."""
    return entry.columns if entry.column is None else (entry.column,)


def entries_of(contract: Contract) -> list[InputColumn]:
    """The inputs as entries of a manifest, those that are columns as they come too."""
    sources = {entry.tensor: entry for entry in contract.sources}
    beside = {name for entry in contract.sources for name in tensors_of(entry)[1:]}
    return [
        sources.get(spec.tensor)
        or InputColumn(tensor=spec.tensor, column=spec.column, type=str(spec.type))
        for spec in contract.inputs
        if spec.tensor not in beside
    ]


def said(entry: InputColumn) -> dict[str, Any]:
    """An entry's keys and values, as a manifest has them, without what it leaves out."""
    built: dict[str, Any] = msgspec.to_builtins(entry)
    return built


def is_tensor_as_sent(entry: InputColumn) -> bool:
    """Whether an entry says no more than which column of a tensor's own type is which tensor.

    Raises:
        ManifestError: Its type is none.
    """
    if entry.column is None or not entry.type or said(entry).keys() - PLAIN_KEYS:
        return False
    sent = parse_sent_type(entry.type)
    return not sent.is_ragged and sent.element in BY_ARROW


def compile_input(entry: InputColumn, tensors: dict[str, GraphTensor]) -> BuiltInput:
    """Hold an entry against the graph.

    Raises:
        ManifestError: It contradicts itself or the graph; names the input and the key.
    """
    return _Entry(entry, tensors).made()


class _Entry:
    """One entry while it is held against the graph."""

    def __init__(self, entry: InputColumn, tensors: dict[str, GraphTensor]) -> None:
        self.entry = entry
        self.tensors = tensors
        self.what = f"input `{entry.tensor}`"
        self.tensor, self.dtype = self._graph_tensor(entry.tensor)
        self.trailing = list(self.tensor.shape[1:])
        self.is_list = any(_is_said(entry, key) for key in LIST_KEYS)
        self.has_vocabulary = bool(entry.vocabulary)
        self.sent = parse_sent_type(entry.type) if entry.type else self._derived()
        self.is_list = self.sent.is_ragged

    def made(self) -> BuiltInput:
        entry = self.entry
        self._require(
            (entry.column is not None) != bool(entry.columns), "wants either `column` or `columns`"
        )
        twice = sorted({name for name in entry.columns if entry.columns.count(name) > 1})
        self._require(not twice, f"names the columns {', '.join(twice)} twice")
        self._require_list_keys()
        self._require_conversion()
        self._require_vocabulary()
        nulls = self._nulls()
        length = self._max_length()
        shape = self._shape(length)
        stored = "utf8" if self.has_vocabulary else self.dtype.arrow
        if self.sent.is_text and not self.has_vocabulary:
            stored = self.sent.element
        inner = (length, *self.sent.shape) if length else self.sent.shape
        inner = (len(entry.columns),) if entry.columns else inner
        column = entry.tensor if entry.column is None else entry.column
        is_tensor = self.sent.is_tensor and not length
        specs = [TensorSpec(column, entry.tensor, ColumnType(stored, inner, is_tensor), shape)]
        if entry.mask:
            specs.append(self._beside(entry.mask, "mask", inner))
        if entry.lengths:
            specs.append(self._beside(entry.lengths, "lengths", ()))
        source = msgspec.structs.replace(
            entry,
            type=str(self.sent),
            nulls=nulls,
            max_length=length or None,
            truncate=entry.truncate or ("refuse" if length else None),
        )
        for key, value in (("fill", entry.fill), ("padding", entry.padding)):
            self._require_value(key, value, stored)
        is_as_it_comes = nulls == "reject" and is_tensor_as_sent(
            msgspec.structs.replace(source, nulls=None)
        )
        return BuiltInput(specs, None if is_as_it_comes else source)

    def _derived(self) -> SentType:
        """The type of a column whose entry names none."""
        entry = self.entry
        element = NUMBER if entry.cast else self.dtype.arrow
        if self.has_vocabulary or (entry.cast and element == "utf8"):
            element = "utf8"
        open_shape = self.trailing[1:] if self.is_list else self.trailing
        if entry.one_hot:
            open_shape = open_shape[:-1]
        if entry.columns or all(size == 1 for size in open_shape):
            return SentType(element, (), self.is_list)
        shape = tuple(size for size in open_shape if isinstance(size, int) and size > 0)
        self._require(len(shape) == len(open_shape), "needs a `type`: the graph leaves axes open")
        return SentType(element, shape, self.is_list)

    def _require_list_keys(self) -> None:
        entry, sent = self.entry, self.sent
        if not sent.is_ragged:
            for key in LIST_KEYS:
                self._refuse_key(key, f"is for lists, and the column is sent as `{sent}`")
        else:
            self._require(not entry.columns, "packs columns of lists, which are not one tensor")
            self._require(not sent.is_text or not sent.shape, f"is sent as `{sent}`")
        if entry.columns:
            self._require(not sent.shape, f"packs single values, not columns of `{sent}`")
        sizes = list(entry.buckets)
        self._require(sizes == sorted(set(sizes)), "has `buckets` that are not ascending")

    def _require_conversion(self) -> None:
        """Casts, units and decimals: each key only where there is something to convert."""
        entry, sent = self.entry, self.sent
        family = sent.family
        if family in TEMPORAL:
            self._require(entry.unit is not None, f"is sent as `{sent}` and needs a `unit`")
        else:
            self._refuse_key("unit", f"is for dates and times, and the column is sent as `{sent}`")
        if family == DECIMAL:
            self._require(entry.conversion is not None, f"is sent as `{sent}` and needs an `as`")
            is_exact = sent.element != DECIMAL or entry.conversion == "number"
            self._require(is_exact, "is unscaled, and needs a type with precision and scale")
        else:
            self._refuse_key("conversion", f"is for decimals, and the column is sent as `{sent}`")
        if family:
            self._refuse_key("cast", f"is not for `{sent}`, which is converted as declared")
            self._require(
                self.dtype.arrow_bits > 1, f"is a {self.tensor.element} in the graph, no number"
            )
        elif not self.has_vocabulary:
            is_same = sent.element != NUMBER and BY_ARROW[sent.element].onnx == self.dtype.onnx
            numbers = self.dtype.arrow_bits > 0 and not sent.is_text
            self._require(
                is_same or (entry.cast and numbers),
                f"is a {self.tensor.element} in the graph and is sent as `{sent}`"
                + (", which cannot be cast" if entry.cast else "; only `cast = true` converts it"),
            )

    def _require_vocabulary(self) -> None:
        entry, sent = self.entry, self.sent
        if not entry.vocabulary:
            self._refuse_key("one_hot", "wants a `vocabulary`")
            self._refuse_key("unknown", "wants a `vocabulary`")
            return
        self._require(
            _FILE.fullmatch(entry.vocabulary) is not None,
            f"has the vocabulary `{entry.vocabulary}`, wanted the name of a file beside the model",
        )
        known = INDEXES if not entry.one_hot else (*INDEXES, "bool", "uint8", "int8", *FLOATS[:3])
        self._require(
            self.dtype.arrow in known,
            f"is a {self.tensor.element} in the graph, and a vocabulary makes "
            f"{'one-hot ' if entry.one_hot else ''}{', '.join(known)}",
        )
        self._require(
            sent.is_text or (entry.cast and "int" in sent.element),
            f"looks up text, and the column is sent as `{sent}`; `cast = true` makes text of whole "
            "numbers",
        )

    def _nulls(self) -> str:
        entry = self.entry
        nulls = entry.nulls or ("reject" if entry.fill is None else "fill")
        self._require(
            not entry.nullable or nulls != "reject",
            "is nullable, and no tensor can hold a null: say what stands for one by `nulls`",
        )
        if nulls == "fill":
            self._require(entry.fill is not None, 'has `nulls = "fill"` and no `fill`')
        if nulls in ("reject", "nan"):
            self._refuse_key("fill", f'contradicts `nulls = "{nulls}"`')
        if nulls == "nan":
            is_float = self.dtype.arrow in FLOATS and not self.has_vocabulary
            self._require(is_float, f"is a {self.tensor.element}, which has no NaN for a null")
        if nulls == "mask":
            self._require(bool(entry.mask), 'has `nulls = "mask"` and names no `mask` tensor')
        elif not self.sent.is_ragged:
            self._refuse_key("mask", 'wants `nulls = "mask"`, or a list')
        return nulls

    def _max_length(self) -> int:
        """Elements of a row of lists in the tensor, of the largest bucket; 0: the rows are none."""
        entry = self.entry
        if not self.sent.is_ragged:
            return 0
        self._require(bool(self.trailing), "is sent as lists and has one axis only in the graph")
        axis = self.trailing[0]
        fixed = axis if isinstance(axis, int) else None
        if entry.buckets:
            self._require(
                fixed is None, f"has buckets, and its second axis is {fixed} in the graph"
            )
            self._require(
                entry.max_length in (None, entry.buckets[-1]),
                f"has a max_length of {entry.max_length}, and its last bucket is "
                f"{entry.buckets[-1]}",
            )
            return entry.buckets[-1]
        length = entry.max_length or fixed
        self._require(length is not None, "is sent as lists and needs a `max_length`")
        self._require(
            fixed in (None, length),
            f"has a max_length of {length}, and its second axis is {fixed} in the graph",
        )
        return length or 0

    def _shape(self, length: int) -> tuple[int, ...]:
        """The arena's tensor of one row, found to be what the graph takes."""
        entry, sent = self.entry, self.sent
        wanted = self.trailing[:-1] if entry.one_hot else self.trailing
        self._require(
            not entry.one_hot or bool(self.trailing), "is one-hot and has no axis for the entries"
        )
        shape = (length, *sent.shape) if length else sent.shape
        if entry.columns:
            shape = (len(entry.columns),)
        elif not shape and all(size == 1 for size in wanted):
            shape = (1,) * len(wanted)
        fits = len(shape) == len(wanted) and all(
            not isinstance(size, int) or size == got
            for size, got in zip(wanted, shape, strict=True)
        )
        listed = ", ".join("?" if size is None else str(size) for size in self.tensor.shape)
        got = f"{len(entry.columns)} columns" if entry.columns else f"`{sent}`"
        self._require(fits, f"has the shape [{listed}] in the graph and is sent as {got}")
        return shape

    def _beside(self, name: str, key: str, inner: tuple[int, ...]) -> TensorSpec:
        """The spec of a mask, which has the tensor's own shape, or of lengths, which has one."""
        tensor, dtype = self._graph_tensor(name)
        trailing = tensor.shape[1:]
        inner = inner[:1] if key == "mask" and self.sent.is_ragged else inner
        kinds = [bits.arrow for bits in BY_ONNX.values() if bits.arrow_bits]
        kinds = kinds if key == "mask" else [kind for kind in kinds if "int" in kind]
        self._require(
            dtype.arrow in kinds and dtype.arrow != "bfloat16",
            f"has the {key} `{name}`, which is a {tensor.element} in the graph",
        )
        shape = inner
        if not inner and all(size == 1 for size in trailing):
            shape = (1,) * len(trailing)
        fits = len(shape) == len(trailing) and all(
            not isinstance(size, int) or size == got
            for size, got in zip(trailing, shape, strict=True)
        )
        self._require(
            fits, f"has the {key} `{name}`, whose axes in the graph are not (rows, *{list(shape)})"
        )
        return TensorSpec(name, name, ColumnType(dtype.arrow, inner), shape)

    def _require_value(self, key: str, value: Value | None, stored: str) -> None:
        """Hold a fill or padding against the type of the tensor that it is written to."""
        if value is None:
            return
        if stored in ("utf8", "binary"):
            fits = isinstance(value, str)
        elif stored == "bool":
            fits = isinstance(value, bool)
        elif stored in FLOATS:
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            bits = BY_ARROW[stored].arrow_bits
            low, high = (0, 1 << bits) if stored[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            fits = is_whole and low <= int(value) < high
        self._require(fits, f"has the {key} {value!r}, which is no {stored}")

    def _graph_tensor(self, name: str) -> tuple[GraphTensor, Dtype]:
        tensor = self.tensors.get(name)
        if tensor is None:
            there = ", ".join(f"`{each}`" for each in self.tensors) or "none"
            raise ManifestError(f"input tensor `{name}` is not in the graph, which has {there}")
        dtype = BY_ONNX.get(tensor.element)
        self._require(
            dtype is not None,
            f"feeds `{name}`, a {tensor.element}, which is not supported; supported are "
            f"{', '.join(BY_ONNX)}",
        )
        assert dtype is not None
        self._require(len(tensor.shape) > 0, f"feeds `{name}`, a scalar without an axis for rows")
        return tensor, dtype

    def _refuse_key(self, key: str, why: str) -> None:
        name = "as" if key == "conversion" else key
        self._require(not _is_said(self.entry, key), f"has the key `{name}`, which {why}")

    def _require(self, is_met: bool, problem: str) -> None:
        if not is_met:
            raise ManifestError(f"{self.what} {problem}")


def _is_said(entry: InputColumn, key: str) -> bool:
    return getattr(entry, key) not in (None, "", (), False)
