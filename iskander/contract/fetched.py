"""What a graph gives, its maps and sequences seen as one tensor each. Pure."""

from __future__ import annotations

import re

from iskander.contract.dtypes import BY_ONNX
from iskander.contract.graph import GraphTensor
from iskander.contract.outputs import Source
from iskander.contract.steps import Made, Sizes
from iskander.errors import ManifestError

_SEQUENCE = re.compile(r"seq\((?:map\((\w+),(tensor\(\w+\))\)|(tensor\(\w+\)))\)")
_KEYS = {"int64": int, "string": str}


def is_sequence(tensor: GraphTensor) -> bool:
    """Whether it is a sequence, of maps or of tensors."""
    return _SEQUENCE.fullmatch(tensor.element) is not None


def fetched(where: str, source: Source, tensor: GraphTensor, sizes: Sizes) -> Made:
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
    return Made(dtype.arrow, shape)
