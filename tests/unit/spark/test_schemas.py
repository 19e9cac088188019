"""Spark types as Arrow types, and results in the types that Spark has."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.arrow.types import BFloat16
from iskander.errors import ContractError
from iskander.spark.schemas import arrow_type, as_batches, spark_fields, spark_results, spark_type

STRUCT = {
    "type": "struct",
    "fields": [
        {"name": "a", "type": "long", "nullable": True, "metadata": {}},
        {"name": "b", "type": "string", "nullable": True, "metadata": {}},
    ],
}


def array(item: Any) -> dict[str, Any]:
    return {"type": "array", "elementType": item, "containsNull": True}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("long", pa.int64()),
        ("decimal(10,2)", pa.decimal128(10, 2)),
        ("varchar(5)", pa.utf8()),
        ("timestamp", pa.timestamp("us", "UTC")),
        (array("float"), pa.list_(pa.field("element", pa.float32()))),
        (STRUCT, pa.struct({"a": pa.int64(), "b": pa.utf8()})),
        (
            {"type": "map", "keyType": "string", "valueType": "date", "valueContainsNull": True},
            pa.map_(pa.utf8(), pa.date32()),
        ),
        ("variant", None),
        (array("variant"), None),
        ({"type": "udt", "class": "a.B", "sqlType": "long"}, None),
    ],
)
def test_spark_types(kind: Any, expected: pa.DataType | None) -> None:
    assert arrow_type(kind) == expected


@pytest.mark.parametrize(
    ("arrow", "kind", "given", "expected"),
    [
        (pa.int64(), "long", [1, None], [1, None]),
        (pa.uint8(), "short", [255], [255]),
        (pa.uint32(), "long", [2**32 - 1], [2**32 - 1]),
        (pa.uint64(), "decimal(20,0)", [2**64 - 1], [Decimal(2**64 - 1)]),
        (pa.float16(), "float", [np.float16(1.5)], [1.5]),
        (pa.large_utf8(), "string", ["a"], ["a"]),
        (pa.date64(), "date", [86_400_000], [datetime.date(1970, 1, 2)]),
        (pa.duration("s"), "interval day to second", [3], [datetime.timedelta(seconds=3)]),
        (pa.timestamp("ns"), "timestamp_ntz", [1_999], [datetime.datetime(1970, 1, 1, 0, 0, 0, 1)]),
        (pa.decimal128(5, 1), "decimal(5,1)", [Decimal("1.5")], [Decimal("1.5")]),
        (pa.list_(pa.float16(), 2), array("float"), [[1, 2], None], [[1.0, 2.0], None]),
        (pa.list_(pa.list_(pa.int8(), 1), 2), array(array("byte")), [[[1], [2]]], [[[1], [2]]]),
        (
            pa.list_(pa.struct({"a": pa.uint32(), "b": pa.large_utf8()}), 1),
            array(STRUCT),
            [[{"a": 1, "b": "x"}], None],
            [[{"a": 1, "b": "x"}], None],
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, pa.DataType) else None,
)
def test_results(arrow: pa.DataType, kind: Any, given: list[Any], expected: list[Any]) -> None:
    schema = pa.schema({"y": arrow})
    assert spark_type(schema.field("y")) == kind
    kept = pa.table({"x": range(len(given))})
    table = kept.append_column(
        "y",
        pa.array(given, pa.int64()).cast(arrow)
        if pa.types.is_date64(arrow)
        else pa.array(given, arrow),
    )
    (batch,) = as_batches(table, spark_results(schema))
    assert batch.schema.field("y").type == arrow_type(kind)
    assert batch.to_pydict() == {"x": list(range(len(given))), "y": expected}


def test_tensor_becomes_one_array_in_row_major_order() -> None:
    arrow = pa.fixed_shape_tensor(pa.float32(), (2, 2))
    storage = pa.array([[1, 2, 3, 4], None], arrow.storage_type)
    schema = pa.schema({"y": arrow})
    assert spark_type(schema.field("y")) == array("float")
    table = pa.table({"y": pa.ExtensionArray.from_storage(arrow, storage)})
    (batch,) = as_batches(table, spark_results(schema))
    assert batch["y"].to_pylist() == [[1.0, 2.0, 3.0, 4.0], None]


@pytest.mark.parametrize(
    "field",
    [
        pa.field("y", BFloat16()),
        pa.field("y", pa.uint16(), metadata={"ARROW:extension:name": "iskander.bfloat16"}),
        pa.field("y", pa.decimal256(50, 0)),
        pa.field("y", pa.time64("us")),
    ],
    ids=str,
)
def test_results_without_a_spark_type(field: pa.Field) -> None:
    with pytest.raises(ContractError, match=r"result `y` has the type .*for which Spark has none"):
        spark_fields([field])


def test_one_batch_of_several_chunks() -> None:
    table = pa.concat_tables([pa.table({"y": [1]}), pa.table({"y": [2]})])
    (batch,) = as_batches(table, spark_results(table.schema))
    assert batch["y"].to_pylist() == [1, 2]
