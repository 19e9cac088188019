"""Comparability of two contracts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from iskander.contract.column_types import ColumnType
from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.gateway.shadow.contract import WORK_MAX, OutputMatch, match_outputs


def spec(name: str, kind: str = "float32", shape: tuple[int, ...] = (), **more: Any) -> TensorSpec:
    return TensorSpec(name, f"t_{name}", ColumnType(kind), shape, **more)


def contract(*outputs: TensorSpec, inputs: tuple[TensorSpec, ...] = (spec("x"),)) -> Contract:
    return Contract(inputs, outputs)


def test_outputs_are_matched_by_name() -> None:
    """Order, names in the graph and further outputs of the candidate do not matter."""
    served = contract(spec("a"), spec("b", "utf8", string_bytes=8))
    other = TensorSpec("b", "other", ColumnType("utf8"), (), string_bytes=99)
    candidate = contract(other, spec("more"), spec("a"))

    matches = match_outputs(served, candidate)

    assert isinstance(matches, tuple)
    assert [(m.name, m.served, m.candidate, m.kind) for m in matches] == [
        ("a", 0, 2, "float"),
        ("b", 1, 0, "label"),
    ]


@pytest.mark.parametrize(
    ("kind", "shape", "expected"),
    [
        ("float64", (), "float"),
        ("bfloat16", (3,), "float"),
        ("int64", (), "label"),
        ("bool", (1,), "label"),
        ("int32", (5,), "list"),
        ("utf8", (5,), "list"),
    ],
)
def test_kinds(kind: str, shape: tuple[int, ...], expected: str) -> None:
    assert OutputMatch("y", spec("y", kind, shape), 0, 0).kind == expected


@pytest.mark.parametrize(
    ("candidate", "problem"),
    [
        (contract(), "the candidate lacks the outputs `y`"),
        (contract(spec("y", "float64")), "output `y` is float32, and float64 of the candidate"),
        (
            contract(spec("y", shape=(2,))),
            "output `y` is float32, and float32 of shape [2] of the candidate",
        ),
        (
            contract(spec("y"), inputs=(spec("x"), spec("z", "int64"))),
            "the inputs differ: x float32, and x float32, z int64 of the candidate",
        ),
    ],
)
def test_differences_are_named(candidate: Contract, problem: str) -> None:
    assert match_outputs(contract(spec("y")), candidate) == problem


def test_conversion_of_inputs_must_be_equal() -> None:
    served = contract(spec("y"))
    source = InputColumn(column="x", type="date", tensor="x")
    candidate = msgspec.structs.replace(served, sources=(source,))
    problem = match_outputs(served, candidate)
    assert isinstance(problem, str) and "converted" in problem


def test_rows_with_too_many_values_are_refused() -> None:
    large = contract(spec("y", shape=(WORK_MAX + 1,)))
    assert match_outputs(large, large) == "a row has 65,537 values to compare, limit 65,536"
