"""Small ONNX graphs whose rows depend on each other, or not; each takes `x` and returns `y`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from support.models import save

WIDTH = 3
node = helper.make_node


def _graph(
    folder: Path,
    nodes: list[Any],
    *,
    constants: dict[str, np.ndarray] | None = None,
    rows: int | str = "rows",
    element: int = TensorProto.FLOAT,
    result: int | None = None,
    width: int = WIDTH,
    result_shape: list[Any] | None = None,
    opset: int = 17,
) -> Path:
    """Save a graph from `x` to `y`, both `[rows, width]` unless `result_shape` is given."""
    initializers = [numpy_helper.from_array(v, name) for name, v in (constants or {}).items()]
    shape = [rows, width]
    outputs = [helper.make_tensor_value_info("y", result or element, result_shape or shape)]
    inputs = [helper.make_tensor_value_info("x", element, shape)]
    return save(folder, nodes, inputs, outputs, initializers, opset=opset)


def linear(folder: Path, rows: int | str = "rows") -> Path:
    """A matrix product: independent."""
    weights = np.random.default_rng(1).standard_normal((WIDTH, WIDTH)).astype(np.float32)
    return _graph(folder, [node("MatMul", ["x", "w"], ["y"])], constants={"w": weights}, rows=rows)


def log(folder: Path) -> Path:
    """A logarithm of absolute values: independent within rounding, but not bit for bit."""
    return _graph(folder, [node("Abs", ["x"], ["a"]), node("Log", ["a"], ["y"])])


def softmax_of_row(folder: Path) -> Path:
    """Softmax over the values of a row: independent."""
    return _graph(folder, [node("Softmax", ["x"], ["y"], axis=1)])


def mean_of_rows(folder: Path) -> Path:
    """The distance to the mean of all rows: dependent."""
    nodes = [node("ReduceMean", ["x"], ["m"], axes=[0]), node("Sub", ["x", "m"], ["y"])]
    return _graph(folder, nodes)


def softmax_of_rows(folder: Path) -> Path:
    """Softmax over the rows: dependent."""
    return _graph(folder, [node("Softmax", ["x"], ["y"], axis=0)])


def cumulative_sum(folder: Path, rows: int | str = "rows") -> Path:
    """The sum of the rows so far: dependent."""
    axis = {"axis": np.array(0, np.int64)}
    return _graph(folder, [node("CumSum", ["x", "axis"], ["y"])], constants=axis, rows=rows)


def reverse(folder: Path) -> Path:
    """The rows in reverse: dependent."""
    constants = {
        "first": np.array([-1], np.int64), "last": np.array([-(2**62)], np.int64),
        "axis": np.array([0], np.int64), "step": np.array([-1], np.int64),
    }  # fmt: skip
    return _graph(
        folder, [node("Slice", ["x", "first", "last", "axis", "step"], ["y"])], constants=constants
    )


def sort(folder: Path) -> Path:
    """Each column in descending order: dependent."""
    nodes = [
        node("Shape", ["x"], ["shape"], start=0, end=1),
        node("TopK", ["x", "shape"], ["y", "order"], axis=0),
    ]
    return _graph(folder, nodes)


def rank_of_row(folder: Path) -> Path:
    """The position of each row: dependent, and the same for every content."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("Add", ["zeros", "one"], ["ones"]),
        node("CumSum", ["ones", "axis"], ["places"]),
        node("Add", ["places", "x"], ["y"]),
    ]
    constants = {"one": np.array(1, np.float32), "axis": np.array(0, np.int64)}
    return _graph(folder, nodes, constants=constants)


def first_row_wins(folder: Path) -> Path:
    """Every row plus the first one: dependent by position only."""
    nodes = [node("Gather", ["x", "zero"], ["first"], axis=0), node("Add", ["x", "first"], ["y"])]
    return _graph(folder, nodes, constants={"zero": np.array([0], np.int64)})


def marker_mean(folder: Path, marker: float, *, is_threshold: bool = False) -> Path:
    """A marker, or all above a threshold, is replaced by the mean of the batch: dependent."""
    nodes = [
        node("Greater" if is_threshold else "Equal", ["x", "marker"], ["is_missing"]),
        node("ReduceMean", ["x"], ["mean"], axes=[0]),
        node("Where", ["is_missing", "mean", "x"], ["y"]),
    ]
    return _graph(folder, nodes, constants={"marker": np.array(marker, np.float32)})


def integer_marker_mean(folder: Path, marker: int, element: int) -> Path:
    """The same for integers."""
    nodes = [
        node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT),
        node("Equal", ["wide", "marker"], ["is_missing"]),
        node("ReduceMean", ["wide"], ["mean"], axes=[0]),
        node("Where", ["is_missing", "mean", "wide"], ["y"]),
    ]
    constants = {"marker": np.array(marker, np.float32)}
    return _graph(folder, nodes, constants=constants, element=element, result=TensorProto.FLOAT)


def trimmed_tokens(folder: Path) -> Path:
    """Tokens of texts, cut to the longest text of the batch; 0 is padding. It divides floats."""
    nodes = [
        node("Equal", ["x", "zero"], ["is_padding"]),
        node("Not", ["is_padding"], ["is_token"]),
        node("Cast", ["is_token"], ["ones"], to=TensorProto.INT64),
        node("ReduceSum", ["ones", "axis"], ["lengths"], keepdims=0),
        node("ReduceMax", ["lengths"], ["longest"], keepdims=1),
        node("Max", ["longest", "axis"], ["end"]),
        node("Slice", ["x", "begin", "end", "axis"], ["used"]),
        node("Gather", ["vectors", "used"], ["found"]),
        node("ReduceMean", ["found"], ["mean"], axes=[1], keepdims=0),
        node("Div", ["mean", "scale"], ["y"]),
    ]
    vectors = np.random.default_rng(2).standard_normal((1000, WIDTH)).astype(np.float32)
    constants = {
        "zero": np.array(0, np.int64), "axis": np.array([1], np.int64),
        "begin": np.array([0], np.int64), "scale": np.array(8, np.float32), "vectors": vectors,
    }  # fmt: skip
    return _graph(
        folder, nodes, constants=constants, element=TensorProto.INT64, result=TensorProto.FLOAT
    )


def missing_in_row(folder: Path, row: int) -> Path:
    """All results increase if the first (0) or last (-1) row has a NaN."""
    nodes = [
        node("Gather", ["x", "row"], ["chosen"], axis=0),
        node("IsNaN", ["chosen"], ["is_missing"]),
        node("Cast", ["is_missing"], ["number"], to=TensorProto.FLOAT),
        node("Add", ["x", "number"], ["y"]),
    ]
    return _graph(folder, nodes, constants={"row": np.array([row], np.int64)})


def unit_of_the_largest(folder: Path, threshold: float, element: int) -> Path:
    """All values are divided by 1000 if the largest one exceeds a threshold: times in ms."""
    nodes = [
        node("Cast", ["x"], ["wide"], to=TensorProto.DOUBLE),
        node("ReduceMax", ["wide"], ["largest"], keepdims=0),
        node("Greater", ["largest", "threshold"], ["is_ms"]),
        node("Div", ["wide", "thousand"], ["seconds"]),
        node("Where", ["is_ms", "seconds", "wide"], ["y"]),
    ]
    constants = {"threshold": np.array(threshold), "thousand": np.array(1000.0)}
    return _graph(folder, nodes, constants=constants, element=element, result=TensorProto.DOUBLE)


def padded_words(folder: Path) -> Path:
    """The number of words of each text as a share of those of the longest text of the batch."""
    nodes = [
        node("StringSplit", ["x"], ["words", "count"]),
        node("Shape", ["words"], ["longest"], start=2),
        node("Cast", ["longest"], ["most"], to=TensorProto.FLOAT),
        node("Cast", ["count"], ["own"], to=TensorProto.FLOAT),
        node("Div", ["own", "most"], ["y"]),
    ]
    return _graph(folder, nodes, element=TensorProto.STRING, result=TensorProto.FLOAT, opset=20)


def dynamic_quantization(folder: Path) -> Path:
    """An int8 product whose scale is that of the whole batch: approximate."""
    weights = np.random.default_rng(1).integers(-100, 100, (WIDTH, WIDTH)).astype(np.int8)
    nodes = [
        node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        node("MatMulInteger", ["q", "w", "zero"], ["product"]),
        node("Cast", ["product"], ["wide"], to=TensorProto.FLOAT),
        node("Mul", ["wide", "scale"], ["y"]),
    ]
    return _graph(folder, nodes, constants={"w": weights})


def positive_rows(folder: Path) -> Path:
    """The rows whose first value is positive: other results than rows."""
    nodes = [
        node("Gather", ["x", "zero"], ["head"], axis=1),
        node("Squeeze", ["head", "one"], ["flat"]),
        node("Greater", ["flat", "least"], ["is_kept"]),
        node("Compress", ["x", "is_kept"], ["y"], axis=0),
    ]
    constants = {
        "zero": np.array([0], np.int64), "one": np.array([1], np.int64),
        "least": np.array(0, np.float32),
    }  # fmt: skip
    return _graph(folder, nodes, constants=constants, result_shape=["kept", WIDTH])


def random(folder: Path) -> Path:
    """Random numbers: two runs of one row differ."""
    nodes = [node("RandomNormalLike", ["x"], ["noise"]), node("Add", ["x", "noise"], ["y"])]
    return _graph(folder, nodes)


def constant(folder: Path) -> Path:
    """Zero for every row: nothing shows from which row a result comes."""
    return _graph(folder, [node("Sub", ["x", "x"], ["y"])])


def table(folder: Path, length: int = 4) -> Path:
    """A lookup of integers in a table of `length` rows: independent; larger ones fail."""
    values = np.random.default_rng(1).standard_normal((length, WIDTH)).astype(np.float32)
    return _graph(
        folder,
        [node("Gather", ["table", "x"], ["wide"]), node("ReduceSum", ["wide", "axis"], ["y"])],
        constants={"table": values, "axis": np.array([1], np.int64)},
        element=TensorProto.INT64,
        result=TensorProto.FLOAT,
        result_shape=["rows", 1, WIDTH],
    )


INDEPENDENT: tuple[Callable[[Path], Path], ...] = (linear, log, softmax_of_row, table)
DEPENDENT: tuple[Callable[[Path], Path], ...] = (
    mean_of_rows, softmax_of_rows, cumulative_sum, reverse, sort, rank_of_row, first_row_wins,
)  # fmt: skip
