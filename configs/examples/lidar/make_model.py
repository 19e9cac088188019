"""Write a classifier of point clouds as ONNX to `1/`: a layer per point, maximum, a layer.

The weights are random numbers from a fixed seed, so the classes have no meaning.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES, WIDTH, CLASSES = 4, 32, 3
"""Values of a point (x, y, z, intensity), width of the hidden layer, number of classes."""

_RANDOM = np.random.default_rng(11)
POINT = _RANDOM.normal(size=(FEATURES, WIDTH)).astype(np.float32)
CLOUD = _RANDOM.normal(size=(WIDTH, CLASSES)).astype(np.float32) / WIDTH


def classify(points: np.ndarray) -> np.ndarray:
    """Reference scores of one cloud `(points, 4)`; zeros for an empty cloud."""
    seen = np.maximum(points.astype(np.float32) @ POINT, 0)
    return seen.max(axis=0, initial=0) @ CLOUD


def main(folder: Path) -> None:
    """Write the model: padded points and a mask of valid points as inputs; class scores."""
    nodes = [
        helper.make_node("MatMul", ["points", "point"], ["product"]),
        helper.make_node("Relu", ["product"], ["positive"]),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["positive", "column"], ["seen"]),
        helper.make_node("ReduceMax", ["seen"], ["largest"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["largest", "cloud"], ["scores"]),
    ]
    made = helper.make_graph(
        nodes,
        "lidar",
        [
            helper.make_tensor_value_info("points", TensorProto.FLOAT, ["rows", "long", FEATURES]),
            helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["rows", "long"]),
        ],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["rows", CLASSES])],
        [
            numpy_helper.from_array(POINT, "point"),
            numpy_helper.from_array(CLOUD, "cloud"),
            helper.make_tensor("last", TensorProto.INT64, [1], [2]),
        ],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
