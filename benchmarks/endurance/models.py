"""Small ONNX and Python models of the endurance test."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from onnx import TensorProto, checker, helper, save

from benchmarks.endurance.requests import SUFFIX

PYTHON_MODEL = """
import pyarrow as pa
import pyarrow.compute as pc

class Model:
    def load(self, context):
        pass

    def predict(self, batch):
        return pa.record_batch({"y": pc.add(pc.multiply(batch.column("x"), 3), 1)})
"""
PYTHON_MANIFEST = """
format = 1
[[inputs]]
column = "x"
type = "int64"
tensor = "x"
[[outputs]]
tensor = "y"
column = "y"
type = "int64"
"""


def write_ids(folder: Path) -> None:
    """`y = 3 * x + 1`."""
    nodes = [
        helper.make_node("Mul", ["x", "three"], ["m"]),
        helper.make_node("Add", ["m", "one"], ["y"]),
    ]
    _write(folder, nodes, TensorProto.INT64, three=3, one=1)


def write_scaled(folder: Path, factor: int) -> None:
    """`y = factor * x`; appears in its place at once."""
    hidden = folder.parent / f".{uuid.uuid4().hex}"
    _write(
        hidden, [helper.make_node("Mul", ["x", "factor"], ["y"])], TensorProto.INT64, factor=factor
    )
    hidden.rename(folder)


def write_fragile(folder: Path) -> None:
    """`y = x / -1`; the least integer ends the process by SIGFPE."""
    _write(
        folder, [helper.make_node("Div", ["x", "divisor"], ["y"])], TensorProto.INT64, divisor=-1
    )


def write_words(folder: Path) -> None:
    """Strings with a suffix."""
    nodes = [helper.make_node("StringConcat", ["x", "suffix"], ["y"])]
    _write(folder, nodes, TensorProto.STRING, suffix=SUFFIX.encode())


def write_python(folder: Path) -> None:
    """`y = 3 * x + 1` in Python."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(PYTHON_MODEL, "utf-8")
    (folder / "manifest.toml").write_text(PYTHON_MANIFEST, "utf-8")


def _write(folder: Path, nodes: list[Any], element: int, **constants: int | bytes) -> None:
    graph = helper.make_graph(
        nodes,
        "endurance",
        [helper.make_tensor_value_info("x", element, ["rows"])],
        [helper.make_tensor_value_info("y", element, ["rows"])],
        [helper.make_tensor(name, element, [], [value]) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    checker.check_model(model)
    folder.mkdir(parents=True)
    save(model, folder / "model.onnx")
