"""What runs a model: the interface of a backend, and which one a model names.

A backend is a function `load(spec, cores)` that returns a `Model`. It is in the table below, or
installed by another distribution in the entry-point group `iskander.backends`.

    Model          arrays in by name, arrays out by name
    BindingModel   a model that can also read and write a batch's buffers where they lie

Nothing of a backend's libraries is imported before a model names it.

Runs on: worker main.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

import numpy as np

from iskander.contract.graph import Graph
from iskander.contract.tensors import Contract
from iskander.control.messages import ModelSpec
from iskander.errors import ManifestError

ENTRY_POINTS = "iskander.backends"
BUILT_IN = {
    name: f"iskander_worker.backends.{name}" for name in ("onnx", "pipeline", "python", "torch")
}
"""Name to module; its `load` is the backend."""


class Threads:
    """How the models of this process share its threads.

    Attributes:
        is_one_pool: Those that can compute with one pool; set before the first is loaded.
    """

    is_one_pool = False


threads = Threads()

Arrays = Mapping[str, np.ndarray]
"""Tensors by name, each `(rows, *shape)`; strings as objects of `str`, bfloat16 as uint16."""


class Run:
    """One run of a model, which another thread may give up.

    Attributes:
        is_aborted: Nobody waits for it any more. A model looks at it where it can.
        native: A runtime's own options, on which `terminate` is set too.
        steps: Name and nanoseconds of each step of the model that ran last; empty without steps.
    """

    __slots__ = ("is_aborted", "native", "steps")

    def __init__(self) -> None:
        self.is_aborted = False
        self.native: Any = None
        self.steps: tuple[tuple[str, int], ...] = ()

    def abort(self) -> None:
        """Give the run up."""
        self.is_aborted = True
        if self.native is not None:
            self.native.terminate = True


class Bound(Protocol):
    """A batch whose inputs and results lie at known addresses; may be run again and again.

    Attributes:
        own_bytes: Memory that it keeps for itself.
    """

    own_bytes: int

    def run(self, run: Run) -> None:
        """Compute the batch.

        Raises:
            ExecutionFailed: The model did not.
        """


class Model(Protocol):
    """One loaded model version.

    Attributes:
        graph: The tensors that it takes and makes.
        providers: On what it computes, for the operator.
        threads: Compute threads.
    """

    graph: Graph
    providers: tuple[str, ...]
    threads: int

    def compute(self, arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
        """Compute one batch.

        Args:
            arrays: Every input; views of memory that may not be written, and not kept.
            wanted: The outputs to return.
            run: This one.

        Raises:
            ExecutionFailed: The model did not; in words for the caller.
        """

    def close(self) -> None:
        """Give up what it holds; it is not used again."""


@runtime_checkable
class BindingModel(Model, Protocol):
    """A model that computes straight from and to a batch's buffers.

    Attributes:
        is_binding_reusable: What `bind` returns may be kept, and run again.
    """

    is_binding_reusable: bool

    def bind(self, contract: Contract, rows: int, input_address: int, output_address: int) -> Bound:
        """Bind the contract's tensors to a batch's buffers where they lie.

        Layout:
            As `body_layout` says, from the two addresses; the caller keeps the mappings alive.

        Raises:
            ExecutionFailed: The runtime refuses them.
        """


def load_model(spec: ModelSpec, cores: int) -> Model:
    """Load a model with the backend that it names.

    Args:
        spec: Where the model is and how to run it.
        cores: Physical cores that this process may use; the compute threads where the spec names
            none.

    Raises:
        ManifestError: There is no such backend here, or it cannot load the model; says why.
    """
    return _backend(spec.backend)(spec, cores)


def _backend(name: str) -> Callable[[ModelSpec, int], Model]:
    load: Callable[[ModelSpec, int], Model]
    try:
        if name in BUILT_IN:
            load = import_module(BUILT_IN[name]).load
        else:
            # Only now: it looks at everything that is installed.
            found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
            if name not in found:
                known = ", ".join(sorted({*BUILT_IN, *found}))
                raise ManifestError(f"there is no backend `{name}` here; there are {known}")
            load = found[name].load()
    except ImportError as error:
        raise ManifestError(f"the backend `{name}` cannot be had here: {error}") from None
    return load
