"""The backend `onnx`: an ONNX Runtime session, its execution provider and threads.

Runs on: worker main; `read_graph` also in the operator's tool.

Source: ONNX Runtime 1.31 Python API (`SessionOptions`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import onnxruntime as ort

from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.manifest import model_file
from iskander.contract.tensors import Contract
from iskander.control.messages import ModelSpec
from iskander.errors import ExecutionFailed, ManifestError
from iskander_worker.backends import Arrays, Run, threads
from iskander_worker.backends.onnx_binding import BFLOAT16, Binding, options_of
from iskander_worker.loading.opener import ModelSource, open_model
from iskander_worker.tensors import plain

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


_LOG_ERRORS_ONLY = 3
ort.set_default_logger_severity(4)


def load(spec: ModelSpec, cores: int) -> OnnxModel:
    """Load a model file, once it is known to be what it should be and to harm nobody.

    Raises:
        ManifestError: File, provider or graph cannot be served; says which.
    """
    return open_model(spec, cores, OnnxModel, ort.__version__)


class OnnxModel:
    """One loaded graph.

    Args:
        spec: Where the model is and how to run it.
        cores: Compute threads where the spec names none, as is the runtime's own default.
        source: What to open, where that is not just the spec's file.

    Attributes:
        notices: What was not as it should be, and still serves.

    Raises:
        ManifestError: The model cannot be loaded: file, provider or graph; says which.
    """

    def __init__(self, spec: ModelSpec, cores: int, source: ModelSource = ModelSource()) -> None:  # noqa: B008
        self.notices: tuple[str, ...] = ()
        self.threads = spec.threads_intra or cores
        options = ort.SessionOptions()
        options.log_severity_level = _LOG_ERRORS_ONLY
        if threads.is_one_pool:
            _make_pool(cores)
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = self.threads
            options.inter_op_num_threads = spec.threads_inter or 1
        options.graph_optimization_level = OPTIMIZATION_LEVELS[spec.optimization_level]
        options.enable_mem_pattern = spec.has_memory_pattern
        if spec.is_parallel:
            options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
        # Spinning threads burn whole cores between batches: 86 % of one at 50 batches a second.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        file = source.optimised or model_file(Path(spec.path))
        if source.optimised is not None:
            options.graph_optimization_level = OPTIMIZATION_LEVELS["disable"]
        if source.save_to is not None:
            _save(options, source.save_to, source.save_weights)
        for library in source.libraries:
            _register(options, library)
        self._session = _open(file, options, spec.execution_providers, spec.provider_options)
        self.providers = tuple(self._session.get_providers())
        self.graph = _graph_of(self._session)
        self._bfloat16 = {
            tensor.name for tensor in self.graph.inputs if tensor.element == "tensor(bfloat16)"
        }
        # A binding on an accelerator copies its inputs when it is made, so it cannot be kept.
        self.is_binding_reusable = self.providers[0] == PROVIDERS["cpu"]

    def bind(
        self, contract: Contract, rows: int, input_address: int, output_address: int
    ) -> Binding:
        """Bind the contract's tensors to a batch's buffers where they lie.

        Raises:
            ExecutionFailed: The runtime refuses them.
        """
        try:
            return Binding(self._session, contract, rows, input_address, output_address)
        except Exception as error:
            raise ExecutionFailed(f"its buffers cannot be bound: {plain(error)}") from None

    def compute(self, arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
        """Compute a batch of arrays: for tensors that cannot be bound.

        Raises:
            ExecutionFailed: The runtime refused.
        """
        feeds: dict[str, Any] = dict(arrays)
        for name in self._bfloat16:
            # NumPy has none, so the runtime is told.
            feeds[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(feeds[name], BFLOAT16)
        try:
            tensors = self._session.run(list(wanted), feeds, run.native or options_of(run))
        except Exception as error:
            raise ExecutionFailed(plain(error)) from None
        return dict(zip(wanted, tensors, strict=True))

    def close(self) -> None:
        """Free the graph with its last binding."""
        del self._session


def read_graph(path: Path) -> Graph:
    """What a model file declares, without optimising it.

    Raises:
        ManifestError: It cannot be loaded.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return _graph_of(_open(model_file(path), options, ("cpu",)))


def _save(options: ort.SessionOptions, file: Path, weights: str) -> None:
    """Have the optimised graph written, and its weights as its kernels read them beside it."""
    options.optimized_model_filepath = str(file)
    for key, value in (
        ("session.optimized_model_external_initializers_file_name", weights),
        ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
        ("session.save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(key, value)


def _register(options: ort.SessionOptions, library: str) -> None:
    try:
        options.register_custom_ops_library(library)
    except Exception as error:
        raise ManifestError(
            f"the operator library `{Path(library).name}` cannot be loaded: {plain(error)}"
        ) from None


@cache
def _make_pool(cores: int) -> None:
    """The pool of this process; the runtime makes it with its first session."""
    ort.set_global_thread_pool_sizes(cores, 1)


def _open(
    file: Path,
    options: ort.SessionOptions,
    providers: tuple[str, ...],
    provider_options: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> ort.InferenceSession:
    if not file.is_file():
        raise ManifestError(f"there is no model file `{file.name}` where the configuration says")
    wanted = [PROVIDERS[name] for name in providers]
    if wanted != [PROVIDERS["cpu"]]:
        missing = [name for name in wanted if name not in ort.get_available_providers()]
        if missing:
            raise ManifestError(f"this ONNX Runtime was built without {', '.join(missing)}")
        ort.preload_dlls(directory="")
    try:
        session = ort.InferenceSession(
            file,
            options,
            providers=wanted,
            provider_options=[dict(provider_options.get(name, {})) for name in providers],
            enable_fallback=0,
        )
    except Exception as error:
        raise ManifestError(f"`{file.name}` cannot be loaded: {plain(error)}") from None
    # Without its libraries or a device, a provider is dropped with no more than a log line.
    dropped = [name for name in wanted if name not in session.get_providers()]
    if dropped:
        raise ManifestError(
            f"the execution provider {', '.join(dropped)} was asked for and cannot start on this "
            "machine (no device, driver or libraries); it is never replaced by the CPU silently"
        )
    return session


def _graph_of(session: ort.InferenceSession) -> Graph:
    def tensors(nodes: list[ort.NodeArg]) -> tuple[GraphTensor, ...]:
        return tuple(GraphTensor(node.name, node.type, tuple(node.shape)) for node in nodes)

    return Graph(tensors(session.get_inputs()), tensors(session.get_outputs()))
