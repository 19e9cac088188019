"""A loaded model version as batches meet it: contract, columns, how a batch is run, warm-up.

What computes is a backend's (`backends`). Where it can bind a batch's buffers it does; everything
else runs with arrays (`arrays`).

Runs on: worker main.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import msgspec

from iskander.contract.buckets import variants
from iskander.contract.compile import compile_contract
from iskander.contract.labels import read_labels
from iskander.contract.manifest import WarmUp, model_file, read_manifest
from iskander.contract.postprocess import compile_outputs
from iskander.contract.rows import RowCopier
from iskander.contract.tensors import Contract
from iskander.control.messages import ModelSpec
from iskander.memory.heartbeat import model_digest
from iskander_worker.arrays import ArrayBatch, Compute
from iskander_worker.backends import BindingModel, Bound, Model, load_model
from iskander_worker.loading.opener import require_trusted
from iskander_worker.postprocess import PostProcessor
from iskander_worker.vocabulary import Vocabularies
from iskander_worker.warm_up import warm


class Session:
    """One loaded model version.

    Args:
        spec: Where the model is and how to run it.
        cores: Physical cores that this process may use.
        load: What loads it.

    Attributes:
        notices: What was not as it should be, and still serves.
        is_bound: Its batches run on their buffers where they lie, and not with arrays.
        digest: Of its model version, for heartbeats.
        is_binding_reusable: What `bind` returns may be kept.

    Raises:
        ManifestError: The model cannot be served: backend, file, graph or manifest; says which.
    """

    def __init__(
        self, spec: ModelSpec, cores: int, load: Callable[[ModelSpec, int], Model] = load_model
    ) -> None:
        if spec.backend != "onnx":  # Which asks for more, and knows which files are the model.
            require_trusted(spec)
        self._model = model = load(spec, cores)
        written = read_manifest(Path(spec.path))
        labels = read_labels(Path(spec.path), written)
        self.contract = compile_contract(written, model.graph, spec.string_bytes, labels)
        self._compute: Compute = model.compute
        is_plain = True
        if written is not None:
            finished = compile_outputs(written.outputs, model.graph, labels, spec.string_bytes)
            is_plain = finished.is_plain
            if not is_plain:
                self._compute = PostProcessor(finished.finishes).around(model.compute)
        vocabularies = Vocabularies(self.contract, model.graph, labels)
        if len(vocabularies):
            self._compute = vocabularies.around(self._compute)
        self.digest = model_digest(spec.name, spec.version)
        self._folder = model_file(Path(spec.path)).parent
        self._plan = written.warm_up if written is not None else WarmUp()
        self.notices: tuple[str, ...] = getattr(model, "notices", ())
        self.threads, self.providers = model.threads, model.providers
        self.inputs = RowCopier(self.contract.inputs)
        self.outputs = RowCopier(self.contract.outputs)
        has_strings = self.inputs.has_strings or self.outputs.has_strings
        can_bind = is_plain and not has_strings
        self._binding = model if isinstance(model, BindingModel) and can_bind else None
        self.is_bound = self._binding is not None
        self.is_binding_reusable = self._binding is not None and self._binding.is_binding_reusable
        self._buckets = tuple(map(self._for, variants(self.contract)[:-1]))

    def bucket(self, number: int) -> Session:
        """The model with its inputs as long as a bucket's; the last one is itself."""
        return self._buckets[number] if number < len(self._buckets) else self

    def _for(self, contract: Contract) -> Session:
        """The same model, its batches laid out by another contract."""
        made = copy.copy(self)
        made.contract, made.inputs, made._buckets = contract, RowCopier(contract.inputs), ()
        return made

    def bind(self, rows: int, input_address: int, output_address: int) -> Bound:
        """A batch whose inputs and results lie at these addresses.

        Shape:
            Every tensor is `(rows, *spec.shape)`.

        Layout:
            As `body_layout` says, from the two addresses; the caller keeps the mappings alive.

        Raises:
            ExecutionFailed: The runtime refuses them.
        """
        if self._binding is not None:
            return self._binding.bind(self.contract, rows, input_address, output_address)
        return ArrayBatch(
            self._compute,
            self.inputs,
            self.outputs,
            rows=rows,
            input_address=input_address,
            output_address=output_address,
        )

    def close(self) -> None:
        """Give up what the model holds."""
        self._model.close()

    def warm_up(self, rows_max: int) -> None:
        """Compute the first batches, so that no caller pays for first times.

        Args:
            rows_max: Of a batch.

        Raises:
            ManifestError: A recorded sample does not come out as recorded.
        """
        made_up = msgspec.structs.replace(self._plan, samples="")
        for each in self._buckets:
            warm(each, self._folder, made_up, rows_max)
        warm(self, self._folder, self._plan, rows_max)
