"""Session of a loaded model version: contract, batch execution, warm-up.

A backend computes (`backends`), on bound buffers if possible, else on arrays (`arrays`).

Runs on: worker main.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np

from iskander.contract.compile import compile_contract
from iskander.contract.graph import Graph
from iskander.contract.labels import Labels, read_labels
from iskander.contract.manifest import Manifest, WarmUp, model_file, read_manifest
from iskander.contract.processing.buckets import contracts_of_buckets
from iskander.contract.processing.postprocess import compile_outputs
from iskander.contract.processing.row_relation import RowRelation
from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import Contract
from iskander.errors import ExecutionFailed, ManifestError
from iskander.interprocess.control.messages import ModelSpec
from iskander.interprocess.memory.heartbeat import model_digest
from iskander_worker.backends import (
    Arrays,
    BindingModel,
    Bound,
    Model,
    RemoteModel,
    Run,
    load_model,
)
from iskander_worker.batches.arrays import DATA_ERRORS, ArrayBatch, Compute
from iskander_worker.batches.postprocess import PostProcessor
from iskander_worker.batches.vocabulary import Vocabularies
from iskander_worker.devices.cuda import idle
from iskander_worker.devices.workspace import SLOTS, DeviceBatch, Launcher, Workspace
from iskander_worker.loading.measurement import Measurement, undecided
from iskander_worker.loading.model_files import folder_sha256
from iskander_worker.loading.opener import require_trusted
from iskander_worker.loading.output_proof import require_written, stain_memory, unbound_outputs
from iskander_worker.loading.row_measurement import MEASURE_S, measure_rows
from iskander_worker.warm_up import (
    compute_body,
    from_body,
    generate_inputs,
    run_warm_up,
    sample_inputs,
)

PROOF_ROWS = (1, 3)
"""Rows of the batches that prove which memory a run writes."""
SAMPLES_MEASURED = 8
"""Number of rows of the warm-up samples that are measured."""


class Session:
    """One loaded model version; raises a `ManifestError` if it cannot be served.

    Attributes:
        notices: Problems that do not prevent serving.
        digest: Digest of the model version, for heartbeats.
        files_sha256: Hash of the model's files, sent in `Loaded`; empty if unknown.
        library: Name and version of the library that computes the batches, sent in `Loaded`.
        measurement: What the load found out about the model by running it.
        graph: Tensors that the model itself declares.
        device: GPU that computes the batches; None if the processor does.
        launcher: Launcher of a model on a GPU; None if the host must convert a tensor.
        workspaces: Device memory of each slot; empty without a launcher.
    """

    def __init__(
        self, spec: ModelSpec, cores: int, load: Callable[[ModelSpec, int], Model] = load_model
    ) -> None:
        files_sha256 = ""
        if spec.backend != "onnx":  # The backend `onnx` checks and hashes its files itself.
            require_trusted(spec)
            files_sha256 = folder_sha256(Path(spec.path).parent)
        self._model = model = load(spec, cores)
        self.files_sha256: str = getattr(model, "files_sha256", files_sha256)
        launcher: Launcher | None = getattr(model, "launcher", None)
        self.device = launcher.device if launcher is not None else None
        self.workspaces: list[Workspace] = []
        self._buckets: tuple[Session, ...] = ()
        try:
            self._compile(spec, model, launcher)
        except BaseException:
            self.close()
            raise

    def _compile(self, spec: ModelSpec, model: Model, launcher: Launcher | None) -> None:
        manifest = read_manifest(Path(spec.path))
        labels = read_labels(Path(spec.path), manifest)
        self.graph: Graph = model.graph
        self.contract = compile_contract(manifest, model.graph, spec.string_bytes, labels)
        known: Measurement | None = getattr(model, "measurement", None)
        self._is_measured = known is not None
        self.measurement = known or Measurement()
        self._combine = manifest.combine if manifest is not None else None
        self._accepted_texts = _vocabulary_words(manifest, labels)
        if known is not None:
            self._require_one_result_per_row()
            self.contract = _without_binding(self.contract, frozenset(known.unbound))
        self._compute: Compute = model.compute
        is_plain = True
        if manifest is not None:
            finished = compile_outputs(manifest.outputs, model.graph, labels, spec.string_bytes)
            is_plain = finished.is_plain
            if not is_plain:
                self._compute = PostProcessor(finished.finishes).around(model.compute)
        vocabularies = Vocabularies(self.contract, model.graph, labels)
        if len(vocabularies):
            self._compute = vocabularies.around(self._compute)
        self.digest = model_digest(spec.name, spec.version)
        self._file = model_file(Path(spec.path))
        self._folder = self._file.parent
        self._warm_up = manifest.warm_up if manifest is not None else WarmUp()
        self.notices: tuple[str, ...] = getattr(model, "notices", ())
        self.threads, self.providers = model.threads, model.providers
        self.library: str = getattr(model, "library", "")
        self.inputs = RowCopier(self.contract.inputs)
        self.outputs = RowCopier(self.contract.outputs)
        can_bind = is_plain and not (self.inputs.has_strings or self.outputs.has_strings)
        self._binding = model if isinstance(model, BindingModel) and can_bind else None
        self.is_binding_reusable = self._binding is not None and self._binding.is_binding_reusable
        # Booleans are bits in an arena and bytes in a tensor: the host converts them.
        columns = (*self.contract.inputs, *self.contract.outputs)
        can_bind = can_bind and all(spec.type.dtype_name != "bool" for spec in columns)
        self.launcher = launcher if can_bind else None
        self.workspaces = self._make_workspaces()
        self._buckets = tuple(
            map(self._session_of_bucket, contracts_of_buckets(self.contract)[:-1])
        )

    @property
    def relation(self) -> RowRelation:
        """Whether rows of a batch affect each other's results: as measured, or by the manifest."""
        return RowRelation(self.measurement.verdict, self.measurement.evidence, self._combine)

    @property
    def is_bound(self) -> bool:
        """Whether the runtime writes results to the memory of a batch."""
        return self._binding is not None or self.launcher is not None

    @property
    def is_exact(self) -> bool:
        """Whether equal batches have results with equal bits, as on a processor."""
        return self.launcher is None

    def bucket(self, number: int) -> Session:
        """Return the session for a bucket's input length; `self` serves the last bucket."""
        return self._buckets[number] if number < len(self._buckets) else self

    def _session_of_bucket(self, contract: Contract) -> Session:
        """Return a session with the same model and the contract of a bucket."""
        session = copy.copy(self)
        session.contract, session.inputs = contract, RowCopier(contract.inputs)
        session.workspaces = session._make_workspaces()
        session._buckets = ()
        return session

    def _make_workspaces(self) -> list[Workspace]:
        launcher, contract = self.launcher, self.contract
        if launcher is None:
            return []
        return [Workspace(launcher, contract, self.inputs, self.outputs) for _ in range(SLOTS)]

    def bind(self, rows: int, input_address: int, output_address: int) -> Bound:
        """Bind a batch to the addresses of its bodies, as `BindingModel.bind` does."""
        if self.launcher is not None:
            return DeviceBatch(
                self.launcher,
                self.workspaces[0],
                self.contract,
                rows,
                input_address,
                output_address,
            )
        if self._binding is not None:
            return self._binding.bind(self.contract, rows, input_address, output_address)
        return ArrayBatch(
            self._compute, self.inputs, self.outputs, rows, input_address, output_address
        )

    def close(self) -> None:
        """Release the model; none of its batches is in flight."""
        with idle(self.device) if self.device is not None else nullcontext():
            for session in (*self._buckets, self):
                for workspace in session.workspaces:
                    workspace.close()
            self._model.close()

    def probe(self, run: Run) -> str:
        """Return why the server of a remote model is not ready; empty if it is."""
        return self._model.probe(run) if isinstance(self._model, RemoteModel) else ""

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Return the results of arrays, in memory of the model, or raise `ExecutionFailed`."""
        try:
            return self._compute(arrays, outputs, run)
        except DATA_ERRORS as error:
            raise ExecutionFailed(f"computing this batch failed: {error}") from None

    def results(self, rows: int, arrays: Arrays, run: Run) -> dict[str, np.ndarray]:
        """Return the results of a batch by name, computed in the way of a caller's batch."""
        return from_body(self.contract.outputs, rows, compute_body(self, rows, arrays, run))

    def stain(self, lengths: Sequence[int], pattern: int) -> None:
        """Fill memory of these lengths with a pattern and free it, in the model's allocator."""
        getattr(self._model, "stain", stain_memory)(lengths, pattern)

    def warm_up(self, rows_max: int) -> None:
        """Run the first batches, of at most `rows_max` rows, before any caller's.

        If no measurement is cached, first prove which memory the runs write.
        """
        if isinstance(self._model, RemoteModel) and not self._warm_up.samples:
            return
        generated = msgspec.structs.replace(self._warm_up, samples="")
        if not self._is_measured and not isinstance(self._model, RemoteModel):
            self._prove_outputs(generated)
        for bucket in self._buckets:
            run_warm_up(bucket, self._folder, generated, rows_max)
        run_warm_up(self, self._folder, self._warm_up, rows_max)
        if self.launcher is not None:
            for session in (*self._buckets, self):
                for _ in range(SLOTS):  # Each slot has launches and graphs of its own.
                    run_warm_up(
                        session, self._folder, generated, rows_max, self.launcher.graph_rows
                    )
                    session.workspaces.reverse()

    def measure(
        self,
        *,
        is_confined: bool,
        seconds: float = MEASURE_S,
        on_risk: Callable[[Measurement], None] | None = None,
    ) -> None:
        """Measure whether rows affect each other, unless the load has a cached measurement.

        Args:
            is_confined: A crash ends only the process of this load.
            seconds: Time limit.
            on_risk: Called with the measurement so far before batches that may end the process.

        Raises:
            ManifestError: A batch has another number of results than rows.
        """
        if self._is_measured:
            return
        self._is_measured = True
        unbound = self.measurement.unbound
        if isinstance(self._model, RemoteModel):
            self.measurement = undecided("a remote model is sent no generated rows", unbound)
            return
        is_confined = is_confined and self.launcher is None
        verdict, evidence, has_other_rows = measure_rows(
            self,
            self._measured_samples(),
            self._accepted_texts,
            self._file,
            is_confined=is_confined,
            seconds=seconds,
            on_risk=None
            if on_risk is None
            else lambda found: on_risk(Measurement(unbound, *found)),
        )
        self.measurement = Measurement(unbound, verdict, evidence, has_other_rows)
        self._require_one_result_per_row()

    def _measured_samples(self) -> Arrays:
        """Return some rows of the warm-up samples; none if a fixed number of rows needs more."""
        if not self._warm_up.samples:
            return {}
        fixed = self.contract.rows_fixed
        count, samples = sample_inputs(self.contract.inputs, self._folder, self._warm_up.samples)
        step = max(count // SAMPLES_MEASURED, 1)
        wanted = fixed or SAMPLES_MEASURED
        chosen = {name: array[::step][:wanted] for name, array in samples.items()}
        return chosen if fixed in (None, len(next(iter(chosen.values())))) else {}

    def _require_one_result_per_row(self) -> None:
        """Reject a model with another number of results than rows, unless `combine` accepts it."""
        if self.measurement.has_other_rows and self._combine is None:
            raise ManifestError(
                f"{self.measurement.evidence}: its results cannot be assigned to rows; "
                "`combine = false` in the manifest serves the requests without such rows"
            )

    def _prove_outputs(self, plan: WarmUp) -> None:
        """Prove that runs write all memory of their results; raise a `ManifestError` otherwise.

        From now on, bound outputs that a run does not write are copied.
        """
        specs, fixed = self.contract.inputs, self.contract.rows_fixed
        random = WarmUp(values="random", low=1, high=2)
        batches = [
            (rows, generate_inputs(specs, rows, values))
            for rows in (PROOF_ROWS if fixed is None else (fixed,))
            for values in (plan, random)
        ]
        if self._warm_up.samples:
            rows, inputs = sample_inputs(specs, self._folder, self._warm_up.samples)
            wanted = fixed or min(rows, PROOF_ROWS[-1])
            if wanted <= rows:
                batches.append((wanted, {name: array[:wanted] for name, array in inputs.items()}))
        unbound = unbound_outputs(self, batches, may_differ=self._combine is not None)
        if unbound:
            self.measurement = Measurement(unbound)
            for session in (*self._buckets, self):
                session.contract = _without_binding(session.contract, frozenset(unbound))
                for workspace in session.workspaces:
                    workspace.close()
                session.workspaces = session._make_workspaces()
        require_written(self, batches)


def _without_binding(contract: Contract, unbound: Collection[int]) -> Contract:
    """Return the contract, in which the `unbound` outputs are copied from the runtime's memory."""
    outputs = tuple(
        msgspec.structs.replace(spec, is_bound=spec.is_bound and index not in unbound)
        for index, spec in enumerate(contract.outputs)
    )
    return msgspec.structs.replace(contract, outputs=outputs)


def _vocabulary_words(manifest: Manifest | None, labels: Labels) -> dict[str, tuple[str, ...]]:
    """Return the words of each input with a vocabulary, by tensor."""
    entries = manifest.inputs if manifest is not None else ()
    return {entry.tensor: labels[entry.vocabulary] for entry in entries if entry.vocabulary}
