"""The graph of a model whose files say nothing of it: what its manifest declares.

Pure; known to workers and the operator's tool.
"""

from __future__ import annotations

from iskander.contract.column_types import parse_column_type
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.contract.postprocess import is_plain
from iskander.errors import ManifestError


def declared_graph(manifest: Manifest) -> Graph:
    """The graph of a model that says nothing of itself: as declared, else as its columns are.

    Raises:
        ManifestError: A type is unknown, or a tensor that is no column as it is is not declared.
    """
    inputs = {entry.tensor: entry.type for entry in manifest.inputs} | manifest.graph.inputs
    outputs = {entry.tensor: entry.type for entry in manifest.outputs if is_plain(entry)}
    outputs |= manifest.graph.outputs
    used = {source.tensor for entry in manifest.outputs for source in entry.sources}
    missing = sorted(used - set(outputs))
    if missing:
        raise ManifestError(
            f"the type of the tensor `{missing[0]}` is not known: declare it in [graph] outputs"
        )
    return Graph(_tensors(inputs), _tensors(outputs))


def _tensors(types: dict[str, str]) -> tuple[GraphTensor, ...]:
    columns = {name: parse_column_type(text) for name, text in types.items()}
    return tuple(
        GraphTensor(name, column.dtype.onnx, ("rows", *column.shape))
        for name, column in columns.items()
    )
