"""Which backend a model names, what one run is, and what is held against the contract."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from iskander_worker import backends
from iskander_worker.arrays import ArrayBatch
from iskander_worker.backends import Arrays, Run, load_model
from support import models
from support.scripted import model_spec

from iskander.contract.column_types import ColumnType
from iskander.contract.rows import RowCopier
from iskander.contract.tensors import TensorSpec
from iskander.errors import Cancelled, ContractError, ExecutionFailed, ManifestError

X = TensorSpec("x", "x", ColumnType("int64"), ())
Y = TensorSpec("y", "y", ColumnType("float32"), (2,))


def spec(name: str) -> Any:
    return SimpleNamespace(backend=name)


def offer(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A backend `mine` as another distribution would bring it."""
    entry = EntryPoint("mine", value, backends.ENTRY_POINTS)
    monkeypatch.setattr(backends, "entry_points", lambda group: [entry])


def test_a_backend_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ManifestError, match=r"no backend `caffe` is installed; installed: .*onnx"):
        load_model(spec("caffe"), 1)


def test_a_backend_can_come_with_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "types:SimpleNamespace")
    monkeypatch.setattr("types.SimpleNamespace", lambda spec, cores: (spec.backend, cores))
    assert load_model(spec("mine"), 3) == ("mine", 3)


def test_a_backend_whose_library_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "no_such_library:load")
    with pytest.raises(ManifestError, match=r"`mine` cannot be imported: .*no_such_library"):
        load_model(spec("mine"), 1)


def test_a_run_given_up_ends_the_runtime_s_too() -> None:
    run = Run()
    run.native = SimpleNamespace(terminate=False)
    run.abort()
    assert run.is_aborted
    assert run.native.terminate


def test_a_run_given_up_before_the_runtime_sees_it_is_ended_all_the_same() -> None:
    from iskander_worker.backends.onnx_binding import options_of

    run = Run()
    run.abort()
    assert options_of(run).terminate


def computed(outputs: dict[str, np.ndarray], error: BaseException | None = None) -> np.ndarray:
    """The body of results of a batch of three rows, for which a model returned `outputs`."""

    def compute(arrays: Arrays, wanted: Sequence[str], run: Run) -> Arrays:
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


def test_an_output_is_written_where_it_belongs_however_it_lies_in_memory() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (computed({"y": values[:, ::2]}) == values[:, ::2]).all()


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({}, "output `y` is missing"),
        ({"y": np.zeros((2, 2), np.float32)}, r"has shape \[2, 2\].*expected \[3, 2\]"),
        ({"y": np.zeros((3, 2), np.float64)}, "has dtype float64, expected float32"),
    ],
)
def test_an_output_that_is_not_as_the_contract_says_is_refused(
    outputs: dict[str, np.ndarray], message: str
) -> None:
    with pytest.raises(ExecutionFailed, match=message):
        computed(outputs)


@pytest.mark.parametrize("kind", [ValueError, TypeError, IndexError, MemoryError, OverflowError])
def test_what_steps_cannot_compute_fails_its_run_and_not_the_worker(kind: type[Exception]) -> None:
    """What a graph makes of a caller's rows is known to nobody before."""
    with pytest.raises(ExecutionFailed, match=rf"computing this batch failed: {kind.__name__}: so"):
        computed({}, kind("so"))


@pytest.mark.parametrize("error", [AssertionError("a"), ContractError("b"), Cancelled("c")])
def test_what_has_a_name_and_what_this_program_got_wrong_stay_what_they_are(
    error: Exception,
) -> None:
    with pytest.raises(type(error)) as caught:
        computed({}, error)
    assert caught.value is error


def test_provider_options_go_to_their_provider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from iskander_worker.backends import onnx

    taken: dict[str, Any] = {}

    def refuse(file: Any, options: Any, **arguments: Any) -> None:
        taken.update(arguments)
        raise RuntimeError("no such device")

    monkeypatch.setattr(onnx.ort, "InferenceSession", refuse)
    monkeypatch.setattr(onnx.ort, "preload_dlls", lambda directory: None)
    monkeypatch.setattr(onnx.ort, "get_available_providers", lambda: [*onnx.PROVIDERS.values()])
    spec = model_spec(
        models.row_ids(tmp_path),
        execution_providers=("cuda", "cpu"),
        provider_options={"cuda": {"device_id": "1"}},
    )
    with pytest.raises(ManifestError, match="no such device"):
        onnx.load(spec, 1)
    assert taken["providers"] == ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert taken["provider_options"] == [{"device_id": "1"}, {}]
