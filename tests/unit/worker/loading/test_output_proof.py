"""Proof that runs write all memory of their results: what is copied, and what is rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iskander_worker.backends import Arrays, Run
from iskander_worker.loading.output_proof import require_written, unbound_outputs
from iskander_worker.session import Session
from onnx import TensorProto, helper, numpy_helper
from support import models
from support.scripted import model_spec

from iskander.contract.column_types import ColumnType
from iskander.contract.graph import Graph, GraphTensor
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.errors import ManifestError

ROWS = 4
ELEMENTS = [
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL,
    TensorProto.FLOAT16, TensorProto.BFLOAT16,
]  # fmt: skip


def passed_through(folder: Path, element: int) -> Path:
    """The input `x` as an output, and `y`, a copy of it."""
    x = helper.make_tensor_value_info("x", element, ["rows"])
    y = helper.make_tensor_value_info("y", element, ["rows"])
    return models.save(folder, [helper.make_node("Identity", ["x"], ["y"])], [x], [x, y])


def warmed(folder: Path) -> Session:
    """A session after its warm-up, without a cached measurement."""
    session = Session(model_spec(folder), 1)
    session.warm_up(1000)
    return session


def results_over(session: Session, pattern: int, inputs: np.ndarray) -> bytes:
    """The result body of a batch in memory with earlier contents."""
    outputs = np.full(body_layout(session.contract.outputs, ROWS)[1], pattern, np.uint8)
    session.bind(ROWS, inputs.ctypes.data, outputs.ctypes.data).run(Run())
    lengths = [spec.buffer_bytes(ROWS) for spec in session.contract.outputs]
    offsets = body_layout(session.contract.outputs, ROWS)[0]
    return b"".join(
        outputs[at : at + length].tobytes() for at, length in zip(offsets, lengths, strict=True)
    )


@pytest.mark.parametrize("element", ELEMENTS)
def test_output_that_is_an_input(element: int, tmp_path: Path) -> None:
    """The runtime does not write it to bound memory, so it is copied; a plain output is bound."""
    session = warmed(passed_through(tmp_path / "m", element))
    assert [spec.is_bound for spec in session.contract.outputs] == [False, True]
    assert session.measurement.unbound == (0,)
    inputs = np.arange(body_layout(session.contract.inputs, ROWS)[1] + 64).astype(np.uint8)
    width = session.contract.inputs[0].buffer_bytes(ROWS)
    for pattern in (0x00, 0xFF):
        expected = inputs[:width].tobytes()
        if element == TensorProto.BOOL:  # Four bits.
            expected = bytes([inputs[0] & 0x0F])
        assert results_over(session, pattern, inputs) == 2 * expected
    session.close()


def test_output_that_is_a_constant(tmp_path: Path) -> None:
    """An initializer as an output: with a fixed number of rows it could be bound."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS])
    names = ("y", "c", "folded")
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [ROWS]) for name in names]
    constant = numpy_helper.from_array(np.arange(ROWS, dtype=np.float32), "c")
    nodes = [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Exp", ["c"], ["folded"])]
    session = warmed(models.save(tmp_path / "m", nodes, [x], outputs, [constant]))
    inputs = np.ones(64, np.float32).view(np.uint8)
    found = [results_over(session, pattern, inputs) for pattern in (0x00, 0xFF)]
    expected = [-np.ones(ROWS), np.arange(ROWS), np.exp(np.arange(ROWS, dtype=np.float32))]
    for body in found:
        parts = np.frombuffer(body, np.float32).reshape(3, ROWS)
        np.testing.assert_allclose(parts, expected, rtol=1e-6)
    session.close()


def regressor(folder: Path, targets: int) -> Path:
    """`targets` numbers for each row, `[n, targets]`, with the declared shape `[n]`."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    node = helper.make_node(
        "LinearRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        coefficients=[2.0] * targets,
        intercepts=[0.0] * targets,
        targets=targets,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph([node], "g", [x], [y])
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def test_axis_of_one_element_more_than_declared(tmp_path: Path) -> None:
    """`[n, 1]` for `[n]`, as CatBoost declares it: the rows are clear, so the model is served."""
    session = warmed(regressor(tmp_path / "m", 1))
    inputs = np.arange(16, dtype=np.float32)
    expected = (2 * inputs[:ROWS]).tobytes()
    assert results_over(session, 0xFF, inputs.view(np.uint8)) == expected
    session.close()


def test_other_shape_than_declared_in_every_batch(tmp_path: Path) -> None:
    """No request could ever be answered, so the load fails, and says why."""
    with pytest.raises(ManifestError, match=r"output `y` has the shape \[3, 2\] for 3 rows"):
        warmed(regressor(tmp_path / "m", 2))


def test_one_declared_row(tmp_path: Path) -> None:
    """A label for each row is served; one result for the whole batch is not."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", 1])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    one = helper.make_node("ReduceSum", ["x", "axis"], ["y"], keepdims=0)
    axis = numpy_helper.from_array(np.array([0], np.int64), "axis")
    with pytest.raises(ManifestError, match=r"output `y` has the shape \[1\] for 3 rows"):
        warmed(models.save(tmp_path / "sum", [one], [x], [y], [axis]))
    classifier = helper.make_node(
        "LinearClassifier",
        ["x"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        classlabels_ints=[0, 1],
        coefficients=[1.0, -1.0],
        intercepts=[0.0, 0.0],
    )
    label = helper.make_tensor_value_info("label", TensorProto.INT64, [1])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    made = helper.make_graph([classifier], "g", [x], [label])
    model = helper.make_model(made, opset_imports=opsets, ir_version=10)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.onnx").write_bytes(model.SerializeToString())
    session = warmed(tmp_path / "m")
    inputs = np.array([1, -1, 2, -2] * 8, np.float32)
    expected = np.array([0, 1, 0, 1], np.int64).tobytes()
    assert results_over(session, 0xFF, inputs.view(np.uint8)) == expected
    session.close()


class ArrayModel:
    """A model on arrays, whose results are computed by a function of `x`."""

    is_bound = False
    is_exact = True

    def __init__(self, function: Callable[[np.ndarray], np.ndarray]) -> None:
        spec = TensorSpec("x", "x", ColumnType("float32"), (64,))
        self.contract = Contract((spec,), (TensorSpec("y", "y", ColumnType("float32"), (64,)),))
        tensor = GraphTensor("x", "tensor(float)", ("rows", 64))
        self.graph = Graph((tensor,), (GraphTensor("y", "tensor(float)", ("rows", 64)),))
        self._function = function
        self.pattern = 0

    def bind(self, rows: int, input_address: int, output_address: int) -> Any:
        """A model on arrays binds nothing."""
        raise AssertionError

    def stain(self, lengths: Sequence[int], pattern: int) -> None:
        """The contents of memory that the model allocates next."""
        self.pattern = pattern

    def empty(self) -> np.ndarray:
        """Memory that was not written, as of `numpy.empty`."""
        return np.full((ROWS, 64), self.pattern * 0x01010101, np.uint32).view(np.float32)

    def compute(self, arrays: Arrays, outputs: Sequence[str], run: Run) -> Arrays:
        """As `Model.compute`."""
        return {"y": self._function(arrays["x"])}


def test_program_that_returns_memory_it_never_wrote() -> None:
    """Whole results and parts; the error has the number of elements."""
    batch = (ROWS, {"x": np.ones((ROWS, 64), np.float32)})

    def partly(x: np.ndarray) -> np.ndarray:
        result = model.empty()
        result[:, 1:] = x[:, 1:]
        return result

    def wholly(x: np.ndarray) -> np.ndarray:
        return model.empty()

    model = ArrayModel(wholly)
    with pytest.raises(ManifestError, match=f"does not write {ROWS * 64} of {ROWS * 64} elements"):
        require_written(model, [batch])
    model = ArrayModel(partly)
    assert unbound_outputs(model, [batch]) == ()
    with pytest.raises(ManifestError, match=f"does not write {ROWS} of {ROWS * 64} elements"):
        require_written(model, [batch])
    model = ArrayModel(lambda x: 2 * x)
    require_written(model, [batch])


def test_random_results_are_no_patterns() -> None:
    """Two runs differ, and nothing is rejected."""
    random = np.random.default_rng(3)
    model = ArrayModel(lambda x: random.standard_normal(x.shape).astype(np.float32))
    require_written(model, [(ROWS, {"x": np.ones((ROWS, 64), np.float32)})])
