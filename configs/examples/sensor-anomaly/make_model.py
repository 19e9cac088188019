"""Write an anomaly score for windows of sensor readings as ONNX to `1/`.

The expected value is a daily sine wave. The score is the distance of the window's mean from it plus
the standard deviation of the readings, in units of the usual noise.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WINDOW = 24
"""Readings of a window."""
LEVEL, SWING, NOISE = 20.0, 5.0, 0.5
"""Mean and amplitude of the daily wave, and noise of the readings, in degrees."""


def score(hours: np.ndarray, readings: np.ndarray) -> np.ndarray:
    """Reference scores of windows.

    Args:
        hours: `(rows,)`, from the epoch to the start of the window.
        readings: `(rows, 24)`.
    """
    usual = LEVEL + SWING * np.sin(2 * np.pi * (hours % 24) / 24)
    mean = readings.mean(axis=1)
    spread = np.sqrt(((readings - mean[:, None]) ** 2).mean(axis=1))
    return (np.abs(mean - usual) + spread) / NOISE


def main(folder: Path) -> None:
    """Write the model: hours and readings as inputs, a score as output."""
    double, single = TensorProto.DOUBLE, TensorProto.FLOAT
    nodes = [
        helper.make_node("Div", ["hours", "day"], ["days"]),
        helper.make_node("Floor", ["days"], ["whole"]),
        helper.make_node("Sub", ["days", "whole"], ["share"]),
        helper.make_node("Cast", ["share"], ["share_single"], to=single),
        helper.make_node("Mul", ["share_single", "turn"], ["phase"]),
        helper.make_node("Sin", ["phase"], ["wave"]),
        helper.make_node("Mul", ["wave", "swing"], ["swung"]),
        helper.make_node("Add", ["swung", "level"], ["usual"]),
        helper.make_node("ReduceMean", ["readings"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["readings", "mean"], ["apart"]),
        helper.make_node("Mul", ["apart", "apart"], ["squared"]),
        helper.make_node("ReduceMean", ["squared"], ["variance"], axes=[1], keepdims=0),
        helper.make_node("Sqrt", ["variance"], ["spread"]),
        helper.make_node("Squeeze", ["mean", "last"], ["flat"]),
        helper.make_node("Sub", ["flat", "usual"], ["far"]),
        helper.make_node("Abs", ["far"], ["distance"]),
        helper.make_node("Add", ["distance", "spread"], ["sum"]),
        helper.make_node("Div", ["sum", "noise"], ["score"]),
    ]
    numbers = {"turn": 2 * np.pi, "swing": SWING, "level": LEVEL, "noise": NOISE}
    graph = helper.make_graph(
        nodes,
        "sensor-anomaly",
        [
            helper.make_tensor_value_info("hours", double, ["rows"]),
            helper.make_tensor_value_info("readings", single, ["rows", WINDOW]),
        ],
        [helper.make_tensor_value_info("score", single, ["rows"])],
        [
            helper.make_tensor("day", double, [], [24.0]),
            helper.make_tensor("last", TensorProto.INT64, [1], [1]),
            *(helper.make_tensor(name, single, [], [value]) for name, value in numbers.items()),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "model.onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent / "1")
