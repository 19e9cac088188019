"""Graph of a model whose files declare no tensors, from its manifest.

Pure. Runs on: workers and the operator's tool.
"""

from __future__ import annotations

from iskander.contract.column_types import parse_column_type
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.contract.postprocess import is_plain
from iskander.contract.validation import quoted, require


def declared_graph(manifest: Manifest) -> Graph:
    """The graph from `[graph]`; a tensor without an entry has the type of its column.

    Raises:
        ManifestError: A type is unknown, or a tensor with post-processing has no entry.
    """
    inputs = {entry.tensor: entry.type for entry in manifest.inputs} | manifest.graph.inputs
    outputs = {entry.tensor: entry.type for entry in manifest.outputs if is_plain(entry)}
    outputs |= manifest.graph.outputs
    used = {source.tensor for entry in manifest.outputs for source in entry.sources}
    missing = quoted(sorted(used - set(outputs)))
    problem = f"the type of the tensors {missing} is not known: declare it in [graph] outputs"
    require(used <= set(outputs), problem)
    return Graph(_tensors(inputs), _tensors(outputs))


def _tensors(types: dict[str, str]) -> tuple[GraphTensor, ...]:
    columns = {name: parse_column_type(text) for name, text in types.items()}
    return tuple(
        GraphTensor(name, column.dtype.onnx, ("rows", *column.shape))
        for name, column in columns.items()
    )
