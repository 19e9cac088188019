"""Manifests from MLflow model signatures: one tensor per column, with its name.

A signature has two JSON texts, `inputs` and `outputs`. Each is a list of columns, or of tensors
with or without a name. It does not describe the graph.

Pure. Runs on: the operator's tool. Source: MLflow's model signature format (`MLmodel`,
`signature`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import BY_ARROW, DTYPES
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.outputs import OutputColumn
from iskander.contract.validation import require
from iskander.errors import ManifestError

COLUMN_TYPES = {"boolean": "bool", "integer": "int32", "long": "int64", "float": "float32"}
COLUMN_TYPES |= {"double": "float64", "string": "utf8", "binary": "binary"}
TENSOR_TYPES = {dtype.numpy: dtype.arrow for dtype in DTYPES if dtype.arrow_bits}
TENSOR_TYPES |= {"uint16": "uint16", "object": "utf8", "str": "utf8"}
SIZE_MAX = 10**9


def manifest_of_signature(document: Any) -> Manifest:  # noqa: ANN401
    """Return the manifest of a parsed `MLmodel` document, or of the signature in it.

    Raises:
        ManifestError: There is no signature, or a column's type is not supported.
    """
    signature = document.get("signature", document) if isinstance(document, dict) else None
    if not isinstance(signature, dict) or not signature.get("inputs"):
        raise ManifestError("there is no signature with inputs; log the model with one")
    inputs = _columns(signature["inputs"], "input")
    outputs = _columns(signature.get("outputs") or "[]", "output")
    require(bool(outputs), "the signature has no outputs; log the model with an output example")
    return Manifest(
        format=1,
        inputs=tuple(InputColumn(tensor=n, column=n, type=str(t)) for n, t in inputs),
        outputs=tuple(OutputColumn(column=n, type=str(t), tensor=n) for n, t in outputs),
    )


def _columns(text: Any, side: str) -> list[tuple[str, ColumnType]]:  # noqa: ANN401
    try:
        entries = msgspec.json.decode(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"the signature's {side}s are not JSON: {error}") from None
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    require(is_list, f"the signature's {side}s are not a list of columns")
    columns = []
    for number, entry in enumerate(entries):
        name = entry.get("name")
        default = side if len(entries) == 1 else f"{side}_{number}"
        columns.append((str(name or default), _type_of(entry, str(name or f"{side} {number}"))))
    return columns


def _type_of(entry: dict[str, Any], name: str) -> ColumnType:
    kind = entry.get("type")
    if kind != "tensor":
        supported = f"which is not supported; supported are {', '.join(COLUMN_TYPES)}"
        require(str(kind) in COLUMN_TYPES, f"column `{name}` is of the type `{kind}`, {supported}")
        return ColumnType(COLUMN_TYPES[str(kind)])
    spec = entry.get("tensor-spec")
    spec = spec if isinstance(spec, dict) else {}
    shape, element = spec.get("shape"), TENSOR_TYPES.get(str(spec.get("dtype")))
    if element not in BY_ARROW:
        raise ManifestError(f"tensor `{name}` is of `{spec.get('dtype')}`, which is not supported")
    if not isinstance(shape, list) or not shape or shape[0] != -1:
        raise ManifestError(f"tensor `{name}` has the shape {shape}: its first axis is no batch")
    sizes = shape[1:]
    is_fixed = all(isinstance(size, int) and 0 < size < SIZE_MAX for size in sizes)
    require(is_fixed, f"tensor `{name}` has the shape {shape}: only the first axis may be open")
    return ColumnType(element, tuple(sizes))
