"""Small ONNX models, made where they are needed."""

from __future__ import annotations

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
"""Of `row_ids`, with every other column passed through."""


def save(
    folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: Any = ()
) -> Path:
    """Write a graph as `folder/model.onnx`."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
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
    """`y = 3 * x + 1` on int64: a result tells which row it is from."""
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


def slow(folder: Path, turns: int) -> Path:
    """`y = x` after a loop of `turns` turns for each unit in the first row of `x`."""
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
            helper.make_node("Gather", ["x", "zero"], ["first"]),
            helper.make_node("Mul", ["first", "turns"], ["trips"]),
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
            helper.make_tensor("turns", TensorProto.INT64, [], [turns]),
            helper.make_tensor("true", TensorProto.BOOL, [], [True]),
            helper.make_tensor("start", TensorProto.FLOAT, [64, 64], state.reshape(-1)),
        ],
    )


def in_process(folder: Path, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    """What ONNX Runtime computes in this very process, with the worker's thread settings."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(
        folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    results: list[np.ndarray] = session.run(None, feeds)
    return results
