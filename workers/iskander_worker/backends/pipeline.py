"""The backend `pipeline`: models in a row, in one process, tensors handed on by name.

    tokenise:  text          -> ids, mask
    embed:     ids, mask     -> state
    pool:      state, mask   -> embedding

A step is a model of any backend, in the pipeline's folder. What no step makes is an input of the
pipeline; whatever a step makes may be an output.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from iskander.clock import now_ns
from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.manifest import model_file, read_manifest
from iskander.contract.paths import path_inside
from iskander.contract.pipelines import Flow, Joint, flow_of
from iskander.control.messages import ModelSpec
from iskander.errors import Cancelled, ExecutionFailed, IskanderError, ManifestError
from iskander_worker.backends import Arrays, Model, Run, load_model


def load(spec: ModelSpec, cores: int) -> Pipeline:
    """Load every step, and see that they fit together.

    Raises:
        ManifestError: There are no steps, one cannot be loaded, or takes what nothing makes.
    """
    manifest = read_manifest(Path(spec.path))
    if manifest is None or not manifest.steps:
        raise ManifestError("a pipeline has a manifest.toml with [[steps]]")
    models = [_load_step(step, spec, cores) for step in manifest.steps]
    return Pipeline(models, flow_of(manifest.steps, [model.graph for model in models]))


class Pipeline:
    """Loaded steps.

    Args:
        models: One for each joint of the flow.
        flow: Which tensor goes where.
    """

    def __init__(self, models: Sequence[Model], flow: Flow) -> None:
        self._models = models
        self._joints = flow.joints
        self.graph = flow.graph
        self.threads = max(model.threads for model in models)
        self.providers = tuple(dict.fromkeys(each for model in models for each in model.providers))

    def compute(self, arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
        """Compute a batch step by step; the time of each is told to the run.

        Raises:
            ExecutionFailed: A step did not compute it; says which.
            Cancelled: Nobody waited for the next step.
        """
        known = dict(arrays)
        taken: list[tuple[str, int]] = []
        for model, joint, needed in zip(
            self._models, self._joints, _needed(self._joints, wanted), strict=True
        ):
            if run.is_aborted:
                raise Cancelled("nobody waited for this batch any more")
            begun_ns = now_ns()
            feeds = {own: known[name] for own, name in joint.inputs.items()}
            names = [own for own, name in joint.outputs.items() if name in needed]
            if not names:
                continue
            try:
                made = model.compute(feeds, names, run)
            except ExecutionFailed as error:
                raise ExecutionFailed(f"step `{joint.name}`: {error.message}") from None
            for own in names:
                known[joint.outputs[own]] = _made(joint, own, made)
            taken.append((joint.name, now_ns() - begun_ns))
        run.steps = tuple(taken)
        return {name: known[name] for name in wanted}

    def close(self) -> None:
        """Close every step."""
        for model in self._models:
            model.close()


def _load_step(step: PipelineStep, spec: ModelSpec, cores: int) -> Model:
    try:
        path = path_inside(Path(spec.path).parent, step.model, is_folder_allowed=True)
        if step.backend != "onnx" and not path.is_dir():
            raise ManifestError(
                f"a model of the backend `{step.backend}` is a folder with its own manifest.toml"
            )
        # As a part it has no contract with which it could be tried out alone.
        loading = msgspec.structs.replace(spec.loading, is_tried=False, is_shared=False)
        file = str(model_file(path, step.backend))
        own = msgspec.structs.replace(spec, backend=step.backend, path=file, loading=loading)
        return load_model(own, cores)
    except IskanderError as error:
        raise ManifestError(f"step `{step.name}`: {error.message}") from None


def _needed(joints: Sequence[Joint], wanted: Iterable[str]) -> list[set[str]]:
    """For each step, which tensors those after it or the caller want."""
    needed, found = set(wanted), []
    for joint in reversed(joints):
        found.append(set(needed))
        needed |= set(joint.inputs.values())
    return found[::-1]


def _made(joint: Joint, own: str, made: Arrays) -> np.ndarray:
    if own not in made:
        raise ExecutionFailed(f"step `{joint.name}` did not make `{own}`")
    return made[own]
