"""The contract of a model version: which column is which tensor, of what type and shape.

`compile_contract` decides whether a manifest (or none) and a graph fit together, once, when a
model is loaded. Pure; runs in the worker that loaded the graph and in the operator's tool.

Source: Arrow columnar format 1.5 (fixed-size list, `arrow.fixed_shape_tensor`); ONNX IR shapes.
"""

from __future__ import annotations

import re
from math import prod
from typing import Literal

import msgspec

from iskander.contract.dtypes import BY_ARROW, BY_ONNX, Dtype
from iskander.errors import ManifestError

RANK_MAX = 16
SIZE_DIGITS_MAX = 9
STRING_BYTES = 256
"""The most bytes of one string in a result, where a model's settings say nothing else."""
ALIGNMENT = 64
"""Bytes. Every buffer in an arena begins on such a boundary (Arrow's recommendation, AVX-512)."""

NOT_IN_TENSORS = ("bfloat16", "binary", "utf8")
"""Arrow's `fixed_shape_tensor` holds numbers that Arrow itself knows."""

Dimension = int | str | None
Passthrough = Literal["all", "none"] | tuple[str, ...]


class GraphTensor(msgspec.Struct, frozen=True, array_like=True):
    """An input or output as the graph declares it; a dimension is a size, a symbol or unknown."""

    name: str
    element: str
    shape: tuple[Dimension, ...]


class Graph(msgspec.Struct, frozen=True, array_like=True):
    """What a model file declares about itself."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


class ColumnType(msgspec.Struct, frozen=True, array_like=True):
    """The Arrow type of a column that holds a tensor: element type and shape of one row.

    Shape:
        `()` for a primitive column; one entry a level for nested fixed-size lists; the tensor's
        own shape for `fixed_shape_tensor`. Rows are not counted.
    """

    dtype_name: str
    shape: tuple[int, ...] = ()
    is_tensor: bool = False

    @property
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


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One column and the tensor that it is.

    Attributes:
        column: Name in the record batch.
        tensor: Name in the graph.
        type: The column's Arrow type.
        shape: The tensor's shape without the batch axis.
        is_bound: For outputs: the shape is known before the run, so that the runtime can write
            straight to where the result belongs.
        string_bytes: For outputs that are strings: the most bytes that one of them may have.
    """

    column: str
    tensor: str
    type: ColumnType
    shape: tuple[int, ...]
    is_bound: bool = True
    string_bytes: int = 0

    @property
    def is_string(self) -> bool:
        """Whether its elements have a length of their own."""
        return not self.type.dtype.arrow_bits

    @property
    def elements(self) -> int:
        """Elements of one row."""
        return prod(self.shape)

    def buffer_bytes(self, rows: int) -> int:
        """Bytes of the Arrow buffer for `rows` rows: of values, or of the strings' offsets."""
        return self.type.dtype.buffer_bytes(rows * self.elements)


class Contract(msgspec.Struct, frozen=True, array_like=True):
    """What a model version takes and returns.

    Attributes:
        passthrough: Columns that come back untouched: `all` is every column that is no input.
        rows_fixed: The only number of rows that the graph takes, if its batch axis is fixed.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    passthrough: Passthrough = "none"
    rows_fixed: int | None = None


class InputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[inputs]]` of a manifest."""

    column: str
    type: str
    tensor: str
    nullable: bool = False


class OutputColumn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[[outputs]]` of a manifest."""

    tensor: str
    column: str
    type: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest as written, before it is held against a graph."""

    format: Literal[1]
    inputs: tuple[InputColumn, ...]
    outputs: tuple[OutputColumn, ...]
    passthrough: Passthrough = "none"


def body_layout(specs: tuple[TensorSpec, ...], rows: int) -> tuple[list[int], int]:
    """Where each column's values lie in the body of a batch in an arena.

    The one rule that gateway and worker share, so that a message need not say it.

    Returns:
        The offset of each column from the body's start, and the body's length; in bytes. The length
        counts what results may have of strings, and not the strings of inputs.

    Layout:
        Columns in the contract's order, each on a 64-byte boundary: values, or the offsets of
        strings. Behind all of them the bytes of the strings, as `strings.string_ranges` says.
    """
    offsets, end, room = [], 0, 0
    for spec in specs:
        offsets.append(end)
        end += (spec.buffer_bytes(rows) + ALIGNMENT - 1) & -ALIGNMENT
        if spec.string_bytes:
            room += (rows * spec.elements * spec.string_bytes + ALIGNMENT - 1) & -ALIGNMENT
    return offsets, end + room


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


def derive_manifest(graph: Graph) -> Manifest:
    """The manifest of a graph that has none: a column for each tensor, under the tensor's name.

    Raises:
        ManifestError: A tensor's type has no column type, or a trailing dimension is not fixed.
    """
    return Manifest(
        format=1,
        inputs=tuple(
            InputColumn(column=tensor.name, type=_derived_type(tensor, "input"), tensor=tensor.name)
            for tensor in graph.inputs
        ),
        outputs=tuple(
            OutputColumn(
                tensor=tensor.name, column=tensor.name, type=_derived_type(tensor, "output")
            )
            for tensor in graph.outputs
        ),
    )


def compile_contract(
    manifest: Manifest | None, graph: Graph, string_bytes: int = STRING_BYTES
) -> Contract:
    """Hold a manifest against a graph.

    Outputs of the graph that the manifest leaves out are not computed for the caller; every input
    of the graph must be named.

    Args:
        manifest: None to derive it from the graph.
        graph: What the model file declares.
        string_bytes: The most bytes of one string in a result.

    Raises:
        ManifestError: What does not fit, naming the tensor, what was wanted and what was found.
    """
    manifest = manifest or derive_manifest(graph)
    _require(bool(graph.inputs), "the graph has no inputs, so a batch of rows means nothing to it")
    _require(bool(manifest.outputs), "the manifest names no outputs")
    _require_distinct("column", [entry.column for entry in manifest.inputs], "[[inputs]]")
    _require_distinct("tensor", [entry.tensor for entry in manifest.inputs], "[[inputs]]")
    _require_distinct("column", [entry.column for entry in manifest.outputs], "[[outputs]]")
    _require_distinct("tensor", [entry.tensor for entry in manifest.outputs], "[[outputs]]")
    graph_inputs = {tensor.name: tensor for tensor in graph.inputs}
    graph_outputs = {tensor.name: tensor for tensor in graph.outputs}
    unnamed = [name for name in graph_inputs if name not in {e.tensor for e in manifest.inputs}]
    _require(not unnamed, f"the graph's inputs {_quoted(unnamed)} are not in the manifest")
    for entry in manifest.inputs:
        _require(
            not entry.nullable,
            f"input column `{entry.column}` is nullable, and no tensor can hold a null",
        )

    rows_fixed, symbols = _batch_axis(graph.inputs)
    inputs = tuple(
        _compile_spec(entry.column, entry.type, entry.tensor, graph_inputs, "input")
        for entry in manifest.inputs
    )
    outputs = []
    for output in manifest.outputs:
        spec = _compile_spec(output.column, output.type, output.tensor, graph_outputs, "output")
        leading, *trailing = graph_outputs[output.tensor].shape
        if isinstance(leading, int):
            _require(
                leading == rows_fixed,
                f"output `{output.tensor}` always has {leading} rows and the inputs have "
                f"{rows_fixed or 'any number'}: its rows cannot be told apart by caller",
            )
        is_bound = (leading in symbols or leading == rows_fixed) and leading is not None
        is_bound = is_bound and all(isinstance(size, int) for size in trailing)
        is_bound = is_bound and not spec.is_string
        room = string_bytes if spec.is_string else 0
        outputs.append(msgspec.structs.replace(spec, is_bound=is_bound, string_bytes=room))
    has_strings = any(spec.is_string for spec in (*inputs, *outputs))
    for spec in outputs:
        _require(
            not has_strings or spec.type.dtype_name != "bfloat16",
            f"output `{spec.tensor}` is a tensor(bfloat16) of a graph with strings; the runtime "
            "cannot return both",
        )
    passthrough = manifest.passthrough
    if isinstance(passthrough, tuple):
        _require_distinct("column", list(passthrough), "passthrough")
        both = [entry.column for entry in manifest.outputs if entry.column in passthrough]
        _require(not both, f"columns {_quoted(both)} are both passed through and produced")
    return Contract(inputs, tuple(outputs), passthrough, rows_fixed)


def require_room(contract: Contract, rows_max: int, output_bytes: int) -> None:
    """Refuse a model whose largest batch makes more results than a worker's arena holds.

    Raises:
        ManifestError: Says what to change.
    """
    rows = contract.rows_fixed or rows_max
    _, wanted = body_layout(contract.outputs, rows)
    _require(
        wanted <= output_bytes,
        f"{rows} rows make {wanted} bytes of results and arena.output_bytes is {output_bytes}: "
        f"lower max_batch_rows{_or_strings(contract)} or raise the arena",
    )


def _or_strings(contract: Contract) -> str:
    return " or result_string_bytes" if any(s.is_string for s in contract.outputs) else ""


def _batch_axis(tensors: tuple[GraphTensor, ...]) -> tuple[int | None, set[Dimension]]:
    for tensor in tensors:
        _require(
            len(tensor.shape) > 0,
            f"input `{tensor.name}` is a scalar; its first axis must be the rows of a batch",
        )
    leading = [tensor.shape[0] for tensor in tensors]
    fixed = {size for size in leading if isinstance(size, int)}
    _require(
        len(fixed) <= 1,
        f"the inputs have different fixed numbers of rows: {sorted(fixed)}",
    )
    _require(0 not in fixed, "an input has a batch axis fixed at 0 rows")
    return next(iter(fixed), None), {size for size in leading if isinstance(size, str)}


def _compile_spec(
    column: str, type_text: str, name: str, tensors: dict[str, GraphTensor], side: str
) -> TensorSpec:
    tensor = tensors.get(name)
    _require(
        tensor is not None,
        f"{side} tensor `{name}` is not in the graph, which has {_quoted(list(tensors))}",
    )
    assert tensor is not None
    column_type = parse_column_type(type_text)
    dtype = BY_ONNX.get(tensor.element)
    _require(
        dtype is not None,
        f"{side} `{name}` is a {tensor.element}, which is not supported; supported are "
        f"{', '.join(BY_ONNX)}",
    )
    _require(
        column_type.dtype.onnx == tensor.element,
        f"{side} `{name}` is a {tensor.element} in the graph and `{type_text}` in the manifest",
    )
    _require(len(tensor.shape) > 0, f"{side} `{name}` is a scalar and has no axis for rows")
    trailing = tensor.shape[1:]
    shape = column_type.shape
    if not shape and all(size == 1 for size in trailing):
        shape = (1,) * len(trailing)
    fits = len(shape) == len(trailing) and all(
        not isinstance(wanted, int) or wanted == got
        for wanted, got in zip(trailing, shape, strict=True)
    )
    _require(
        fits,
        f"{side} `{name}` has the shape {_shape_text(tensor)} in the graph and `{type_text}` "
        "in the manifest",
    )
    return TensorSpec(column, name, column_type, shape)


def _derived_type(tensor: GraphTensor, side: str) -> str:
    dtype = BY_ONNX.get(tensor.element)
    _require(
        dtype is not None,
        f"{side} `{tensor.name}` is a {tensor.element}, which is not supported; supported are "
        f"{', '.join(BY_ONNX)}",
    )
    assert dtype is not None
    _require(
        len(tensor.shape) > 0,
        f"{side} `{tensor.name}` is a scalar and has no axis for the rows of a batch",
    )
    trailing = tensor.shape[1:]
    _require(
        all(isinstance(size, int) and size > 0 for size in trailing),
        f"{side} `{tensor.name}` has the shape {_shape_text(tensor)}: only the first axis may be "
        "open; a manifest can declare the others",
    )
    return str(ColumnType(dtype.arrow, tuple(size for size in trailing if isinstance(size, int))))


def _shape_text(tensor: GraphTensor) -> str:
    return "[" + ", ".join("?" if size is None else str(size) for size in tensor.shape) + "]"


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _require_distinct(what: str, names: list[str], where: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    _require(not twice, f"{where} names the {what} {_quoted(twice)} twice")


def _require(is_met: bool, message: str) -> None:
    if not is_met:
        raise ManifestError(message)
