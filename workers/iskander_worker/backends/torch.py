"""Backend `torch`: programs of `torch.export`, and TorchScript.

Tensors of a batch are views of shared memory (`torch.from_numpy`). A program of `torch.export`
declares its tensors; for TorchScript the manifest does. Loading must not unpickle a class,
unless the configuration trusts the model.

Runs on: worker main, of a model with workers of its own.

Source: PyTorch 2.6 and newer, `torch.export.load`, `torch.jit.load`; Python's audit event
`pickle.find_class`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from iskander.contract.compile import declared_graph
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.manifest import Manifest
from iskander.contract.paths import path_inside
from iskander.errors import ExecutionFailed, ManifestError
from iskander.interprocess.control.messages import ModelSpec
from iskander_worker.backends import Arrays, Run, require_manifest
from iskander_worker.backends.torch_device import TorchLauncher, allocator_budgets
from iskander_worker.batches.tensors import error_text
from iskander_worker.loading.weight_files import inspect_safetensors, load_safetensors

ELEMENTS = {
    torch.bool: "tensor(bool)", torch.int8: "tensor(int8)", torch.uint8: "tensor(uint8)",
    torch.int16: "tensor(int16)", torch.int32: "tensor(int32)", torch.int64: "tensor(int64)",
    torch.float16: "tensor(float16)", torch.float32: "tensor(float)",
    torch.float64: "tensor(double)", torch.bfloat16: "tensor(bfloat16)",
}  # fmt: skip
"""ONNX names of the element types, as used in `Graph`."""
BFLOAT16 = ELEMENTS[torch.bfloat16]

# Arrays of inputs are read-only, and nothing here writes them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
warnings.filterwarnings("ignore", message=r"`torch.jit.load` is deprecated")


def load(spec: ModelSpec, cores: int) -> TorchModel:
    """Load a program and its weights, or raise a `ManifestError`."""
    manifest = require_manifest(spec)
    threads = spec.threads_intra or cores
    torch.set_num_threads(threads)
    return TorchModel(spec, manifest, threads)


class TorchModel:
    """A loaded program."""

    def __init__(self, spec: ModelSpec, manifest: Manifest, threads: int) -> None:
        self.threads = threads
        self._device = _select_device(spec.execution_providers)
        self.library = f"PyTorch {torch.__version__}"
        self.providers = (f"PyTorch {torch.__version__} on {self._device}",)
        self._budget = ExitStack()
        if self._device == "cuda":
            self._budget.enter_context(allocator_budgets().held(spec.gpu_memory_bytes))
        try:
            self._open(spec, manifest)
        except BaseException:
            self._budget.close()
            raise

    def _open(self, spec: ModelSpec, manifest: Manifest) -> None:
        section = manifest.torch
        folder = Path(spec.path).parent
        path = path_inside(folder, section.file)
        self._outputs = list(section.outputs) or _output_names(manifest)
        try:
            with _reject_pickle(is_trusted=spec.trust_pickle):
                self._call, self._arguments, self.graph = self._load(path, manifest)
        except ManifestError:
            raise
        except Exception as error:
            raise ManifestError(f"`{section.file}` cannot be loaded: {error_text(error)}") from None
        if section.weights:
            self._load_weights(path_inside(folder, section.weights))
        self._bfloat16 = {tensor.name for tensor in self.graph.inputs if tensor.element == BFLOAT16}
        self.launcher: TorchLauncher | None = None
        if self._device == "cuda":
            self.launcher = TorchLauncher(self._named_results, self._arguments)

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """Compute one batch, or raise `ExecutionFailed`."""
        try:
            inputs = [self._to_device(name, arrays[name]) for name in self._arguments]
            named = self._named_results(inputs)
            return {name: _to_numpy(named[name]) for name in outputs}
        except RuntimeError as error:  # Of a copy: no memory, or a tensor without an array.
            raise ExecutionFailed(error_text(error)) from None

    def close(self) -> None:
        """Release the program."""
        launcher, self.launcher = self.launcher, None
        del self._call, self._module
        if launcher is not None:
            launcher.close()
        self._budget.close()

    def _named_results(self, inputs: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Call the program; return its results by name, or raise `ExecutionFailed`."""
        try:
            with torch.inference_mode():
                return self._by_name(self._call(*inputs))
        except ExecutionFailed:
            raise
        except Exception as error:
            raise ExecutionFailed(_without_traceback(error)) from None

    def _load(self, path: Path, manifest: Manifest) -> tuple[Callable[..., Any], list[str], Graph]:
        """Return the function to call, its argument names, and the graph."""
        if path.suffix == ".pt2":
            program = torch.export.load(path)
            if self._device != "cpu":
                from torch.export.passes import move_to_device_pass

                # Without this, tensors that the program creates stay on the device of its export.
                program = move_to_device_pass(program, self._device)
            self._module: Any = program.module().to(self._device)
            graph = _graph_of(program, self._outputs)
            return self._module, [tensor.name for tensor in graph.inputs], graph
        jit: Any = torch.jit
        self._module = jit.load(path, map_location=self._device).eval()
        arguments = [argument.name for argument in self._module.forward.schema.arguments[1:]]
        graph = declared_graph(manifest)
        declared = [each.name for each in graph.inputs]
        if sorted(arguments) != sorted(declared):
            raise ManifestError(
                f"the program has the inputs {', '.join(arguments)}, and the manifest declares "
                f"{', '.join(declared)}"
            )
        return self._module, arguments, graph

    def _load_weights(self, path: Path) -> None:
        stored, _ = inspect_safetensors(path)
        weights = {
            name: _to_torch(array, is_bfloat16=stored[name].dtype == "BF16")
            for name, array in load_safetensors(path).items()
        }
        try:
            self._module.load_state_dict(weights)
        except RuntimeError as error:
            text = " ".join(str(error).split())[:500]
            raise ManifestError(f"`{path.name}` lacks weights of the program: {text}") from None

    def _to_device(self, name: str, array: np.ndarray) -> torch.Tensor:
        return _to_torch(array, is_bfloat16=name in self._bfloat16).to(self._device)

    def _by_name(self, results: Any) -> Mapping[str, torch.Tensor]:  # noqa: ANN401
        """Return results by name: the names of the program, or else of the manifest, in order."""
        if not isinstance(results, Mapping):
            listed = results if isinstance(results, tuple | list) else (results,)
            if len(listed) != len(self._outputs):
                raise ExecutionFailed(
                    f"the program returned {len(listed)} results, and the manifest names "
                    f"{len(self._outputs)}"
                )
            results = dict(zip(self._outputs, listed, strict=True))
        named = {name: results.get(name) for name in self._outputs}
        missing = [name for name, result in named.items() if not isinstance(result, torch.Tensor)]
        if missing:
            raise ExecutionFailed(f"the program returned no tensor `{missing[0]}`")
        return named


def _graph_of(program: torch.export.ExportedProgram, outputs: Sequence[str]) -> Graph:
    """Return the tensors that a program declares, from its traced values."""
    signature = program.graph_signature
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    nodes = signature.user_outputs
    spec = program.call_spec.out_spec
    names = list(spec.context) if spec is not None and spec.type is dict else list(outputs)
    if len(nodes) != len(names):
        raise ManifestError(
            f"the program returns {len(nodes)} results, and the manifest names {len(names)}: name "
            "all of them, in order, in [torch] outputs"
        )
    return Graph(
        tuple(_tensor_of(str(name), values.get(str(name))) for name in signature.user_inputs),
        tuple(
            _tensor_of(name, values.get(str(node))) for name, node in zip(names, nodes, strict=True)
        ),
    )


def _tensor_of(name: str, value: Any) -> GraphTensor:  # noqa: ANN401
    if not isinstance(value, torch.Tensor) or value.dtype not in ELEMENTS:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise ManifestError(f"`{name}` of the program is a {kind}, which no column can hold")
    sizes: list[Dimension] = [size if isinstance(size, int) else str(size) for size in value.shape]
    return GraphTensor(name, ELEMENTS[value.dtype], tuple(sizes))


def _output_names(manifest: Manifest) -> list[str]:
    used = [source.tensor for entry in manifest.outputs for source in entry.sources]
    return list(manifest.graph.outputs or dict.fromkeys(used))


def _to_torch(array: np.ndarray, *, is_bfloat16: bool) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.contiguous().view(torch.uint16)
    array: np.ndarray = tensor.numpy()
    return array


def _without_traceback(error: Exception) -> str:
    """Return the error text, without the traceback that TorchScript writes before it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    is_traced = lines and "TorchScript interpreter" in lines[0]
    return error_text(RuntimeError(lines[-1])) if is_traced else error_text(error)


def _select_device(providers: tuple[str, ...]) -> str:
    if providers[0] == "cpu":
        return "cpu"
    if providers[0] != "cuda" or not torch.cuda.is_available():
        raise ManifestError(f"PyTorch has no device for the execution provider `{providers[0]}`")
    return "cuda"


@contextmanager
def _reject_pickle(*, is_trusted: bool) -> Iterator[None]:
    """Reject class lookups of pickles during the block, unless the model is trusted.

    The lookup raises an audit event, which a pickle cannot avoid.
    """
    _pickle_guard["is_on"] = not is_trusted
    try:
        yield
    finally:
        _pickle_guard["is_on"] = False


_pickle_guard = {"is_on": False}


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _pickle_guard["is_on"]:
        raise ManifestError(
            f"it contains a pickle that imports {'.'.join(map(str, arguments[-2:]))}, which runs "
            "code when it is read: allow it with trust_pickle = true of the model"
        )


sys.addaudithook(_on_audit)
