"""Element type and shape after each post-processing step.

`iskander_worker.batches.postprocess` computes the values. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import GraphTensor
from iskander.contract.outputs import OutputSource, Post, Step
from iskander.contract.validation import require, require_distinct, required, shape_text

Sizes = tuple[int | None, ...]
"""A shape with unknown sizes."""
FLOATS = ("float16", "float32", "float64")
NUMBERS = (*FLOATS, *(sign + bits for sign in ("int", "uint") for bits in ("8", "16", "32", "64")))

_SEQUENCE = re.compile(r"seq\((?:map\((\w+),(tensor\(\w+\))\)|(tensor\(\w+\)))\)")
_KEYS = {"int64": int, "string": str}


class StepOutput(NamedTuple):
    """Element type and shape, with the axis of rows, after a step.

    For `top_k`, type and shape are those of the scores; the indices have the same shape.
    """

    dtype_name: str
    shape: Sizes
    is_top: bool = False


def is_sequence(tensor: GraphTensor) -> bool:
    """Return whether the graph's output is a sequence of maps or of tensors."""
    return _SEQUENCE.fullmatch(tensor.element) is not None


def source_tensor(
    where: str, source: OutputSource, tensor: GraphTensor, sizes: Sizes
) -> StepOutput:
    """Return element type and shape of a graph's output, with a sequence stacked to one tensor.

    `where` names the column or field in error texts; `sizes` is the shape of the column's type.
    """
    form, kind = _SEQUENCE.fullmatch(tensor.element), f"`{tensor.name}` is a {tensor.element}"
    has_tensor_keys = bool(source.sequence) or source.shape is not None
    element, shape = tensor.element, tuple(s if isinstance(s, int) else None for s in tensor.shape)
    if form is None:
        is_plain = not source.keys and not has_tensor_keys
        problem = "keys, sequence and shape are for sequences of maps and of tensors"
        require(is_plain, f"{where}: {kind}; {problem}")
        require(bool(shape), f"{where}: `{tensor.name}` is a scalar and has no axis for rows")
    elif form[1]:
        element, shape = form[2], (None, len(source.keys))
        require(form[1] in _KEYS, f"{where}: {kind}; keys are {' or '.join(_KEYS)}")
        key_type = _KEYS[form[1]]
        is_typed = bool(source.keys) and all(type(key) is key_type for key in source.keys)
        type_text = "a number" if key_type is int else "text"
        problem = f"set `keys` to those of the values to return, each key being {type_text}"
        require(is_typed, f"{where}: {kind}: {problem}")
        require_distinct("key", map(str, source.keys), f"{where}: `keys`")
        is_map = not has_tensor_keys
        require(is_map, f"{where}: sequence and shape are for sequences of tensors")
    else:
        element = form[3]
        row = sizes if source.shape is None else source.shape
        if source.list_max is not None and source.shape is not None:
            row = (None, *source.shape)
        shape = (None, *row)
        require(not source.keys, f"{where}: keys are for maps, and {kind}")
    supported = f"{', '.join(BY_ONNX)}, and sequences of them or of maps to them"
    problem = f"{where}: {kind}, which is not supported; supported are {supported}"
    return StepOutput(required(BY_ONNX.get(element), problem).arrow, shape)


def apply_step(where: str, step: Post, output: StepOutput, axes: int = 1) -> StepOutput:
    """Return element type and shape after one more step.

    No step may change the first `axes` axes: rows, and lists of variable length.
    """
    dtype_name, shape, is_top = output
    require(not is_top, f"{where}: top_k has to be the last step, and `{step}` comes after it")
    *outer, width = shape
    is_float, is_number = dtype_name in FLOATS, dtype_name in NUMBERS
    has_axis, own_axis = len(shape) > axes, "an axis beside rows and list entries"

    def need(is_met: bool, expected: str) -> None:
        got = f"{dtype_name} {shape_text(shape[1:])}"
        require(is_met, f"{where}: `{step}` needs {expected}, got {got}")

    result = output
    if step == "argmax":
        need(is_number and has_axis, f"numbers with {own_axis}")
        result = StepOutput("int64", tuple(outer))
    elif isinstance(step, str):
        expected = "floats" if step == "sigmoid" else f"floats with {own_axis}"
        need(is_float and (has_axis or step == "sigmoid"), expected)
    elif step.top_k is not None:
        need(is_number and has_axis, f"numbers with {own_axis}")
        need(width is None or width >= step.top_k, f"at least {step.top_k} in the last axis")
        result = StepOutput(dtype_name, (*outer, step.top_k), is_top=True)
    elif step.select is not None:
        need(has_axis, own_axis)
        need(width is None or width > step.select, f"more than {step.select} in the last axis")
        result = StepOutput(dtype_name, tuple(outer))
    elif step.threshold is not None:
        need(is_number, "numbers")
        result = StepOutput("bool", shape)
    elif step.quantize is not None:
        need(is_float, "floats")
        result = StepOutput("int8", shape)
    else:
        target = step.cast or ""
        reserves_worker = target in FLOATS if is_float else is_number or dtype_name == "bool"
        reserves_worker = reserves_worker and (target != "bool" or dtype_name == "bool")
        need(target in NUMBERS or target == "bool", f"one of {', '.join(NUMBERS)}")
        others = "quantize converts floats to integers, and threshold to booleans"
        need(reserves_worker, f"numbers of that kind; {others}")
        result = StepOutput(target, shape)
    return result


def apply_labels(
    where: str, source: OutputSource, raw: StepOutput, output: StepOutput, declared: str, count: int
) -> StepOutput:
    """Return the output with labels in place of numbers.

    Reject a number of labels that is not the graph's number of classes.
    """
    classes: int | None = 2
    if output.dtype_name != "bool":
        is_whole = output.dtype_name in NUMBERS and output.dtype_name not in FLOATS
        problem = f"labels replace whole numbers, and this is {output.dtype_name}"
        require(is_whole, f"{where}: {problem}")
        picked = [step for step in source.post if step == "argmax" or is_top_k(step)]
        before = raw
        for step in source.post[: source.post.index(picked[-1])] if picked else ():
            before = apply_step(where, step, before)
        classes = before.shape[-1] if picked else None
    problem = f"`{source.labels}` has {count} lines and there are {classes} classes"
    require(classes in (None, count), f"{where}: {problem}")
    return output._replace(dtype_name=declared if declared == "binary" else "utf8")


def is_top_k(step: Post) -> bool:
    """Return whether the step returns labels and scores."""
    return isinstance(step, Step) and step.top_k is not None
