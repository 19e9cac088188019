"""Limits of one batch to one model, from the settings and the sizes of its tensors."""

from __future__ import annotations

from typing import Any

import pytest

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec, body_layout
from iskander.gateway.protocols.flight.columns.batch_limits import batch_limits

MIB = 1 << 20


def spec(dtype_name: str, *shape: int, string_bytes: int = 0) -> TensorSpec:
    return TensorSpec("x", "x", ColumnType(dtype_name, shape), shape, string_bytes=string_bytes)


def rows_of(inputs: list[TensorSpec], outputs: list[TensorSpec], **limits: Any) -> int:
    contract = Contract(tuple(inputs), tuple(outputs))
    return batch_limits(contract, LimitsConfig(**limits))["rows"]


def test_small_rows_have_the_limits_of_the_settings() -> None:
    contract = Contract((spec("int64"),), (spec("float32"),))
    limits = LimitsConfig(rows=1000, bytes=MIB, string_bytes=500)
    assert batch_limits(contract, limits) == {"rows": 1000, "bytes": MIB, "string_bytes": 500}


def test_rows_are_limited_by_the_bytes_of_inputs() -> None:
    """As for padded lists, whose tensors are larger than the message."""
    inputs = [spec("int64", 512), spec("bool", 512)]
    assert rows_of(inputs, [spec("float32")], bytes=MIB) == MIB // (512 * 8 + 64)


@pytest.mark.parametrize(
    "output", [spec("float64", 100), spec("bool", 77), spec("utf8", string_bytes=256)]
)
def test_rows_are_the_most_whose_results_fit(output: TensorSpec) -> None:
    rows = rows_of([spec("int8")], [output], result_bytes=MIB)
    assert 0 < rows < 1_048_576
    assert body_layout((output,), rows)[1] <= MIB < body_layout((output,), rows + 1)[1]


def test_one_row_above_the_limits_leaves_one_row() -> None:
    assert rows_of([spec("int8")], [spec("float64", 1000)], result_bytes=100) == 1
