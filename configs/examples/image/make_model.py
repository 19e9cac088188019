"""Write a ResNet-50 on raw pixels to `1/`.

The graph is from the wheel of `onnx`, which has no weights. The weights are random numbers from a
fixed seed, so the classes have no meaning.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
SEED = 5
CLASSES = 1000
MEAN = (123.675, 116.28, 103.53)
DEVIATION = (58.395, 57.12, 57.375)
PIXELS, BATCH_AXIS, RESHAPE = "gpu_0/data_0", "rows", "OC2_DUMMY_1"


def build() -> ModelProto:
    """The graph with weights, an open batch axis, and the preparation of pixels."""
    model = onnx.load(LIGHT)
    graph = model.graph
    random = np.random.default_rng(SEED)
    shapes = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    empty = [node for node in graph.node if node.op_type == "ConstantOfShape"]
    weights = [_weight(node.output[0], shapes[node.input[0]], random) for node in empty]
    nodes = [node for node in graph.node if node not in empty]
    used = {name for node in nodes for name in node.input}
    kept = [each for each in graph.initializer if each.name in used and each.name != RESHAPE]
    kept.append(numpy_helper.from_array(np.array([0, 2048], np.int64), RESHAPE))
    ready, constants = _preparation()
    output = helper.make_tensor_value_info(
        graph.output[0].name, TensorProto.FLOAT, [BATCH_AXIS, CLASSES]
    )
    pixels = helper.make_tensor_value_info("image", TensorProto.UINT8, [BATCH_AXIS, 224, 224, 3])
    whole = helper.make_graph(
        [*ready, *nodes], "resnet50", [pixels], [output], [*kept, *weights, *constants]
    )
    return helper.make_model(whole, opset_imports=[helper.make_opsetid("", 9)], ir_version=8)


def _weight(name: str, shape: np.ndarray, random: np.random.Generator) -> TensorProto:
    """Random weights that preserve the scale of activations, and identity normalization."""
    if len(shape) == 1:
        values = np.full(shape, name.endswith(("_s_0", "_riv_0")), np.float32)
    else:
        scale = int(np.prod(shape[1:])) ** -0.5
        values = random.standard_normal(tuple(shape), np.float32) * np.float32(scale)
    return numpy_helper.from_array(values, name)


def _preparation() -> tuple[list[onnx.NodeProto], list[TensorProto]]:
    """Nodes that convert bytes, channels last, to normalized floats, channels first."""
    nodes = [
        helper.make_node("Cast", ["image"], ["bright"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["bright", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "deviation"], ["even"]),
        helper.make_node("Transpose", ["even"], [PIXELS], perm=[0, 3, 1, 2]),
    ]
    constants = [
        numpy_helper.from_array(np.array(MEAN, np.float32), "mean"),
        numpy_helper.from_array(np.array(DEVIATION, np.float32), "deviation"),
    ]
    return nodes, constants


def main(folder: Path) -> None:
    """Write the model and the label of each class."""
    onnx.save(build(), folder / "model.onnx")
    (folder / "labels.txt").write_text("".join(f"class {n}\n" for n in range(CLASSES)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
