"""Limits of the smallest request: a model that could serve none is rejected at its load."""

from __future__ import annotations

import pytest

from iskander.contract.column_types import ColumnType
from iskander.contract.inputs import require_smallest_request
from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ManifestError

Y = TensorSpec("y", "y", ColumnType("float32"), (8,))
LIMITS = {"columns": 3, "batch_bytes": 64, "result_bytes": 64}


def spec(name: str, *shape: int) -> TensorSpec:
    """A tensor of float32."""
    return TensorSpec(name, name, ColumnType("float32"), shape)


def test_columns_on_both_sides_of_the_limit() -> None:
    """Fields of one struct are one column."""
    require_smallest_request(Contract((spec("a"),), (Y,)), **LIMITS)
    four = Contract(tuple(spec(name) for name in "abcd"), (Y,))
    with pytest.raises(ManifestError, match=r"has 4 columns, limit 3 \(`limits.columns`\)"):
        require_smallest_request(four, **(LIMITS | {"batch_bytes": 1000}))
    names = tuple(f"user.{name}" for name in "abcd")
    packed = Contract(
        (spec("x", 4),), (Y,), sources=(InputColumn(tensor="x", columns=names, type="float32"),)
    )
    require_smallest_request(packed, **LIMITS)


def test_bytes_of_one_row_or_of_a_fixed_batch() -> None:
    """A fixed number of rows is the smallest request."""
    require_smallest_request(Contract((spec("a", 16),), (Y,), rows_fixed=1), **LIMITS)
    with pytest.raises(ManifestError, match=r"a request of 2 rows has 128 bytes"):
        require_smallest_request(Contract((spec("a", 16),), (Y,), rows_fixed=2), **LIMITS)
    with pytest.raises(ManifestError, match=r"limits.result_bytes"):
        require_smallest_request(Contract((spec("a"),), (spec("y", 17),)), **LIMITS)
