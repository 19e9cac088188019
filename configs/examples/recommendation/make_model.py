"""Write a small two-tower ranker with item features to `1/`.

The weights are random numbers from a fixed seed, so the scores have no meaning.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

USERS, ITEMS, WIDTH = 64, 256, 8
FEATURES = ("price", "age_days", "clicks")
SEED = 3


def weights() -> dict[str, np.ndarray]:
    """A vector for each user and item, and a weight for each feature."""
    random = np.random.default_rng(SEED)
    return {
        "users": random.standard_normal((USERS, WIDTH), np.float32),
        "items": random.standard_normal((ITEMS, WIDTH), np.float32),
        "importance": random.standard_normal((len(FEATURES), 1), np.float32) / 8,
    }


def score(users: np.ndarray, items: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Reference scores, one for each row."""
    made = weights()
    alike = (made["users"][users] * made["items"][items]).sum(axis=1)
    return alike + (features @ made["importance"])[:, 0]


def build() -> ModelProto:
    """The graph of `score`."""
    nodes = [
        helper.make_node("Gather", ["users", "user"], ["user_vector"]),
        helper.make_node("Gather", ["items", "item"], ["item_vector"]),
        helper.make_node("Mul", ["user_vector", "item_vector"], ["product"]),
        helper.make_node("ReduceSum", ["product", "last"], ["alike"], keepdims=0),
        helper.make_node("MatMul", ["features", "importance"], ["column"]),
        helper.make_node("Squeeze", ["column", "last"], ["liked"]),
        helper.make_node("Add", ["alike", "liked"], ["relevance"]),
    ]
    inputs = [
        helper.make_tensor_value_info("user", TensorProto.INT64, ["rows"]),
        helper.make_tensor_value_info("item", TensorProto.INT64, ["rows"]),
        helper.make_tensor_value_info("features", TensorProto.FLOAT, ["rows", len(FEATURES)]),
    ]
    output = helper.make_tensor_value_info("relevance", TensorProto.FLOAT, ["rows"])
    constants = [numpy_helper.from_array(values, name) for name, values in weights().items()]
    constants.append(numpy_helper.from_array(np.array([1], np.int64), "last"))
    graph = helper.make_graph(nodes, "recommendation", inputs, [output], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main(folder: Path) -> None:
    """Write the model."""
    onnx.save(build(), folder / "model.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
