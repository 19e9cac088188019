"""Graph of a model: its input and output tensors, as the model file declares them.

Source: ONNX IR shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from iskander.contract.dtypes import BY_ONNX, Dtype
from iskander.contract.validation import quoted, require, required

Dimension = int | str | None


class GraphTensor(msgspec.Struct, frozen=True, array_like=True):
    """An input or output as the graph declares it; a dimension is a size, a symbol or unknown."""

    name: str
    element: str
    shape: tuple[Dimension, ...]


class Graph(msgspec.Struct, frozen=True, array_like=True):
    """The inputs and outputs that a model file declares."""

    inputs: tuple[GraphTensor, ...]
    outputs: tuple[GraphTensor, ...]


def named_tensor(tensors: dict[str, GraphTensor], name: str, side: str) -> GraphTensor:
    """Return the graph's tensor with a name; `side` is `input` or `output`, for the error."""
    problem = f"{side} tensor `{name}` is not in the graph, which has {quoted(tensors)}"
    return required(tensors.get(name), problem)


def supported_dtype(tensor: GraphTensor, where: str) -> Dtype:
    """Return the element type of a tensor; reject unsupported types, and scalars."""
    supported = f"which is not supported; supported are {', '.join(BY_ONNX)}"
    dtype = required(BY_ONNX.get(tensor.element), f"{where} is a {tensor.element}, {supported}")
    require(len(tensor.shape) > 0, f"{where} is a scalar and has no axis for rows")
    return dtype


def row_shape(declared: tuple[int, ...], axes: Sequence[Dimension]) -> tuple[int, ...] | None:
    """Return the shape of one row.

    None if the declared shape does not fit the axes beside the rows.

    A single value fits axes of size 1.
    """
    if not declared and all(size == 1 for size in axes):
        return (1,) * len(axes)
    fits = len(declared) == len(axes) and all(
        not isinstance(size, int) or size == got for size, got in zip(axes, declared, strict=True)
    )
    return declared if fits else None
