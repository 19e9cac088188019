"""Backend `onnx`: an ONNX Runtime session, its execution provider and threads.

Runs on: worker main; `read_graph` also in the operator's tool. Source: ONNX Runtime 1.31 Python API
(`SessionOptions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime as ort

from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import model_file
from iskander.contract.tensors import Contract
from iskander.errors import ExecutionFailed, ManifestError, utf8_problem
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker import backends
from iskander_worker.backends import Arrays, Run
from iskander_worker.backends.onnx_binding import BFLOAT16, Binding, options_of
from iskander_worker.backends.onnx_device import OnnxLauncher, has_graphs
from iskander_worker.batches.tensors import error_text
from iskander_worker.devices.cuda import Device, DriverError, idle, open_device
from iskander_worker.loading import engines
from iskander_worker.loading.measurement import Measurement
from iskander_worker.loading.opener import ModelSource, open_model

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
OPTIMIZATION_LEVELS = {
    "disable": ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    "level1": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "level2": ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "level3": ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
}

ON_DEVICE = frozenset({"cuda", "tensorrt"})
"""Providers that compute on a stream of the caller."""

_CANNOT_START = (
    "the execution provider {} cannot start on this machine (no device, driver or libraries), and "
    "the CPU is not used instead"
)
_LOG_ERRORS_ONLY = 3
ort.set_default_logger_severity(4)


def load(spec: ModelSpec, cores: int) -> OnnxModel:
    """Load a model file after the checks and the sandboxed load of `open_model`."""
    return open_model(spec, cores, OnnxModel, ort.__version__)


class OnnxModel:
    """One loaded graph; raises a `ManifestError` if it cannot be loaded.

    Without `threads_intra` it uses `cores` compute threads, as is the runtime's own default.
    """

    def __init__(self, spec: ModelSpec, cores: int, source: ModelSource = ModelSource()) -> None:  # noqa: B008
        self.notices: tuple[str, ...] = ()
        self.files_sha256 = ""
        self.measurement: Measurement | None = None
        self.threads = spec.threads_intra or cores
        options = _session_options(spec, cores, source)
        file = source.optimised or model_file(Path(spec.path))
        self._session, device, stream = _open_on_device(file, options, spec, source)
        self.providers = tuple(self._session.get_providers())
        self.library = f"ONNX Runtime {ort.__version__}"
        self.graph = _graph_of(self._session)
        inputs = self.graph.inputs
        self._bfloat16 = {tensor.name for tensor in inputs if tensor.element == "tensor(bfloat16)"}
        self.launcher: OnnxLauncher | None = None
        if device is not None:
            self.launcher = OnnxLauncher(self._session, device, stream, self._graph_rows(spec))
        # A binding on an accelerator copies its inputs at its creation, so it is used once.
        self.is_binding_reusable = self.providers[0] == PROVIDERS["cpu"]

    def bind(
        self, contract: Contract, rows: int, input_address: int, output_address: int
    ) -> Binding:
        """Bind the contract's tensors to a batch's bodies, or raise `ExecutionFailed`."""
        try:
            return Binding(self._session, contract, rows, input_address, output_address)
        except Exception as error:
            raise ExecutionFailed(
                f"the batch's buffers cannot be bound: {error_text(error)}"
            ) from None

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute a batch of arrays, if its tensors cannot be bound, or raise `ExecutionFailed`."""
        feeds: dict[str, Any] = dict(arrays)
        for name in self._bfloat16:
            # NumPy has no bfloat16, so the element type is passed to the runtime.
            feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feeds[name], BFLOAT16)
        try:
            tensors = self._session.run(list(outputs), feeds, run.native or options_of(run))
        except Exception as error:
            raise ExecutionFailed(error_text(error)) from None
        return dict(zip(outputs, tensors, strict=True))

    def close(self) -> None:
        """Release the graph with its last binding."""
        launcher, self.launcher = self.launcher, None
        with idle(launcher.device) if launcher is not None else nullcontext():
            del self._session
            if launcher is not None:
                launcher.close()

    def _graph_rows(self, spec: ModelSpec) -> tuple[int, ...]:
        """Return the numbers of rows to capture as CUDA graphs: sizes of batches that repeat."""
        is_cuda = spec.execution_providers[0] == "cuda"
        if not is_cuda or not has_graphs(spec.provider_options.get("cuda", {})):
            return ()
        fixed = {tensor.shape[0] for tensor in self.graph.inputs if tensor.shape}
        rows = tuple(sorted(size for size in fixed if isinstance(size, int))) or spec.pad_to
        if not rows:
            self.notices = ("enable_cuda_graph has no effect: the lane has no `pad_to`",)
        return rows


def read_graph(path: Path, libraries: Iterable[str] = ()) -> Graph:
    """Read the declaration of a model file without optimising it, or raise a `ManifestError`."""
    if problem := utf8_problem(str(path)):
        raise ManifestError(f"model file {problem}, which the runtime needs: rename it")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    _add_libraries(options, libraries)
    return _graph_of(_open(model_file(path), options, ("cpu",)))


def _session_options(spec: ModelSpec, cores: int, source: ModelSource) -> ort.SessionOptions:
    """Return the options of a session: threads, optimisation, and the target of a saved copy."""
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_ERRORS_ONLY
    if backends.has_one_pool:
        _configure_pool(cores)
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = spec.threads_intra or cores
        options.inter_op_num_threads = spec.threads_inter or 1
    level = spec.optimization_level if source.optimised is None else "disable"
    options.graph_optimization_level = OPTIMIZATION_LEVELS[level]
    options.enable_mem_pattern = spec.has_memory_pattern
    if spec.is_parallel:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    # Spinning threads use whole cores between batches: 86 % of one at 50 batches a second.
    entries = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    if source.save_to is not None:
        options.optimized_model_filepath = str(source.save_to)
        external = "session.optimized_model_external_initializers_"
        entries[external + "file_name"] = source.save_weights
        entries[external + "min_size_in_bytes"] = "1024"
        entries["session.save_external_prepacked_constant_initializers"] = "1"
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    _add_libraries(options, source.libraries)
    return options


def _add_libraries(options: ort.SessionOptions, libraries: Iterable[str]) -> None:
    """Add libraries of operators to the options of a session."""
    for library in libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:
            raise ManifestError(
                f"operator library `{Path(library).name}` cannot be loaded: {error_text(error)}"
            ) from None


def _open_on_device(
    file: Path, options: ort.SessionOptions, spec: ModelSpec, source: ModelSource
) -> tuple[ort.InferenceSession, Device | None, int]:
    """Open a session; on a stream of its own if its first provider computes on a device."""
    providers, provider_options = spec.execution_providers, {**spec.provider_options}
    if providers[0] not in ON_DEVICE:
        return _open(file, options, providers, provider_options), None, 0
    device, stream = _device_and_stream(spec)
    try:
        for provider in ON_DEVICE & set(providers):
            own = {"user_compute_stream": str(stream)}
            if provider == engines.PROVIDER:
                own |= engines.profile_options(spec, read_graph(file, source.libraries))
                if source.engines is not None:
                    own |= engines.cache_options(source.engines, is_building=source.is_building)
            provider_options[provider] = {**own, **provider_options.get(provider, {})}
        return _open(file, options, providers, provider_options), device, stream
    except ManifestError:
        device.destroy_stream(stream)
        raise


def _device_and_stream(spec: ModelSpec) -> tuple[Device, int]:
    """Return the device of the first provider, and a new stream for the session."""
    provider = spec.execution_providers[0]
    number = int(spec.provider_options.get(provider, {}).get("device_id", "0"))
    try:
        device = open_device(number)
        device.use()
        return device, device.create_stream()
    except DriverError as error:
        raise ManifestError(f"{_CANNOT_START.format(PROVIDERS[provider])}: {error}") from None


@cache
def _configure_pool(cores: int) -> None:
    """Configure the thread pool of this process, which the runtime creates with a first session."""
    ort.set_global_thread_pool_sizes(cores, 1)


def _open(
    file: Path,
    options: ort.SessionOptions,
    providers: tuple[str, ...],
    provider_options: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> ort.InferenceSession:
    if not file.is_file():
        raise ManifestError(f"model file `{file.name}` not found at the configured path")
    names = [PROVIDERS[provider] for provider in providers]
    if names != [PROVIDERS["cpu"]]:
        missing = [name for name in names if name not in ort.get_available_providers()]
        if missing:
            raise ManifestError(f"this ONNX Runtime was built without {', '.join(missing)}")
        ort.preload_dlls(directory="")
        if engines.PROVIDER in providers:
            engines.preload_libraries()
    try:
        session = ort.InferenceSession(
            file,
            options,
            providers=names,
            provider_options=[
                dict(provider_options.get(provider_name, {})) for provider_name in providers
            ],
            enable_fallback=0,
        )
    except Exception as error:
        raise ManifestError(f"`{file.name}` cannot be loaded: {error_text(error)}") from None
    # The runtime drops a provider without libraries or a device with only a log line.
    dropped = [name for name in names if name not in session.get_providers()]
    if dropped:
        raise ManifestError(_CANNOT_START.format(", ".join(dropped)))
    return session


def _graph_of(session: ort.InferenceSession) -> Graph:
    def tensors(nodes: list[ort.NodeArg]) -> tuple[GraphTensor, ...]:
        return tuple(GraphTensor(node.name, node.type, tuple(node.shape)) for node in nodes)

    return Graph(tensors(session.get_inputs()), tensors(session.get_outputs()))
