"""Backend lookup, runs, and validation of outputs against the contract."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker import backends
from iskander_worker.backends import Arrays, Run, load_model
from iskander_worker.batches.arrays import ArrayBatch
from support import models
from support.fake_device import FakeDevice
from support.scripted import model_spec

from iskander.contract.column_types import ColumnType
from iskander.contract.graph import Graph
from iskander.contract.processing.rows import RowCopier
from iskander.contract.tensors import TensorSpec
from iskander.errors import Cancelled, ContractError, ExecutionFailed, ManifestError

X = TensorSpec("x", "x", ColumnType("int64"), ())
Y = TensorSpec("y", "y", ColumnType("float32"), (2,))


def spec(name: str) -> Any:
    return SimpleNamespace(backend=name)


def install_backend(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Adds a backend `mine`, as another distribution does."""
    entry = EntryPoint("mine", value, backends.ENTRY_POINTS)
    monkeypatch.setattr(backends, "entry_points", lambda group: [entry])


def test_unknown_backend_is_rejected_with_the_installed_ones() -> None:
    with pytest.raises(ManifestError, match=r"no backend `caffe` is installed; installed: .*onnx"):
        load_model(spec("caffe"), 1)


def test_backend_of_another_distribution_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(monkeypatch, "types:SimpleNamespace")
    monkeypatch.setattr("types.SimpleNamespace", lambda spec, cores: (spec.backend, cores))
    assert load_model(spec("mine"), 3) == ("mine", 3)


def test_missing_library_of_a_backend_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(monkeypatch, "no_such_library:load")
    with pytest.raises(ManifestError, match=r"`mine` cannot be imported: .*no_such_library"):
        load_model(spec("mine"), 1)


def test_abort_terminates_the_native_run() -> None:
    run = Run()
    run.native = SimpleNamespace(terminate=False)
    run.abort()
    assert run.is_aborted
    assert run.native.terminate


def test_abort_cancels_what_the_model_waits_for() -> None:
    run, calls = Run(), []
    run.cancel = lambda: calls.append(1)
    run.abort()
    assert calls == [1]


def test_abort_before_the_native_run_terminates_it() -> None:
    from iskander_worker.backends.onnx_binding import options_of

    run = Run()
    run.abort()
    assert options_of(run).terminate


def run_outputs(outputs: dict[str, np.ndarray], error: BaseException | None = None) -> np.ndarray:
    """Returns the result body of a batch of three rows, for a model that returns `outputs`."""

    def compute(arrays: Arrays, names: Sequence[str], run: Run) -> Arrays:
        if error is not None:
            raise error
        return outputs

    x = np.arange(3)
    body = np.zeros(64, np.uint8)
    batch = ArrayBatch(
        compute,
        RowCopier((X,)),
        RowCopier((Y,)),
        rows=3,
        input_address=x.ctypes.data,
        output_address=body.ctypes.data,
    )
    batch.run(Run())
    return body[:24].view(np.float32).reshape(3, 2)


def test_non_contiguous_output_is_copied_to_the_body() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (run_outputs({"y": values[:, ::2]}) == values[:, ::2]).all()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "output `y` is missing"),
        ({"y": np.zeros((2, 2), np.float32)}, r"has shape \[2, 2\].*expected \[3, 2\]"),
        ({"y": np.zeros((3, 2), np.float64)}, "has dtype float64, expected float32"),
    ],
)
def test_output_that_violates_the_contract_is_rejected(
    outputs: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ExecutionFailed, match=message):
        run_outputs(outputs)


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, MemoryError, OverflowError])
def test_error_in_a_computation_fails_the_run_and_not_the_worker(kind: type[Exception]) -> None:
    """Such an error may depend on a caller's rows."""
    with pytest.raises(ExecutionFailed, match=rf"computing this batch failed: {kind.__name__}: so"):
        run_outputs({}, kind("so"))


@pytest.mark.parametrize("error", [AssertionError("a"), ContractError("b"), Cancelled("c")])
def test_assertions_and_iskander_errors_are_not_wrapped(
    error: Exception,
) -> None:
    with pytest.raises(type(error)) as caught:
        run_outputs({}, error)
    assert caught.value is error


def test_provider_options_are_passed_to_their_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iskander_worker.backends import onnx

    passed: dict[str, Any] = {}

    def fail(file: Any, options: Any, **arguments: Any) -> None:
        passed.update(arguments)
        raise RuntimeError("no such device")

    monkeypatch.setattr(onnx.ort, "InferenceSession", fail)
    monkeypatch.setattr(onnx.ort, "preload_dlls", lambda directory: None)
    monkeypatch.setattr(onnx.ort, "get_available_providers", lambda: [*onnx.PROVIDERS.values()])
    monkeypatch.setattr(onnx, "open_device", lambda number: FakeDevice(number=number))
    spec = model_spec(
        models.row_ids(tmp_path),
        execution_providers=("cuda", "cpu"),
        provider_options={"cuda": {"device_id": "1"}},
    )
    with pytest.raises(ManifestError, match="no such device"):
        onnx.load(spec, 1)
    assert passed["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert passed["provider_options"] == [{"user_compute_stream": "1", "device_id": "1"}, {}]


def test_libraries_of_tensorrt_are_loaded_before_its_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iskander_worker.backends import onnx

    calls: list[str] = []

    def fail(*arguments: Any, **options: Any) -> None:
        calls.append("session")
        raise RuntimeError("no such device")

    monkeypatch.setattr(onnx.ort, "InferenceSession", fail)
    monkeypatch.setattr(onnx.ort, "preload_dlls", lambda directory: calls.append("cuda"))
    monkeypatch.setattr(onnx.ort, "get_available_providers", lambda: [*onnx.PROVIDERS.values()])
    monkeypatch.setattr(onnx.engines, "preload_libraries", lambda: calls.append("tensorrt"))
    monkeypatch.setattr(onnx, "read_graph", lambda file, libraries: Graph((), ()))
    monkeypatch.setattr(onnx, "open_device", lambda number: FakeDevice(number=number))
    for providers, libraries in (
        (("cuda", "cpu"), ["cuda"]),
        (("tensorrt", "cuda"), ["cuda", "tensorrt"]),
    ):
        calls.clear()
        with pytest.raises(ManifestError, match="no such device"):
            onnx.load(model_spec(models.row_ids(tmp_path), execution_providers=providers), 1)
        assert calls == [*libraries, "session"]
