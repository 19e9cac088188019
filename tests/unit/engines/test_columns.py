"""Columns of a scored dataset: checks before anything runs, and the columns of the output."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from iskander.client import ModelDescription
from iskander.engines.columns import Columns, join_columns, plan_columns
from iskander.errors import ConfigError, ContractError


def described(inputs: dict[str, Any], outputs: dict[str, Any], **other: Any) -> ModelDescription:
    values: dict[str, Any] = {
        "name": "m", "version": "1", "ready": True, "backend": "onnx", "max_batch_rows": 100,
        "limits": {"rows": 100, "bytes": 1000, "string_bytes": 1000}, "versions": ("1",),
        "aliases": {}, "input_schema": pa.schema(inputs), "output_schema": pa.schema(outputs),
        "input_types": {name: str(kind) for name, kind in inputs.items()},
        "passthrough": "none", "ranked_within": (), "metadata": {},
    }  # fmt: skip
    return ModelDescription(**{**values, **other})


MODEL = described({"x": pa.int64()}, {"y": pa.float32()})
SCHEMA = pa.schema({"id": pa.string(), "x": pa.int64(), "z": pa.int64()})


def test_all_columns_are_kept_and_only_inputs_are_sent() -> None:
    plan = plan_columns(MODEL, SCHEMA)
    assert plan.kept_columns(SCHEMA.names) == ["id", "x", "z"]
    assert plan.sent_columns(SCHEMA.names) == ["x"]
    assert plan.results == pa.schema({"y": pa.float32()})


def test_keep_and_renamed_inputs() -> None:
    plan = plan_columns(MODEL, SCHEMA, columns={"x": "z"}, keep=["z", "id"])
    assert plan.kept_columns(SCHEMA.names) == ["z", "id"]
    assert plan.sent_columns(SCHEMA.names) == ["z"]


def test_struct_is_sent_for_its_fields() -> None:
    model = described({"a.b": pa.int64(), "c.d": pa.int64()}, {"y": pa.int64()})
    names = ["id", "c.d", "c", "a"]
    assert plan_columns(model, None).sent_columns(names) == ["c.d", "a"]


def test_columns_that_rows_are_ranked_within_are_sent() -> None:
    model = described({"x": pa.int64()}, {"y": pa.int64()}, ranked_within=("z", ""))
    assert plan_columns(model, SCHEMA).sent_columns(SCHEMA.names) == ["x", "z"]


@pytest.mark.parametrize("is_known", [True, False], ids=["types", "names"])
def test_name_clash(is_known: bool) -> None:
    schema = pa.schema({"x": pa.int64(), "y": pa.int64()})
    known = (schema, None) if is_known else (None, schema.names)
    with pytest.raises(ContractError, match="column `y` is in the dataset and a result of model"):
        plan_columns(MODEL, known[0], names=known[1])
    assert plan_columns(MODEL, known[0], names=known[1], keep=["x"]).keep == ("x",)


def test_missing_columns_and_types() -> None:
    with pytest.raises(ContractError, match=r"column `x` is missing.*nearest is `x_`"):
        plan_columns(MODEL, pa.schema({"x_": pa.int64(), "id": pa.string()}))
    with pytest.raises(ContractError, match="column `x`: wanted int64, got string"):
        plan_columns(MODEL, pa.schema({"x": pa.string()}))
    with pytest.raises(ContractError, match="2 columns are named `x`"):
        plan_columns(MODEL, pa.schema([("x", pa.int64()), ("x", pa.int64())]))
    with pytest.raises(ConfigError, match=r"`keep` has `idd`.*did you mean `id`"):
        plan_columns(MODEL, SCHEMA, keep=["idd"])
    with pytest.raises(ConfigError, match=r"`keep` has `label`.*it has id, x, z"):
        plan_columns(MODEL, SCHEMA, keep=["label"])


def test_unknown_columns_are_checked_as_far_as_possible() -> None:
    with pytest.raises(ContractError, match="a result of model `m`"):
        plan_columns(MODEL, None, keep=["y"])
    with pytest.raises(ContractError, match="would have two columns `x`"):
        plan_columns(MODEL, None, keep=["x", "x"])
    plan = plan_columns(MODEL, None)
    with pytest.raises(ContractError, match="column `y` is in the dataset"):
        plan.kept_columns(["x", "y"])


def test_results_are_appended_with_their_types() -> None:
    plan = Columns(
        model="m", inputs=("x",), results=pa.schema({"y": pa.int64(), "w": pa.utf8()}), keep=None
    )
    kept = pa.table({"x": [1, 2]})
    results = pa.table({"w": ["a", "b"], "other": [0, 0], "y": [3, 4]})
    table = join_columns(plan, kept, results)
    assert table.to_pydict() == {"x": [1, 2], "y": [3, 4], "w": ["a", "b"]}
    empty = join_columns(plan, kept.slice(0, 0), plan.results.empty_table())
    assert empty.schema == table.schema
    with pytest.raises(ContractError, match="returned 1 rows for 2"):
        join_columns(plan, kept, results.slice(0, 1))
