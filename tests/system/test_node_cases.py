"""ONNX operator test cases, run by a server and compared with ONNX Runtime in process."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pytest
from onnx import numpy_helper
from support.models import in_process
from support.processes import Gateway, running

from iskander.arrow.types import BFloat16
from iskander.contract.compile import compile_contract
from iskander.contract.dtypes import DTYPES
from iskander.errors import IskanderError

pytestmark = pytest.mark.slow

CASES_MIN = {"numbers": 650, "strings": 14, "bfloat16": 2}
"""Fails the test if the filter below or the cases of the onnx package change."""
OPSET_MAX, IR_MAX = 26, 13
"""The newest versions that the runtime reads; newer cases are lowered to them."""
RANDOM = ("bernoulli", "dropout", "random", "multinomial", "seed")
BFLOAT16 = onnx.helper.tensor_dtype_to_np_dtype(onnx.TensorProto.BFLOAT16)
KNOWN = {np.dtype(dtype.numpy) for dtype in DTYPES} | {BFLOAT16}


def cases() -> list[tuple[str, Any, list[np.ndarray]]]:
    """Returns name, model and inputs of each case whose tensors share one leading axis."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        collected = collect_testcases(None)
    selected = []
    for case in collected:
        if not case.data_sets or any(word in case.name for word in RANDOM):
            continue
        inputs, outputs = case.data_sets[0]
        names = [tensor.name for tensor in case.model.graph.input]
        arrays = [as_array(value) for value in (*inputs, *outputs)]
        if len(inputs) != len(names) or not inputs or any(a is None for a in arrays):
            continue
        if any(a.dtype not in KNOWN or a.ndim == 0 or 0 in a.shape for a in arrays):
            continue
        if len({a.shape[0] for a in arrays}) == 1:
            selected.append((case.name, case.model, arrays[: len(inputs)]))
    return selected


def as_array(value: Any) -> np.ndarray | None:
    if isinstance(value, onnx.TensorProto):
        value = numpy_helper.to_array(value)
    return value if isinstance(value, np.ndarray) else None


def as_column(array: np.ndarray) -> pa.Array:
    flat = np.ascontiguousarray(array).reshape(-1)
    column = pa.array(flat.view(np.uint16) if array.dtype == BFLOAT16 else flat)
    if array.dtype == BFLOAT16:
        column = pa.ExtensionArray.from_storage(BFloat16(), column)
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def as_tensor(column: pa.Array, shape: tuple[int, ...]) -> np.ndarray:
    while pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Saves the cases that the runtime and the contract accept."""
    from iskander_worker.backends.onnx import read_graph

    folder = tmp_path_factory.mktemp("cases")
    accepted: dict[str, Any] = {"folder": folder}
    for name, model, inputs in cases():
        path = folder / name
        path.mkdir()
        model.ir_version = min(model.ir_version, IR_MAX)
        for opset in model.opset_import:
            opset.version = min(opset.version, OPSET_MAX)
        onnx.save(model, path / "model.onnx")
        feeds = {
            tensor.name: array for tensor, array in zip(model.graph.input, inputs, strict=True)
        }
        try:
            compile_contract(None, read_graph(path))
            expected = in_process(path, feeds)
        except (IskanderError, RuntimeError, ValueError, NotImplementedError):
            continue
        except Exception as error:
            if type(error).__module__.startswith("onnxruntime"):
                continue
            raise
        accepted[name] = (path, feeds, expected, [tensor.name for tensor in model.graph.output])
    return accepted


@pytest.fixture(scope="module")
def gateway(prepared: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    served = [
        {"name": name, "path": str(case[0]), "intra_threads": 1, "max_batch_rows": 1024}
        for name, case in prepared.items()
        if not isinstance(case, Path)
    ]
    workers = {"groups": ["0"], "reattach_s": 5.0}
    with running(tmp_path_factory.mktemp("nodes"), served, workers=workers) as ready:
        yield ready


def test_operator_cases_equal_the_runtime_bit_for_bit(
    gateway: Gateway, prepared: dict[str, Any]
) -> None:
    """The result columns have the same bytes as the runtime's outputs."""
    ran: Counter[str] = Counter()
    different = []
    with gateway.client() as client:
        for name, case in prepared.items():
            if isinstance(case, Path):
                continue
            _, feeds, expected, outputs = case
            batch = pa.record_batch({key: as_column(array) for key, array in feeds.items()})
            (scored,) = client.stream(name, [batch])
            for output, array in zip(outputs, expected, strict=True):
                actual = as_tensor(scored[output], array.shape)
                is_same = actual.tobytes() == array.tobytes()
                if array.dtype == object:
                    is_same = actual.tolist() == array.tolist()
                if not is_same:
                    different.append(f"{name}: {output}")
            ran[kind_of([*feeds.values(), *expected])] += 1
    assert different == []
    assert all(ran[kind] >= minimum for kind, minimum in CASES_MIN.items()), ran


def kind_of(arrays: list[np.ndarray]) -> str:
    dtypes = {array.dtype for array in arrays}
    if BFLOAT16 in dtypes:
        return "bfloat16"
    return "strings" if np.dtype(object) in dtypes else "numbers"
