"""Compilation of `[[inputs]]`: conversions, null handling, lists, vocabularies.

    [[inputs]]   ->  specs of the tensor, and of its mask and lengths
                 ->  the entry, with the defaults that depend on the graph

A key that does not apply to the column's kind, or that contradicts another key, is an error.

Pure. Runs on: the worker that loaded the graph, and the operator's tool.
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
from iskander.contract.graph import GraphTensor, named_tensor, row_shape, supported_dtype
from iskander.contract.manifest import InputColumn, Value
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.contract.validation import require, require_distinct, required, shape_text

FLOATS = ("float16", "float32", "float64", "bfloat16")
INDEXES = ("int32", "int64")
PLAIN_KEYS = {"tensor", "column", "type", "nullable"}
LIST_KEYS = ("max_length", "padding", "truncate", "lengths", "buckets")
_FILE = re.compile(r"\w[\w.-]{0,254}", re.ASCII)


class BuiltInput(NamedTuple):
    """The specs of an entry's tensor, mask and lengths, and the entry with its defaults.

    `source` is None if the column is the tensor without conversion.
    """

    specs: list[TensorSpec]
    source: InputColumn | None


def tensors_of(entry: InputColumn) -> list[str]:
    """Return the graph's inputs that an entry feeds."""
    return [entry.tensor, *(name for name in (entry.mask, entry.lengths) if name)]


def columns_of(entry: InputColumn) -> tuple[str, ...]:
    """Return the names of an entry's columns."""
    return entry.columns if entry.column is None else (entry.column,)


def entries_of(contract: Contract) -> list[InputColumn]:
    """Return the inputs as entries of a manifest, including columns without conversion."""
    sources = {entry.tensor: entry for entry in contract.sources}
    extra = {name for entry in contract.sources for name in tensors_of(entry)[1:]}
    return [
        sources.get(spec.tensor)
        or InputColumn(tensor=spec.tensor, column=spec.column, type=str(spec.type))
        for spec in contract.inputs
        if spec.tensor not in extra
    ]


def require_smallest_request(
    contract: Contract, *, columns: int, batch_bytes: int, result_bytes: int
) -> None:
    """Reject a model whose smallest request is above a limit: it could serve no request.

    The limits are those of a batch: `limits.columns`, `limits.bytes` and `limits.result_bytes`.
    """
    rows = contract.rows_fixed or 1
    names = {name.partition(".")[0] for entry in entries_of(contract) for name in columns_of(entry)}
    sent, returned = (body_layout(s, rows)[1] for s in (contract.inputs, contract.outputs))
    for found, what, limit, setting in (
        (len(names), "columns", columns, "limits.columns"),
        (len(contract.inputs), "tensors", columns, "limits.columns"),
        (sent, "bytes", batch_bytes, "limits.bytes"),
        (returned, "result bytes", result_bytes, "limits.result_bytes"),
    ):
        text = f"a request of {rows} rows has {found} {what}, limit {limit} (`{setting}`)"
        require(found <= limit, f"{text}: no request could be served")


def entry_keys(entry: InputColumn) -> dict[str, Any]:
    """Return the keys that an entry sets, with their values, as in a manifest."""
    built: dict[str, Any] = msgspec.to_builtins(entry)
    return built


def is_tensor_as_sent(entry: InputColumn) -> bool:
    """Return whether an entry maps one column to a tensor without conversion."""
    if entry.column is None or not entry.type or entry_keys(entry).keys() - PLAIN_KEYS:
        return False
    sent = parse_sent_type(entry.type)
    return not sent.is_ragged and sent.element in BY_ARROW


class InputCompiler:
    """Compiles one entry for the inputs of a graph."""

    def __init__(self, entry: InputColumn, tensors: dict[str, GraphTensor]) -> None:
        self.entry = entry
        self.tensors = tensors
        self.where = f"input `{entry.tensor}`"
        self.tensor, self.dtype = self._graph_tensor(entry.tensor)
        self.trailing = list(self.tensor.shape[1:])
        self.has_vocabulary = bool(entry.vocabulary)
        self.sent = parse_sent_type(entry.type) if entry.type else self._derived_type()

    def compile(self) -> BuiltInput:
        """Check the entry, and convert it to specs."""
        entry, sent = self.entry, self.sent
        is_one = (entry.column is not None) != bool(entry.columns)
        self._require(is_one, "needs either `column` or `columns`")
        require_distinct("column", entry.columns, self.where)
        self._require_list_keys()
        self._require_conversion()
        self._require_vocabulary()
        nulls = self._null_rule()
        length = self._padded_length()
        inner = (length, *sent.shape) if length else sent.shape
        inner = (len(entry.columns),) if entry.columns else inner
        shape = self._row_shape(inner)
        stored = "utf8" if self.has_vocabulary else self.dtype.arrow
        if sent.is_text and not self.has_vocabulary:
            stored = sent.element
        column = entry.tensor if entry.column is None else entry.column
        is_tensor = sent.is_tensor and not length
        specs = [TensorSpec(column, entry.tensor, ColumnType(stored, inner, is_tensor), shape)]
        if entry.mask:
            specs.append(self._mask_or_lengths(entry.mask, "mask", inner))
        if entry.lengths:
            specs.append(self._mask_or_lengths(entry.lengths, "lengths", ()))
        source = msgspec.structs.replace(
            entry,
            type=str(sent),
            nulls=nulls,
            max_length=length or None,
            truncate=entry.truncate or ("refuse" if length else None),
        )
        self._require_value("fill", entry.fill, stored)
        self._require_value("padding", entry.padding, stored)
        is_unconverted = nulls == "reject" and is_tensor_as_sent(
            msgspec.structs.replace(source, nulls=None)
        )
        return BuiltInput(specs, None if is_unconverted else source)

    def _derived_type(self) -> SentType:
        """Return the column type of an entry that has no key `type`."""
        entry = self.entry
        is_list = any(_is_set(entry, key) for key in LIST_KEYS)
        element = NUMBER if entry.cast else self.dtype.arrow
        if self.has_vocabulary or (entry.cast and element == "utf8"):
            element = "utf8"
        axes = self.trailing[1:] if is_list else self.trailing
        if entry.one_hot:
            axes = axes[:-1]
        if entry.columns or all(size == 1 for size in axes):
            return SentType(element, (), is_list)
        shape = tuple(size for size in axes if isinstance(size, int) and size > 0)
        self._require(len(shape) == len(axes), "needs a `type`: the graph leaves axes open")
        return SentType(element, shape, is_list)

    def _require_list_keys(self) -> None:
        entry, sent = self.entry, self.sent
        if not sent.is_ragged:
            for key in LIST_KEYS:
                self._reject_key(key, f"is for lists, and the column is sent as `{sent}`")
        else:
            self._require(not entry.columns, "packs columns of lists, which are not one tensor")
            is_supported = not sent.is_text or not sent.shape
            self._require(is_supported, f"is sent as `{sent}`, which is not supported")
        if entry.columns:
            self._require(not sent.shape, f"packs single values, not columns of `{sent}`")
        sizes = list(entry.buckets)
        self._require(sizes == sorted(set(sizes)), "has `buckets` that are not ascending")

    def _require_conversion(self) -> None:
        """Allow `cast`, `unit` and `as` only for types that they convert."""
        entry, sent, element = self.entry, self.sent, self.tensor.element
        if sent.family in TEMPORAL:
            self._require(entry.unit is not None, f"is sent as `{sent}` and needs a `unit`")
        else:
            self._reject_key("unit", f"is for dates and times, and the column is sent as `{sent}`")
        if sent.family == DECIMAL:
            self._require(entry.conversion is not None, f"is sent as `{sent}` and needs an `as`")
            is_exact = sent.element != DECIMAL or entry.conversion == "number"
            self._require(is_exact, "is unscaled, and needs a type with precision and scale")
        else:
            self._reject_key("conversion", f"is for decimals, and the column is sent as `{sent}`")
        if sent.family:
            self._reject_key("cast", f"is not for `{sent}`, which is converted as declared")
            self._require(self.dtype.arrow_bits > 1, f"is a {element} in the graph, not a number")
        elif not self.has_vocabulary:
            is_same = sent.element != NUMBER and BY_ARROW[sent.element].onnx == self.dtype.onnx
            is_number = self.dtype.arrow_bits > 0 and not sent.is_text
            problem = "; only `cast = true` converts it"
            problem = ", which cannot be cast" if entry.cast else problem
            problem = f"is a {element} in the graph and is sent as `{sent}`{problem}"
            self._require(is_same or (entry.cast and is_number), problem)

    def _require_vocabulary(self) -> None:
        entry, sent = self.entry, self.sent
        if not entry.vocabulary:
            self._reject_key("one_hot", "needs a `vocabulary`")
            self._reject_key("unknown", "needs a `vocabulary`")
            return
        is_file = _FILE.fullmatch(entry.vocabulary) is not None
        problem = f"has the vocabulary `{entry.vocabulary}`, expected a file beside the model"
        self._require(is_file, problem)
        known = INDEXES if not entry.one_hot else (*INDEXES, "bool", "uint8", "int8", *FLOATS[:3])
        kinds = f"{'one-hot ' if entry.one_hot else ''}{', '.join(known)}"
        problem = f"is a {self.tensor.element} in the graph, and a vocabulary makes {kinds}"
        self._require(self.dtype.arrow in known, problem)
        is_text = sent.is_text or (entry.cast and "int" in sent.element)
        problem = f"looks up text, and the column is sent as `{sent}`"
        self._require(is_text, f"{problem}; `cast = true` makes text of whole numbers")

    def _null_rule(self) -> str:
        """Check the keys of null handling; return `nulls` or its default."""
        entry = self.entry
        nulls = entry.nulls or ("reject" if entry.fill is None else "fill")
        problem = "is nullable, and no tensor can hold a null: set `nulls` to their replacement"
        self._require(not entry.nullable or nulls != "reject", problem)
        if nulls == "fill":
            self._require(entry.fill is not None, 'has `nulls = "fill"` and no `fill`')
        if nulls in ("reject", "nan"):
            self._reject_key("fill", f'contradicts `nulls = "{nulls}"`')
        if nulls == "nan":
            is_float = self.dtype.arrow in FLOATS and not self.has_vocabulary
            self._require(is_float, f"is a {self.tensor.element}, which has no NaN for a null")
        if nulls == "mask":
            self._require(bool(entry.mask), 'has `nulls = "mask"` and names no `mask` tensor')
        elif not self.sent.is_ragged:
            self._reject_key("mask", 'needs `nulls = "mask"`, or a list')
        return nulls

    def _padded_length(self) -> int:
        """Return the padded length of a list (with buckets, the largest).

        0 for a column without lists.
        """
        entry = self.entry
        if not self.sent.is_ragged:
            return 0
        self._require(bool(self.trailing), "is sent as lists and has one axis only in the graph")
        axis = self.trailing[0]
        fixed = axis if isinstance(axis, int) else None
        in_graph = f"and its second axis is {fixed} in the graph"
        limit = f"has a max_length of {entry.max_length}"
        if entry.buckets:
            last = entry.buckets[-1]
            self._require(fixed is None, f"has buckets, {in_graph}")
            is_same = entry.max_length in (None, last)
            self._require(is_same, f"{limit}, and its last bucket is {last}")
            return last
        length = entry.max_length or fixed
        self._require(length is not None, "is sent as lists and needs a `max_length`")
        self._require(fixed in (None, length), f"{limit}, {in_graph}")
        return length or 0

    def _row_shape(self, declared: tuple[int, ...]) -> tuple[int, ...]:
        """Check the shape of one row against the graph; return its shape in the arena."""
        entry = self.entry
        has_axis = not entry.one_hot or bool(self.trailing)
        self._require(has_axis, "is one-hot and has no axis for the entries")
        axes = self.trailing[:-1] if entry.one_hot else self.trailing
        got = f"{len(entry.columns)} columns" if entry.columns else f"`{self.sent}`"
        in_graph = f"{self.where} has the shape {shape_text(self.tensor.shape)} in the graph"
        return required(row_shape(declared, axes), f"{in_graph} and is sent as {got}")

    def _mask_or_lengths(self, name: str, key: str, inner: tuple[int, ...]) -> TensorSpec:
        """Return the spec of a mask (per element or list entry) or of lengths (per row)."""
        tensor, dtype = self._graph_tensor(name)
        inner = inner[:1] if key == "mask" and self.sent.is_ragged else inner
        kinds = [element_type.arrow for element_type in BY_ONNX.values() if element_type.arrow_bits]
        kinds = kinds if key == "mask" else [kind for kind in kinds if "int" in kind]
        is_kind = dtype.arrow in kinds and dtype.arrow != "bfloat16"
        has = f"has the {key} `{name}`"
        self._require(is_kind, f"{has}, which is a {tensor.element} in the graph")
        problem = f"{self.where} {has}, whose axes in the graph are not (rows, *{list(inner)})"
        shape = required(row_shape(inner, tensor.shape[1:]), problem)
        return TensorSpec(name, name, ColumnType(dtype.arrow, inner), shape)

    def _require_value(self, key: str, value: Value | None, stored: str) -> None:
        """Check a fill or padding value against the type of the tensor."""
        if value is None:
            return
        is_number = not isinstance(value, bool)
        if stored in ("utf8", "binary"):
            fits = isinstance(value, str)
        elif stored == "bool":
            fits = isinstance(value, bool)
        elif stored in FLOATS:
            fits = is_number and isinstance(value, int | float)
        else:
            bits = BY_ARROW[stored].arrow_bits
            low, high = (0, 1 << bits) if stored[0] == "u" else (-1 << bits - 1, 1 << bits - 1)
            fits = is_number and isinstance(value, int) and low <= int(value) < high
        self._require(fits, f"has the {key} {value!r}, which is not a {stored}")

    def _graph_tensor(self, name: str) -> tuple[GraphTensor, Dtype]:
        tensor = named_tensor(self.tensors, name, "input")
        beside = "" if name == self.entry.tensor else f": the tensor `{name}`"
        return tensor, supported_dtype(tensor, f"{self.where}{beside}")

    def _reject_key(self, key: str, reason: str) -> None:
        name = "as" if key == "conversion" else key
        self._require(not _is_set(self.entry, key), f"has the key `{name}`, which {reason}")

    def _require(self, is_met: bool, problem: str) -> None:
        require(is_met, f"{self.where} {problem}")


def _is_set(entry: InputColumn, key: str) -> bool:
    return getattr(entry, key) not in (None, "", (), False)
