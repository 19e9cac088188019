"""Tensor connections of a pipeline, and the graph of the whole pipeline.

Pure. Runs on: workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.validation import require
from iskander.errors import ManifestError


class StepNames(NamedTuple):
    """A step and its tensors: their names in the step to those in the pipeline."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class ConnectedSteps(NamedTuple):
    """Connected steps and their graph."""

    joints: tuple[StepNames, ...]
    graph: Graph


def connect_steps(steps: Sequence[PipelineStep], graphs: Sequence[Graph]) -> ConnectedSteps:
    """Connect the steps of a pipeline, by the graphs of their models.

    Raises:
        ManifestError: A step names a tensor that its model does not have, produces one that
            exists already, or takes one of another type.
    """
    joints: list[StepNames] = []
    external: dict[str, GraphTensor] = {}
    produced: dict[str, GraphTensor] = {}
    for step, graph in zip(steps, graphs, strict=True):
        is_new = step.name not in {joint.name for joint in joints}
        require(is_new, f"two steps are called `{step.name}`")
        inputs = _names(step, "inputs", step.inputs, graph.inputs)
        outputs = _names(step, "outputs", step.outputs, graph.outputs)
        for tensor in graph.inputs:
            name = inputs[tensor.name]
            known = produced.get(name) or external.setdefault(name, tensor)
            _require_fit(step, name, known, tensor)
        for tensor in graph.outputs:
            name = outputs[tensor.name]
            is_new = name not in produced and name not in external
            require(is_new, f"step `{step.name}` makes `{name}`, which exists already")
            produced[name] = tensor
        joints.append(StepNames(step.name, inputs, outputs))
    return ConnectedSteps(tuple(joints), Graph(_graph(external), _graph(produced)))


def _names(
    step: PipelineStep, side: str, renamed: dict[str, str], tensors: tuple[GraphTensor, ...]
) -> dict[str, str]:
    """Names in the pipeline of all tensors of a step; by default their own."""
    names = {tensor.name: tensor.name for tensor in tensors}
    for unknown in sorted(set(renamed) - set(names)):
        raise ManifestError(
            f"step `{step.name}`: its model has no `{unknown}` among its {side}, which are "
            f"{', '.join(names)}"
        )
    names |= renamed
    is_distinct = len(set(names.values())) == len(names)
    require(is_distinct, f"step `{step.name}`: two of its {side} have one name")
    return names


def _require_fit(step: PipelineStep, name: str, known: GraphTensor, needed: GraphTensor) -> None:
    pairs = zip(known.shape[1:], needed.shape[1:], strict=False)
    is_same = known.element == needed.element and len(known.shape) == len(needed.shape)
    fits = is_same and not any(_differ(one, other) for one, other in pairs)
    got = f"{known.element} {list(known.shape)}"
    expected = f"`{name}` as {needed.element} {list(needed.shape)}"
    require(fits, f"step `{step.name}` takes {expected}, and it is {got}")


def _differ(one: Dimension, other: Dimension) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one != other


def _graph(tensors: dict[str, GraphTensor]) -> tuple[GraphTensor, ...]:
    """Tensors with the pipeline's names, and one symbol for the rows of all steps."""
    found = []
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.shape and isinstance(tensor.shape[0], int) else "rows"
        found.append(GraphTensor(name, tensor.element, (rows, *tensor.shape[1:])))
    return tuple(found)
