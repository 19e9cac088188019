"""Backend `pipeline`: a sequence of models in one process, which pass tensors by name.

    tokenise:  text          -> ids, mask
    embed:     ids, mask     -> state
    pool:      state, mask   -> embedding

A step is a model of any backend, in the pipeline's folder. Tensors that no step returns are inputs
of the pipeline; any tensor that a step returns can be an output.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from iskander.contract.backend_manifest import PipelineStep
from iskander.contract.manifest import model_file, read_manifest
from iskander.contract.paths import path_inside
from iskander.contract.processing.pipelines import ConnectedSteps, StepNames, connect_steps
from iskander.errors import Cancelled, ExecutionFailed, IskanderError, ManifestError
from iskander.foundation.clock import now_ns
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker.backends import Arrays, Model, Run, load_model


def load(spec: ModelSpec, cores: int) -> Pipeline:
    """Load every step, or raise a `ManifestError` if one fails or their tensors do not match."""
    manifest = read_manifest(Path(spec.path))
    if manifest is None or not manifest.steps:
        raise ManifestError("a pipeline needs a manifest.toml with [[steps]]")
    models = [_load_step(step, spec, cores) for step in manifest.steps]
    return Pipeline(models, connect_steps(manifest.steps, [model.graph for model in models]))


class Pipeline:
    """A model that runs a loaded model for each step of `connected`."""

    def __init__(self, models: Sequence[Model], connected: ConnectedSteps) -> None:
        self._models = models
        self._steps = connected.steps
        self.graph = connected.graph
        self.threads = max(model.threads for model in models)
        libraries = (getattr(model, "library", "") for model in models)
        self.library = " and ".join(dict.fromkeys(library for library in libraries if library))
        providers = (provider for model in models for provider in model.providers)
        self.providers = tuple(dict.fromkeys(providers))

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute a batch step by step, and store the times of the steps.

        `Cancelled` after an abort.
        """
        tensors = dict(arrays)
        times: list[tuple[str, int]] = []
        needs = _needed_tensors(self._steps, outputs)
        for model, step, needed in zip(self._models, self._steps, needs, strict=True):
            if run.is_aborted:
                raise Cancelled("batch cancelled: its callers are gone")
            begun_ns = now_ns()
            feeds = {own: tensors[name] for own, name in step.inputs.items()}
            names = [own for own, name in step.outputs.items() if name in needed]
            if not names:
                continue
            try:
                results = model.compute(feeds, names, run)
            except ExecutionFailed as error:
                raise ExecutionFailed(f"step `{step.name}`: {error.message}") from None
            for own in names:
                if own not in results:
                    raise ExecutionFailed(f"step `{step.name}` did not return `{own}`")
                tensors[step.outputs[own]] = results[own]
            times.append((step.name, now_ns() - begun_ns))
        run.steps = tuple(times)
        return {name: tensors[name] for name in outputs}

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
        # A step alone has no contract, so it cannot be loaded in a sandbox.
        loading = msgspec.structs.replace(spec.loading, is_sandboxed=False, is_shared=False)
        file = str(model_file(path, step.backend))
        own = msgspec.structs.replace(spec, backend=step.backend, path=file, loading=loading)
        return load_model(own, cores)
    except IskanderError as error:
        raise ManifestError(f"step `{step.name}`: {error.message}") from None


def _needed_tensors(steps: Sequence[StepNames], outputs: Iterable[str]) -> list[set[str]]:
    """Return, for each step, the tensors that later steps or the caller need."""
    needed, found = set(outputs), []
    for step in reversed(steps):
        found.append(set(needed))
        needed |= set(step.inputs.values())
    return found[::-1]
