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
"""Module of each backend by name; the function `load` of the module is the backend."""


has_one_pool = False
"""Whether models of this process share one thread pool, if their backend can; set before
loading."""
gateway_id = ""
"""Identity of the gateway that this process serves, for remote models; set before loading."""

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each `(rows, *shape)`; strings as objects of `str`, bfloat16 as uint16."""


class Run:
    """One run of a model, which another thread may abort.

    Attributes:
        is_aborted: All callers of the batch are gone. A model should poll this in a long run.
        native: Run options of the runtime; `abort` sets their `terminate`.
        steps: Name and nanoseconds of each pipeline step of the last run.
        deadline_ns: Deadline of the last caller; 0 for none.
        hops: Largest number of gateways that a request of the batch passed before this one.
        cancel: Cancels what the model waits for, from another thread; None if it does not wait.
        heartbeat: Function that a waiting model calls to show the watchdog that it does not hang.
        is_trial: The values are generated and may be invalid, so the runtime logs no errors.
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
    """A batch bound to the addresses of its bodies; `own_bytes` is the size of private buffers."""

    own_bytes: int

    def run(self, run: Run) -> None:
        """Compute the batch, or raise `ExecutionFailed`; can be called repeatedly."""


class Model(Protocol):
    """One loaded model version; `providers` and `threads` are shown to the operator.

    A model may also have an attribute `library`: the name and version of what computes its batches.
    """

    graph: Graph
    providers: tuple[str, ...]
    threads: int

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute the named outputs of one batch; raise `ExecutionFailed` with a text for callers.

        `arrays` has every input: read-only views, valid during the call.
        """

    def close(self) -> None:
        """Release the resources of the model, which is not used again."""


@runtime_checkable
class BindingModel(Model, Protocol):
    """A model that reads and writes a batch's buffers in place.

    If `is_binding_reusable`, the `Bound` of a batch can run later batches at the same addresses.
    """

    is_binding_reusable: bool

    def bind(self, contract: Contract, rows: int, input_address: int, output_address: int) -> Bound:
        """Bind the contract's tensors to a batch's bodies, or raise `ExecutionFailed`.

        Layout: `body_layout` from the two addresses, every tensor `(rows, *spec.shape)`. The caller
        keeps the mappings alive.
        """


@runtime_checkable
class RemoteModel(Model, Protocol):
    """A model on another server, to which a load sends no generated batches."""

    def probe(self, run: Run) -> str:
        """Return why the server is not ready; empty if it is."""


def require_manifest(spec: ModelSpec) -> Manifest:
    """Return the manifest of a model.

    Raise a `ManifestError` unless it has one and its own workers.
    """
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
            # Reads the metadata of all installed distributions, so only for other names.
            found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
            if name not in found:
                known = ", ".join(sorted({*BUILT_IN, *found}))
                raise ManifestError(f"no backend `{name}` is installed; installed: {known}")
            load = found[name].load()
    except ImportError as error:
        raise ManifestError(f"the backend `{name}` cannot be imported: {error}") from None
    return load(spec, cores)
