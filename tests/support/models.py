"""Small ONNX models, generated on demand."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parent.parent.parent
TWO_TOWER = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
WIDE = ROOT / "configs" / "models" / "wide-tabular" / "1"

MANIFEST_ALL = """
format = 1
passthrough = "all"
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "int64"
"""
"""Manifest of `row_ids`; every other column is passed through."""


def save(
    folder: Path,
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    initializers: Any = (),
    *,
    opset: int = 17,
) -> Path:
    """Write a graph as `folder/model.onnx`."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(model, folder / "model.onnx")
    return folder


def identity(folder: Path, element: int, shape: list[Any], name: str = "x") -> Path:
    """`y = x`."""
    return save(
        folder,
        [helper.make_node("Identity", [name], ["y"])],
        [helper.make_tensor_value_info(name, element, shape)],
        [helper.make_tensor_value_info("y", element, shape)],
    )


def row_ids(folder: Path) -> Path:
    """`y = 3 * x + 1` on int64: a result identifies its row."""
    return save(
        folder,
        [
            helper.make_node("Mul", ["x", "three"], ["m"]),
            helper.make_node("Add", ["m", "one"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["rows"])],
        [
            helper.make_tensor("three", TensorProto.INT64, [], [3]),
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
        ],
    )


def picky(folder: Path, most: int) -> Path:
    """`y = 3 * x + 1`; a run fails if a value is `most` or more."""
    return save(
        folder,
        [
            helper.make_node("Div", ["x", "most"], ["beyond"]),
            helper.make_node("Gather", ["table", "beyond"], ["nothing"]),
            helper.make_node("Mul", ["x", "three"], ["m"]),
            helper.make_node("Add", ["m", "one"], ["n"]),
            helper.make_node("Add", ["n", "nothing"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["rows"])],
        [
            helper.make_tensor("most", TensorProto.INT64, [], [most]),
            helper.make_tensor("table", TensorProto.INT64, [1], [0]),
            helper.make_tensor("three", TensorProto.INT64, [], [3]),
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
        ],
    )


def parsing(folder: Path) -> Path:
    """`y` is the sum of the numbers in the strings `a` and `b`, and of `x`."""
    return save(
        folder,
        [
            helper.make_node("Cast", ["a"], ["first"], to=TensorProto.FLOAT),
            helper.make_node("Cast", ["b"], ["second"], to=TensorProto.FLOAT),
            helper.make_node("Add", ["first", "second"], ["sum"]),
            helper.make_node("Add", ["sum", "x"], ["y"]),
        ],
        [
            helper.make_tensor_value_info("a", TensorProto.STRING, ["rows"]),
            helper.make_tensor_value_info("b", TensorProto.STRING, ["rows"]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows"]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows"])],
    )


def fragile(folder: Path) -> Path:
    """`y = x / -1`; the least integer ends the process by SIGFPE."""
    return save(
        folder,
        [helper.make_node("Div", ["x", "divisor"], ["y"])],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["rows"])],
        [helper.make_tensor("divisor", TensorProto.INT64, [], [-1])],
    )


def slow(folder: Path, turns: int) -> Path:
    """`y = x` after a loop of `turns` iterations for each unit in the first row of `x`."""
    nodes = [
        helper.make_node("Gather", ["x", "zero"], ["first"]),
        helper.make_node("Mul", ["first", "turns"], ["trips"]),
    ]
    return _loop(folder, nodes, turns=turns)


def looping(folder: Path, turns: int, turns_row: int) -> Path:
    """`y = x` after a loop of `turns` iterations and `turns_row` more for each row."""
    nodes = [
        helper.make_node("Size", ["x"], ["rows"]),
        helper.make_node("Mul", ["rows", "turns_row"], ["more"]),
        helper.make_node("Add", ["more", "turns"], ["trips"]),
    ]
    return _loop(folder, nodes, turns=turns, turns_row=turns_row)


def _loop(folder: Path, nodes: list[Any], **numbers: int) -> Path:
    """`y = x` after a loop of `trips` iterations, each of which multiplies 64 by 64 matrices."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition_in"], ["condition_out"]),
            helper.make_node("MatMul", ["state", "state"], ["squared"]),
            helper.make_node("Clip", ["squared", "low", "high"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor_value_info("condition_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [64, 64]),
        ],
        [
            helper.make_tensor("low", TensorProto.FLOAT, [], [-1.0]),
            helper.make_tensor("high", TensorProto.FLOAT, [], [1.0]),
        ],
    )
    state = np.full((64, 64), 0.01, np.float32)
    return save(
        folder,
        [
            *nodes,
            helper.make_node("Loop", ["trips", "true", "start"], ["end"], body=body),
            helper.make_node("ReduceMin", ["end"], ["least"], keepdims=0),
            helper.make_node("Cast", ["least"], ["least_int"], to=TensorProto.INT64),
            helper.make_node("Mul", ["least_int", "zero"], ["nothing"]),
            helper.make_node("Add", ["x", "nothing"], ["y"]),
        ],
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["rows"])],
        [
            helper.make_tensor("zero", TensorProto.INT64, [], [0]),
            helper.make_tensor("true", TensorProto.BOOL, [], [True]),
            helper.make_tensor("start", TensorProto.FLOAT, [64, 64], state.reshape(-1)),
            *(helper.make_tensor(n, TensorProto.INT64, [], [v]) for n, v in numbers.items()),
        ],
    )


def combinable(folder: Path) -> Path:
    """Add a manifest to a model from `x` to `y` whose runs take too long to measure its rows."""
    (folder / "manifest.toml").write_text(
        "format = 1\ncombine = true\n"
        '[[inputs]]\ncolumn = "x"\ntype = "int64"\ntensor = "x"\n'
        '[[outputs]]\ncolumn = "y"\ntype = "int64"\ntensor = "y"\n'
    )
    return folder


def priced(folder: Path, batch_turns: int, row_turns: int) -> Path:
    """`y = 3 * x + 1` at a fixed cost: iterations for the batch, and iterations for each row.

    A batch's iteration multiplies 64 by 64 matrices, a row's iteration costs about a 64th of that.
    """
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["condition_in"], ["condition_out"]),
            helper.make_node("MatMul", ["state", "same"], ["state_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("condition_in", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, [None, 64]),
        ],
        [
            helper.make_tensor_value_info("condition_out", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state_out", TensorProto.FLOAT, [None, 64]),
        ],
    )
    # Both loops depend on a zero multiple of x; otherwise constant folding would run them at load.
    nodes = [
        helper.make_node("Mul", ["x", "zero"], ["zeros"]),
        helper.make_node("Cast", ["zeros"], ["zeros_float"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMin", ["zeros_float"], ["zero_float"], keepdims=0),
        helper.make_node("Unsqueeze", ["zeros_float", "last"], ["column"]),
        helper.make_node("Add", ["same", "zero_float"], ["start_batch"]),
        helper.make_node("Add", ["column", "ones"], ["start_rows"]),
        helper.make_node("Loop", ["batch_turns", "true", "start_batch"], ["end_batch"], body=body),
        helper.make_node("Loop", ["row_turns", "true", "start_rows"], ["end_rows"], body=body),
        helper.make_node("ReduceMin", ["end_batch"], ["least_batch"], keepdims=0),
        helper.make_node("ReduceMin", ["end_rows"], ["least_rows"], axes=[1], keepdims=0),
        helper.make_node("Add", ["least_rows", "least_batch"], ["least"]),
        helper.make_node("Cast", ["least"], ["whole"], to=TensorProto.INT64),
        helper.make_node("Mul", ["whole", "zero"], ["nothing"]),
        helper.make_node("Mul", ["x", "three"], ["tripled"]),
        helper.make_node("Add", ["tripled", "one"], ["next"]),
        helper.make_node("Add", ["next", "nothing"], ["y"]),
    ]
    same = np.eye(64, dtype=np.float32)
    return save(
        folder,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.INT64, ["rows"])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["rows"])],
        [
            helper.make_tensor("zero", TensorProto.INT64, [], [0]),
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
            helper.make_tensor("three", TensorProto.INT64, [], [3]),
            helper.make_tensor("last", TensorProto.INT64, [1], [1]),
            helper.make_tensor("batch_turns", TensorProto.INT64, [], [batch_turns]),
            helper.make_tensor("row_turns", TensorProto.INT64, [], [row_turns]),
            helper.make_tensor("true", TensorProto.BOOL, [], [True]),
            helper.make_tensor("same", TensorProto.FLOAT, [64, 64], same.reshape(-1)),
            helper.make_tensor("ones", TensorProto.FLOAT, [64], [1.0] * 64),
        ],
    )


def in_process(folder: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs of ONNX Runtime in this process, with the worker's thread settings."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    nodes = (*session.get_inputs(), *session.get_outputs())
    if any(node.type == "tensor(bfloat16)" for node in nodes):
        return run_with_bfloat16(session, feeds)
    results: list[np.ndarray] = session.run(None, feeds)
    return results


def run_with_bfloat16(
    session: ort.InferenceSession, feeds: dict[str, np.ndarray]
) -> list[np.ndarray]:
    """The same with explicit element types: NumPy has no bfloat16."""
    half = helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    values = {}
    for name, array in feeds.items():
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        raw = np.ascontiguousarray(array)
        raw = raw.view(np.uint16) if array.dtype == half else raw
        values[name] = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element)
    results = []
    names = [node.name for node in session.get_outputs()]
    for value in session.run_with_ort_values(names, values):
        if value.element_type() == TensorProto.BFLOAT16:
            length = value.tensor_size_in_bytes()
            raw = np.frombuffer(ctypes.string_at(value.data_ptr(), length), half)
            results.append(raw.reshape(value.shape()))
        else:
            results.append(value.numpy())
    return results
