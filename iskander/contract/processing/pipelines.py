"""Tensor connections of a pipeline, and the graph of the whole pipeline.

Pure. Runs on: workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.validation import require
from iskander.errors import ManifestError


class StepNames(NamedTuple):
    """The tensor names of a step, mapped to their names in the pipeline."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class ConnectedSteps(NamedTuple):
    """Connected steps and the pipeline's graph."""

    steps: tuple[StepNames, ...]
    graph: Graph


def connect_steps(steps: Sequence[PipelineStep], graphs: Sequence[Graph]) -> ConnectedSteps:
    """Connect steps by tensor name; each output of a step is a pipeline output.

    Raises:
        ManifestError: A name is unknown or a duplicate, or an input has another type or shape
            than the connected tensor.
    """
    connected: list[StepNames] = []
    external: dict[str, GraphTensor] = {}
    produced: dict[str, GraphTensor] = {}
    for step, graph in zip(steps, graphs, strict=True):
        is_new = step.name not in {each.name for each in connected}
        require(is_new, f"two steps are called `{step.name}`")
        inputs = _pipeline_names(step, "inputs", step.inputs, graph.inputs)
        outputs = _pipeline_names(step, "outputs", step.outputs, graph.outputs)
        for tensor in graph.inputs:
            name = inputs[tensor.name]
            known = produced.get(name) or external.setdefault(name, tensor)
            _require_type(step, name, known, tensor)
        for tensor in graph.outputs:
            name = outputs[tensor.name]
            is_new = name not in produced and name not in external
            require(is_new, f"step `{step.name}` makes `{name}`, which exists already")
            produced[name] = tensor
        connected.append(StepNames(step.name, inputs, outputs))
    return ConnectedSteps(
        tuple(connected), Graph(_rename_tensors(external), _rename_tensors(produced))
    )


def _pipeline_names(
    step: PipelineStep, side: str, renamed: dict[str, str], tensors: tuple[GraphTensor, ...]
) -> dict[str, str]:
    """Map tensor names of a step to pipeline names; by default, the names are equal."""
    names = {tensor.name: tensor.name for tensor in tensors}
    for unknown in sorted(set(renamed) - set(names)):
        problem = f"has no `{unknown}` among its {side}, which are {', '.join(names)}"
        raise ManifestError(f"step `{step.name}`: its model {problem}")
    names |= renamed
    is_distinct = len(set(names.values())) == len(names)
    require(is_distinct, f"step `{step.name}`: two of its {side} have one name")
    return names


def _require_type(step: PipelineStep, name: str, known: GraphTensor, needed: GraphTensor) -> None:
    pairs = zip(known.shape[1:], needed.shape[1:], strict=False)
    fixed = (pair for pair in pairs if all(isinstance(size, int) for size in pair))
    is_same = known.element == needed.element and len(known.shape) == len(needed.shape)
    fits = is_same and all(one == other for one, other in fixed)
    got = f"{known.element} {list(known.shape)}"
    expected = f"`{name}` as {needed.element} {list(needed.shape)}"
    require(fits, f"step `{step.name}` takes {expected}, and it is {got}")


def _rename_tensors(tensors: dict[str, GraphTensor]) -> tuple[GraphTensor, ...]:
    """Rename tensors, with one symbol for the rows of all steps."""
    found = []
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.shape and isinstance(tensor.shape[0], int) else "rows"
        found.append(GraphTensor(name, tensor.element, (rows, *tensor.shape[1:])))
    return tuple(found)
