"""Tolerance of results: both sides of each limit."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from iskander.contract.processing.tolerance import TOLERANCES, difference, mismatches, scale_of

PAGE = Path(__file__).resolve().parents[4] / "docs" / "scheduling.md"


def test_equal_rows_with_unequal_bits() -> None:
    """The example of the page: `Log` of 17 equal numbers, within the tolerance of `float32`."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Log", ["x"], ["y"])],
        "g",
        [info("x", TensorProto.FLOAT, ["rows"])],
        [info("y", TensorProto.FLOAT, ["rows"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    values = np.random.default_rng(0).uniform(0.01, 10, 2000).astype(np.float32)
    unequal = 0
    for value in values:
        (result,) = session.run(None, {"x": np.full(17, value, np.float32)})
        unequal += len(np.unique(result)) > 1
        assert not mismatches(result, np.full_like(result, result[0]), "float32").any()
    # 17 has a rest of 1 beside vectors of 4, 8 and 16 numbers.
    assert 0 < unequal < values.size


def test_page_has_the_tolerances() -> None:
    section = PAGE.read_text("utf-8").partition("## Equality of results")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|$", section, re.MULTILINE)
    assert {name: (float(one), float(two)) for name, one, two in rows} == TOLERANCES


@pytest.mark.parametrize("dtype_name", sorted(TOLERANCES))
def test_difference_below_and_above_the_tolerance(dtype_name: str) -> None:
    """The limit of an element is relative to its value and to the largest value of the output."""
    relative, absolute = TOLERANCES[dtype_name]
    expected = np.array([1.0, 100.0], np.float64)
    limit = relative * 1.0 + absolute * 100.0
    for factor, is_equal in ((0.99, True), (1.01, False)):
        found = np.add(expected, [factor * limit, 0])
        assert mismatches(found, expected, dtype_name).tolist() == [not is_equal, False]


def test_scale_can_be_that_of_all_rows() -> None:
    """A small result beside large ones may differ by rounding of the large ones."""
    expected, found = np.array([0.0]), np.array([1e-5])
    assert mismatches(found, expected, "float32").all()
    assert not mismatches(found, expected, "float32", scale=2.0).any()


def test_numbers_that_are_not_finite() -> None:
    """NaN equals NaN, an infinity only itself."""
    values = np.array([np.nan, np.inf, -np.inf, 1.0])
    assert not mismatches(values, values, "float32").any()
    assert mismatches(values, values[[1, 2, 3, 0]], "float32").all()
    assert mismatches(np.array([np.inf]), np.array([1e30]), "float32").all()


def test_other_types_have_no_tolerance() -> None:
    """One unequal label of four is a difference of a quarter."""
    expected = np.array([1, 2, 3, 4])
    found = np.array([1, 2, 3, 5])
    assert mismatches(found, expected, "int64").tolist() == [False, False, False, True]
    assert difference(found, expected) == 0.25
    texts = np.array([b"a", b"b"], np.object_)
    assert mismatches(texts, texts[::-1], "utf8").all()


def test_difference_is_a_share_of_the_scale() -> None:
    """It is 1 if a result has no size, or is not finite."""
    assert difference(np.array([1.0, 2.0]), np.array([1.0, 4.0])) == 0.5
    assert difference(np.array([1.0]), np.array([0.0])) == 1.0
    assert difference(np.array([np.nan]), np.array([1.0])) == 1.0
    assert difference(np.array([np.nan]), np.array([np.nan])) == 0.0
    assert difference(np.array([]), np.array([])) == 0.0
    assert scale_of(np.array([np.inf, -3.0, np.nan])) == 3.0
