"""Backend interface, and the lookup of the backend that a model names.

A backend is a function `load(spec, cores)` that returns a `Model`. It is in the table below, or
installed by another distribution in the entry-point group `iskander.backends`.

    Model          arrays in by name, arrays out by name
    BindingModel   a model that can also read and write a batch's buffers in place
    RemoteModel    a model on another server, whose readiness can be checked

The libraries of a backend are imported when a model first names it.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from iskander.contract.graph import Graph
from iskander.contract.manifest import Manifest, read_manifest
from iskander.contract.tensors import Contract
from iskander.errors import ManifestError
from iskander.interprocess.control.messages import ModelSpec

ENTRY_POINTS = "iskander.backends"
BUILT_IN = {
    name: f"iskander_worker.backends.{name}"
    for name in ("onnx", "pipeline", "python", "remote", "torch")
}
"""Name to module; its `load` is the backend."""


is_one_pool = False
"""Whether the models of this process that support it share one thread pool; set before loading."""
gateway_id = ""
"""Identity of the gateway of this process, for its remote models; set before loading."""

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each `(rows, *shape)`; strings as objects of `str`, bfloat16 as uint16."""


class Run:
    """One run of a model, which another thread may abort.

    Attributes:
        is_aborted: All its callers are gone. A model should poll it.
        native: Run options of the runtime; `abort` sets their `terminate`.
        steps: Name and nanoseconds of each pipeline step of the last run.
        deadline_ns: Deadline of the last caller; 0 for none.
        hops: Gateways that its requests passed before this one, at most.
        cancel: Cancels what the model waits for, from another thread; None if it does not wait.
        heartbeat: Shows the watchdog that the worker does not hang; for a model that waits.
        is_trial: The runtime logs no errors: generated values may be invalid.
    """

    __slots__ = (
        "cancel", "deadline_ns", "heartbeat", "hops", "is_aborted", "is_trial", "native", "steps",
    )  # fmt: skip

    def __init__(self, *, is_trial: bool = False) -> None:
        self.is_aborted, self.is_trial = False, is_trial
        self.native: Any = None
        self.steps: tuple[tuple[str, int], ...] = ()
        self.deadline_ns = self.hops = 0
        self.cancel: Callable[[], object] | None = None
        self.heartbeat: Callable[[], None] = _no_heartbeat

    def abort(self) -> None:
        """Abort the run."""
        self.is_aborted = True
        if self.native is not None:
            self.native.terminate = True
        cancel = self.cancel
        if cancel is not None:
            cancel()


def _no_heartbeat() -> None:
    """Outside the worker's loop, such as in a load, no watchdog checks the thread."""


class Bound(Protocol):
    """A batch bound to the addresses of its bodies; `own_bytes` is the size of its buffers."""

    own_bytes: int

    def run(self, run: Run) -> None:
        """Compute the batch, or raise `ExecutionFailed`; can be called repeatedly."""


class Model(Protocol):
    """One loaded model version; `providers` and `threads` are shown to the operator.

    `library`, if it has one, is the name and version of what computes its batches.
    """

    graph: Graph
    providers: tuple[str, ...]
    threads: int

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute the named outputs of one batch, or raise `ExecutionFailed` with a caller's text.

        `arrays` has every input: read-only views, valid during the call.
        """

    def close(self) -> None:
        """Release its resources; it is not used again."""


@runtime_checkable
class BindingModel(Model, Protocol):
    """A model that reads and writes a batch's buffers in place; a binding may be reusable."""

    is_binding_reusable: bool

    def bind(self, contract: Contract, rows: int, input_address: int, output_address: int) -> Bound:
        """Bind the contract's tensors to a batch's bodies, or raise `ExecutionFailed`.

        Layout: `body_layout` from the two addresses, every tensor `(rows, *spec.shape)`. The caller
        keeps the mappings alive.
        """


@runtime_checkable
class RemoteModel(Model, Protocol):
    """A model on another server. A load sends it no generated batches."""

    def probe(self, run: Run) -> str:
        """Return why the server is not ready; empty if it is."""


def require_manifest(spec: ModelSpec) -> Manifest:
    """The manifest of a model that needs one, and workers of its own."""
    if not spec.pool:
        name = spec.backend
        raise ManifestError(f"the backend `{name}` needs workers of its own: set workers = 1")
    manifest = read_manifest(Path(spec.path))
    if manifest is None:
        raise ManifestError("manifest.toml not found: it declares the tensors of the model")
    return manifest


def load_model(spec: ModelSpec, cores: int) -> Model:
    """Load a model with the backend that it names, or raise a `ManifestError`.

    `cores` is the number of physical cores, and of compute threads if the spec names none.
    """
    name = spec.backend
    load: Callable[[ModelSpec, int], Model]
    try:
        if name in BUILT_IN:
            load = import_module(BUILT_IN[name]).load
        else:
            # Reads the metadata of all installed distributions, so only if needed.
            found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
            if name not in found:
                known = ", ".join(sorted({*BUILT_IN, *found}))
                raise ManifestError(f"no backend `{name}` is installed; installed: {known}")
            load = found[name].load()
    except ImportError as error:
        raise ManifestError(f"the backend `{name}` cannot be imported: {error}") from None
    return load(spec, cores)
