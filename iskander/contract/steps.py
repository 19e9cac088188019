"""What each step makes of which elements and shape, decided before anything is computed.

The arithmetic is in `iskander_worker.postprocess`, in the worker. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import GraphTensor
from iskander.contract.outputs import Post, Source, Step
from iskander.errors import ManifestError

_SEQUENCE = re.compile(r"seq\((?:map\((\w+),(tensor\(\w+\))\)|(tensor\(\w+\)))\)")
_KEYS = {"int64": int, "string": str}


def is_sequence(tensor: GraphTensor) -> bool:
    """Whether it is a sequence, of maps or of tensors."""
    return _SEQUENCE.fullmatch(tensor.element) is not None


def fetched(where: str, source: Source, tensor: GraphTensor, sizes: Sizes) -> StepOutput:
    """An output of the graph seen as one tensor.

    Args:
        where: Column or field that it is for, in words.
        source: What the manifest says about it.
        tensor: What the graph says.
        sizes: Of the lists around a value, as far as the column's type says.

    Raises:
        ManifestError: The keys for maps and sequences are not those that it needs.
    """
    form = _SEQUENCE.fullmatch(tensor.element)
    if form is None:
        if source.keys or source.sequence or source.shape is not None:
            raise ManifestError(
                f"{where}: `{tensor.name}` is a {tensor.element}; keys, sequence and shape are for "
                "sequences of maps and of tensors"
            )
        element, shape = (
            tensor.element,
            tuple(size if isinstance(size, int) else None for size in tensor.shape),
        )
        if not shape:
            raise ManifestError(f"{where}: `{tensor.name}` is a scalar and has no axis for rows")
    elif form[1]:
        element, shape = form[2], (None, len(source.keys))
        if form[1] not in _KEYS:
            raise ManifestError(
                f"{where}: `{tensor.name}` is a {tensor.element}; keys are {' or '.join(_KEYS)}"
            )
        wanted = _KEYS[form[1]]
        if not source.keys or any(type(key) is not wanted for key in source.keys):
            raise ManifestError(
                f"{where}: `{tensor.name}` is a {tensor.element}: say in `keys` which of its "
                f"values to take, each key being {'a number' if wanted is int else 'text'}"
            )
        if len({*source.keys}) < len(source.keys):
            raise ManifestError(f"{where}: `keys` has a key twice")
        if source.sequence or source.shape is not None:
            raise ManifestError(f"{where}: sequence and shape are for sequences of tensors")
    else:
        element = form[3]
        row = sizes if source.shape is None else source.shape
        if source.list_max is not None and source.shape is not None:
            row = (None, *source.shape)
        shape = (None, *row)
        if source.keys:
            raise ManifestError(f"{where}: keys are for maps, and this is a {tensor.element}")
    dtype = BY_ONNX.get(element)
    if dtype is None:
        raise ManifestError(
            f"{where}: `{tensor.name}` is a {tensor.element}, which is not supported; supported "
            f"are {', '.join(BY_ONNX)}, and sequences of them or of maps to them"
        )
    return StepOutput(dtype.arrow, shape)


Sizes = tuple[int | None, ...]
"""A shape as far as it is known."""

FLOATS = ("float16", "float32", "float64")
NUMBERS = (*FLOATS, *(sign + bits for sign in ("int", "uint") for bits in ("8", "16", "32", "64")))


class StepOutput(NamedTuple):
    """What steps have made so far: elements, and a shape with the axis of rows.

    Of `top_k` this is the scores; the indices have the same shape.
    """

    dtype_name: str
    shape: Sizes
    is_top: bool = False


def after(where: str, step: Post, made: StepOutput, axes: int = 1) -> StepOutput:
    """What a step makes of what was made before it.

    Args:
        where: Column or field that it is for, in words.
        step: Of the manifest.
        made: Before it.
        axes: That no step may touch: that of the rows, and that of a list with a length of its own.

    Raises:
        ManifestError: It wants other elements, or another shape.
    """
    dtype_name, shape, is_top = made
    said = step if isinstance(step, str) else str(step)
    if is_top:
        raise ManifestError(f"{where}: top_k has to be the last step, and `{said}` comes after it")
    *outer, width = shape
    is_float, is_number = dtype_name in FLOATS, dtype_name in NUMBERS
    has_axis = len(shape) > axes

    def require(is_met: bool, wanted: str) -> None:
        if not is_met:
            raise ManifestError(
                f"{where}: `{said}` wants {wanted}, and gets {dtype_name} {listed(shape[1:])}"
            )

    result = made
    if step == "argmax":
        require(is_number and has_axis, "numbers with an axis that is its own")
        result = StepOutput("int64", tuple(outer))
    elif isinstance(step, str):
        wanted = "" if step == "sigmoid" else " with an axis that is its own"
        require(is_float and (has_axis or step == "sigmoid"), f"floats{wanted}")
    elif step.top_k is not None:
        require(is_number and has_axis, "numbers with an axis that is its own")
        require(width is None or width >= step.top_k, "at least as many numbers in the last axis")
        result = StepOutput(dtype_name, (*outer, step.top_k), is_top=True)
    elif step.select is not None:
        require(has_axis, "an axis besides that of the rows")
        require(width is None or width > step.select, "more in the last axis")
        result = StepOutput(dtype_name, tuple(outer))
    elif step.threshold is not None:
        require(is_number, "numbers")
        result = StepOutput("bool", shape)
    elif step.quantize is not None:
        require(is_float, "floats")
        result = StepOutput("int8", shape)
    else:
        target = step.cast or ""
        is_narrowing = (is_float and target not in FLOATS) or (
            target == "bool" and dtype_name != "bool"
        )
        require(target in NUMBERS or target == "bool", f"one of {', '.join(NUMBERS)}")
        require(
            (is_number or dtype_name == "bool") and not is_narrowing,
            "numbers of that kind; floats become whole by quantize, and truths by threshold",
        )
        result = StepOutput(target, shape)
    return result


def labelled(
    where: str, source: Source, raw: StepOutput, made: StepOutput, wanted: str, count: int
) -> StepOutput:
    """Labels in the place of numbers; where the graph says how many classes, so many."""
    if made.dtype_name == "bool":
        classes: int | None = 2
    elif made.dtype_name in NUMBERS and made.dtype_name not in FLOATS:
        picked = [step for step in source.post if step == "argmax" or is_top_k(step)]
        before = raw
        for step in source.post[: source.post.index(picked[-1])] if picked else ():
            before = after(where, step, before)
        classes = before.shape[-1] if picked else None
    else:
        raise ManifestError(
            f"{where}: labels take the place of whole numbers, and this is {made.dtype_name}"
        )
    if classes is not None and classes != count:
        raise ManifestError(
            f"{where}: `{source.labels}` has {count} lines and there are {classes} classes"
        )
    name = wanted if wanted == "binary" else "utf8"
    return made._replace(dtype_name=name)


def is_top_k(step: Post) -> bool:
    """Whether it is the step that makes labels and scores."""
    return isinstance(step, Step) and step.top_k is not None


def listed(shape: Sizes) -> str:
    """A shape for people."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"
