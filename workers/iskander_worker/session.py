"""Session of a loaded model version: contract, batch execution, warm-up.

A backend computes (`backends`), on bound buffers if possible, else on arrays (`arrays`).

Runs on: worker main.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import msgspec

from iskander.contract.buckets import variants
from iskander.contract.compile import compile_contract
from iskander.contract.labels import read_labels
from iskander.contract.manifest import WarmUp, model_file, read_manifest
from iskander.contract.postprocess import compile_outputs
from iskander.contract.row_relation import INDEPENDENT
from iskander.contract.rows import RowCopier
from iskander.contract.tensors import Contract
from iskander.control.messages import ModelSpec
from iskander.memory.heartbeat import model_digest
from iskander_worker.arrays import ArrayBatch, Compute
from iskander_worker.backends import BindingModel, Bound, Model, RemoteModel, Run, load_model
from iskander_worker.devices.cuda import idle
from iskander_worker.devices.workspace import SLOTS, DeviceBatch, Launcher, Workspace
from iskander_worker.loading.model_files import folder_sha256
from iskander_worker.loading.opener import require_trusted
from iskander_worker.postprocess import PostProcessor
from iskander_worker.vocabulary import Vocabularies
from iskander_worker.warm_up import warm


class Session:
    """One loaded model version; raises a `ManifestError` if it cannot be served.

    Attributes:
        notices: Problems that do not prevent serving.
        digest: Digest of the model version, for heartbeats.
        files_sha256: Hash of the model's files, of `Loaded`.
        relation: Whether its rows affect each other's results.
        device: GPU that it computes on, if any.
        launcher: Of a model on a device, unless a tensor must be converted on the host.
        workspaces: Device memory of each slot; empty without a launcher.
    """

    def __init__(
        self, spec: ModelSpec, cores: int, load: Callable[[ModelSpec, int], Model] = load_model
    ) -> None:
        files_sha256 = ""
        if spec.backend != "onnx":  # Its own loader checks and hashes the files of the graph.
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
        self.contract = compile_contract(manifest, model.graph, spec.string_bytes, labels)
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
        self._folder = model_file(Path(spec.path)).parent
        combine = manifest.combine if manifest is not None else None
        self.relation = msgspec.structs.replace(INDEPENDENT, combine=combine)
        self._warm_up = manifest.warm_up if manifest is not None else WarmUp()
        self.notices: tuple[str, ...] = getattr(model, "notices", ())
        self.threads, self.providers = model.threads, model.providers
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
        self._buckets = tuple(map(self._variant, variants(self.contract)[:-1]))

    def bucket(self, number: int) -> Session:
        """The session for a bucket's input length; the last one is itself."""
        return self._buckets[number] if number < len(self._buckets) else self

    def _variant(self, contract: Contract) -> Session:
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

    def warm_up(self, rows_max: int) -> None:
        """Run the first batches, of at most `rows_max` rows, before any caller's."""
        if isinstance(self._model, RemoteModel) and not self._warm_up.samples:
            return
        generated = msgspec.structs.replace(self._warm_up, samples="")
        for each in self._buckets:
            warm(each, self._folder, generated, rows_max)
        warm(self, self._folder, self._warm_up, rows_max)
        if self.launcher is not None:
            for each in (*self._buckets, self):
                for _ in range(SLOTS):  # Each slot has launches and graphs of its own.
                    warm(each, self._folder, generated, rows_max, self.launcher.graph_rows)
                    each.workspaces.reverse()
