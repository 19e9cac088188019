"""Which tensor goes where in a pipeline, and what the whole takes and makes.

Pure; known to workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.errors import ManifestError


class Joint(NamedTuple):
    """A step and its tensors: their names in the step to those in the pipeline."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]


class Flow(NamedTuple):
    """Steps that fit together, and the graph that they are."""

    joints: tuple[Joint, ...]
    graph: Graph


def flow_of(steps: Sequence[PipelineStep], graphs: Sequence[Graph]) -> Flow:
    """Put steps together.

    Args:
        steps: In order.
        graphs: Of the model of each.

    Raises:
        ManifestError: A step names a tensor that its model has not, makes one that is there
            already, or takes one of another type; says which.
    """
    joints: list[Joint] = []
    taken: dict[str, GraphTensor] = {}
    made: dict[str, GraphTensor] = {}
    for step, graph in zip(steps, graphs, strict=True):
        if step.name in {joint.name for joint in joints}:
            raise ManifestError(f"two steps are called `{step.name}`")
        inputs = _names(step, "inputs", step.inputs, graph.inputs)
        outputs = _names(step, "outputs", step.outputs, graph.outputs)
        for tensor in graph.inputs:
            name = inputs[tensor.name]
            known = made.get(name) or taken.setdefault(name, tensor)
            _require_fit(step, name, known, tensor)
        for tensor in graph.outputs:
            name = outputs[tensor.name]
            if name in made or name in taken:
                raise ManifestError(f"step `{step.name}` makes `{name}`, which is there already")
            made[name] = tensor
        joints.append(Joint(step.name, inputs, outputs))
    return Flow(tuple(joints), Graph(_graph(taken), _graph(made)))


def _names(
    step: PipelineStep, side: str, renamed: dict[str, str], tensors: tuple[GraphTensor, ...]
) -> dict[str, str]:
    """Names in the pipeline of all of a step's tensors: as said, else their own."""
    names = {tensor.name: tensor.name for tensor in tensors}
    unknown = sorted(set(renamed) - set(names))
    if unknown:
        raise ManifestError(
            f"step `{step.name}`: its model has no `{unknown[0]}` among its {side}, which are "
            f"{', '.join(names)}"
        )
    names |= renamed
    if len(set(names.values())) < len(names):
        raise ManifestError(f"step `{step.name}`: two of its {side} have one name")
    return names


def _require_fit(step: PipelineStep, name: str, known: GraphTensor, wanted: GraphTensor) -> None:
    pairs = zip(known.shape[1:], wanted.shape[1:], strict=False)
    is_same = known.element == wanted.element and len(known.shape) == len(wanted.shape)
    if not is_same or any(_differ(one, other) for one, other in pairs):
        raise ManifestError(
            f"step `{step.name}` takes `{name}` as {wanted.element} {list(wanted.shape)}, and it "
            f"is {known.element} {list(known.shape)}"
        )


def _differ(one: Dimension, other: Dimension) -> bool:
    return isinstance(one, int) and isinstance(other, int) and one != other


def _graph(tensors: dict[str, GraphTensor]) -> tuple[GraphTensor, ...]:
    """Under the pipeline's names; what each step calls its rows is one thing here."""
    return tuple(
        GraphTensor(name, tensor.element, (_rows(tensor.shape), *tensor.shape[1:]))
        for name, tensor in tensors.items()
    )


def _rows(shape: tuple[Dimension, ...]) -> Dimension:
    return shape[0] if shape and isinstance(shape[0], int) else "rows"
