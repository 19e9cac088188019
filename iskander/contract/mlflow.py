"""The manifest that a signature of MLflow stands for: its columns, under their own names.

A signature has two texts of JSON, `inputs` and `outputs`. Each is a list of columns, or of tensors
with a name or none. It says nothing of a graph, so every column is taken for a tensor of its name.

Pure; runs in the operator's tool. Source: MLflow's model signature format (`MLmodel`, `signature`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import BY_ARROW, DTYPES
from iskander.contract.manifest import InputColumn, Manifest
from iskander.contract.outputs import OutputColumn
from iskander.errors import ManifestError

COLUMN_TYPES = {
    "boolean": "bool",
    "integer": "int32",
    "long": "int64",
    "float": "float32",
    "double": "float64",
    "string": "utf8",
    "binary": "binary",
}
TENSOR_TYPES = {dtype.numpy: dtype.arrow for dtype in DTYPES if dtype.arrow_bits} | {
    "uint16": "uint16",
    "object": "utf8",
    "str": "utf8",
}
SIZE_MAX = 10**9


def manifest_of_signature(document: Any) -> Manifest:  # noqa: ANN401
    """The manifest of an `MLmodel` document, or of the signature in it.

    Args:
        document: As read from YAML or JSON.

    Raises:
        ManifestError: There is no signature, or a column has no type here; names it.
    """
    signature = document.get("signature", document) if isinstance(document, dict) else None
    if not isinstance(signature, dict) or not signature.get("inputs"):
        raise ManifestError("there is no signature with inputs; log the model with one")
    inputs = _columns(signature["inputs"], "input")
    outputs = _columns(signature.get("outputs") or "[]", "output")
    if not outputs:
        raise ManifestError("the signature has no outputs; log the model with an output example")
    return Manifest(
        format=1,
        inputs=tuple(InputColumn(tensor=n, column=n, type=str(t)) for n, t in inputs),
        outputs=tuple(OutputColumn(column=n, type=str(t), tensor=n) for n, t in outputs),
    )


def _columns(text: Any, side: str) -> list[tuple[str, ColumnType]]:  # noqa: ANN401
    try:
        entries = msgspec.json.decode(text) if isinstance(text, str) else text
    except msgspec.DecodeError as error:
        raise ManifestError(f"the signature's {side}s are no JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ManifestError(f"the signature's {side}s are no list of columns")
    return [
        (str(entry.get("name") or (side if len(entries) == 1 else f"{side}_{number}")), kind)
        for number, entry in enumerate(entries)
        for kind in [_type_of(entry, str(entry.get("name") or f"{side} {number}"))]
    ]


def _type_of(entry: dict[str, Any], name: str) -> ColumnType:
    kind = entry.get("type")
    if kind == "tensor":
        spec = entry.get("tensor-spec")
        spec = spec if isinstance(spec, dict) else {}
        shape, element = spec.get("shape"), TENSOR_TYPES.get(str(spec.get("dtype")))
        if element not in BY_ARROW:
            raise ManifestError(f"tensor `{name}` is of `{spec.get('dtype')}`, which no column has")
        if not isinstance(shape, list) or not shape or shape[0] != -1:
            raise ManifestError(
                f"tensor `{name}` has the shape {shape}: its first axis is no batch"
            )
        sizes = shape[1:]
        if not all(isinstance(size, int) and 0 < size < SIZE_MAX for size in sizes):
            raise ManifestError(
                f"tensor `{name}` has the shape {shape}: only the first axis may be open"
            )
        return ColumnType(element, tuple(sizes))
    if kind not in COLUMN_TYPES:
        raise ManifestError(
            f"column `{name}` is of the type `{kind}`, which has no tensor here; there are "
            f"{', '.join(COLUMN_TYPES)}"
        )
    return ColumnType(COLUMN_TYPES[str(kind)])
