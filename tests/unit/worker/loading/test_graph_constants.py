"""Constants of a graph file: words, numbers and divisions."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from iskander_worker.loading.graph_constants import GraphConstants, constants_of
from onnx import TensorProto, helper, numpy_helper
from support.models import save

X = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])
Y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])


def constants(path: Path, nodes: list, tensors: list) -> GraphConstants:
    """The constants of a graph with these nodes and tensors, which need not be a valid one."""
    graph = helper.make_graph(nodes, "g", [X], [Y], tensors)
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return constants_of(path)


def test_numbers_of_small_tensors_in_every_encoding(tmp_path: Path) -> None:
    """Raw bytes, packed fields of each type, negative integers; weights are no constants."""
    tensors = [
        numpy_helper.from_array(np.array([1.5, -2.5], np.float32), "raw"),
        numpy_helper.from_array(np.array(-77, np.int64), "scalar"),
        helper.make_tensor("floats", TensorProto.FLOAT, [1], [31.25]),
        helper.make_tensor("doubles", TensorProto.DOUBLE, [1], [1e300]),
        helper.make_tensor("longs", TensorProto.INT64, [2], [-5, 1 << 40]),
        helper.make_tensor("bytes", TensorProto.INT8, [1], [-3]),
        numpy_helper.from_array(np.arange(1000, 1017, dtype=np.float32), "weights"),
        helper.make_tensor("not finite", TensorProto.FLOAT, [2], [float("nan"), float("inf")]),
    ]
    found = constants(tmp_path / "m", [helper.make_node("Identity", ["x"], ["y"])], tensors)
    assert set(found.numbers) == {1.5, -2.5, -77, 31.25, 1e300, -5, 1 << 40, -3}
    assert not found.has_divisions


def test_attributes_and_graphs_within_nodes(tmp_path: Path) -> None:
    """Words, floats and integers of attributes, also of the body of a conditional."""
    inner = helper.make_node(
        "LabelEncoder", ["x"], ["z"], keys_strings=["paris", "a b"], values_floats=[4.5, -6.0]
    )
    body = helper.make_graph([inner], "body", [], [Y])
    nodes = [
        helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body),
        helper.make_node("Constant", [], ["c"], value_float=0.125),
        helper.make_node("Constant", [], ["d"], value_int=-1234),
        helper.make_node("TreeEnsembleRegressor", ["x"], ["t"], nodes_values=[7.0] * 200),
        helper.make_node("Mod", ["x", "d"], ["m"]),
    ]
    found = constants(tmp_path / "m", nodes, [])
    assert {4.5, -6.0, 0.125, -1234} <= set(found.numbers)
    assert 7.0 not in found.numbers
    assert "paris" in found.words
    assert "a b" not in found.words
    assert found.has_divisions


def test_words_of_a_large_tensor(tmp_path: Path) -> None:
    """A vocabulary has more elements than the numbers of a constant may have."""
    words = [f"w{number}" for number in range(500)]
    tensor = helper.make_tensor("words", TensorProto.STRING, [500], [w.encode() for w in words])
    found = constants(tmp_path / "m", [helper.make_node("Identity", ["x"], ["y"])], [tensor])
    assert tuple(found.words) == tuple(words)


@pytest.mark.long
def test_absent_and_malformed_files(tmp_path: Path) -> None:
    """Nothing is found, and divisions are assumed; no bytes raise an error."""
    (tmp_path / "empty").touch()
    assert constants_of(tmp_path / "empty").has_divisions
    assert constants_of(tmp_path / "absent").has_divisions
    tensors = [numpy_helper.from_array(np.array([1.5], np.float32), "c")]
    nodes = [helper.make_node("Add", ["x", "c"], ["y"])]
    whole = (save(tmp_path / "m", nodes, [X], [Y], tensors) / "model.onnx").read_bytes()
    generator = random.Random(1)
    for _ in range(3000):
        changed = bytearray(whole[: generator.randrange(1, len(whole))])
        for _ in range(generator.randrange(4)):
            changed[generator.randrange(len(changed))] = generator.randrange(256)
        (tmp_path / "changed").write_bytes(changed)
        constants_of(tmp_path / "changed")


def test_search_has_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file with too many fields is not read to its end, so it may divide integers."""
    monkeypatch.setattr("iskander_worker.loading.graph_constants.FIELDS_MAX", 50)
    nodes = [helper.make_node("Identity", ["x"], ["y"])] * 100
    assert constants(tmp_path / "m", nodes, []).has_divisions
    words = helper.make_tensor("words", TensorProto.STRING, [100], [b"a"] * 100)
    assert constants(tmp_path / "t", nodes[:1], [words, words]).has_divisions
