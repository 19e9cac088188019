"""A model of ResNet-50's size, with random weights.

The layers are those of ResNet-50 v1.5 after batch normalisation is folded into the convolutions:
25.6 million weights and 4.1 billion multiply-adds an image. The images are NCHW.

Source: He et al., "Deep Residual Learning for Image Recognition", table 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

IMAGE = (3, 224, 224)
CLASSES = 1000
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner channels, and number of blocks."""
EXPANSION = 4
TYPES = {"float32": (TensorProto.FLOAT, np.float32), "float16": (TensorProto.FLOAT16, np.float16)}
SEED = 50


def make_resnet(
    element: str = "float32", *, stages: tuple[tuple[int, int], ...] = STAGES
) -> ModelProto:
    """Build the model, with the element type `float32` or `float16` for weights and tensors."""
    net = _Net(element)
    value = net.convolve("images", 3, 64, 7, stride=2, is_active=True)
    value = net.add("MaxPool", [value], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    channels = 64
    for stage, (inner, blocks) in enumerate(stages):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            value = net.bottleneck(value, channels, inner, stride)
            channels = inner * EXPANSION
    value = net.add("Flatten", [net.add("GlobalAveragePool", [value])])
    weight, bias = net.weights((channels, CLASSES), channels), net.weights((CLASSES,), channels)
    net.add("Gemm", [value, weight, bias], name="scores")
    return net.model()


class _Net:
    """A graph under construction."""

    def __init__(self, element: str) -> None:
        self._type, self._dtype = TYPES[element]
        self._random = np.random.default_rng(SEED)
        self._nodes: list[Any] = []
        self._initializers: list[Any] = []

    def add(self, operator: str, inputs: list[str], name: str = "", **attributes: object) -> str:
        output = name or f"{operator.lower()}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    def weights(self, shape: tuple[int, ...], fan_in: int) -> str:
        """Weights of half the variance of He initialisation, as the blocks add their inputs."""
        name = f"weights_{len(self._initializers)}"
        values = self._random.standard_normal(shape, np.float32) / np.sqrt(fan_in)
        self._initializers.append(numpy_helper.from_array(values.astype(self._dtype), name))
        return name

    def convolve(
        self, value: str, channels: int, filters: int, size: int, *, stride: int, is_active: bool
    ) -> str:
        fan_in = channels * size * size
        weight, bias = self.weights((filters, channels, size, size), fan_in), f"zeros_{filters}"
        if all(each.name != bias for each in self._initializers):
            zeros = np.zeros(filters, self._dtype)
            self._initializers.append(numpy_helper.from_array(zeros, bias))
        value = self.add(
            "Conv",
            [value, weight, bias],
            kernel_shape=[size, size],
            strides=[stride, stride],
            pads=[size // 2] * 4,
        )
        return self.add("Relu", [value]) if is_active else value

    def bottleneck(self, value: str, channels: int, inner: int, stride: int) -> str:
        outer = inner * EXPANSION
        inside = self.convolve(value, channels, inner, 1, stride=1, is_active=True)
        inside = self.convolve(inside, inner, inner, 3, stride=stride, is_active=True)
        inside = self.convolve(inside, inner, outer, 1, stride=1, is_active=False)
        if channels != outer or stride != 1:
            value = self.convolve(value, channels, outer, 1, stride=stride, is_active=False)
        return self.add("Relu", [self.add("Add", [inside, value])])

    def model(self) -> ModelProto:
        images = helper.make_tensor_value_info("images", self._type, ["rows", *IMAGE])
        scores = helper.make_tensor_value_info("scores", self._type, ["rows", CLASSES])
        graph = helper.make_graph(
            self._nodes, "resnet50", [images], [scores], initializer=self._initializers
        )
        opset = [helper.make_opsetid("", 17)]
        return helper.make_model(graph, opset_imports=opset, ir_version=8)
