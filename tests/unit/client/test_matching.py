"""Columns of a table as a model's inputs: names, casts, passthrough, errors."""

from __future__ import annotations

import datetime
import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from iskander.arrow.types import BFloat16
from iskander.arrow.values import is_sent_as
from iskander.client.matching import Matching
from iskander.client.model import ModelDescription
from iskander.contract.column_types import parse_sent_type
from iskander.errors import ContractError


def model_of(
    inputs: dict[str, tuple[str, pa.DataType]],
    *,
    passthrough: Any = "none",
    ranked_within: tuple[str, ...] = (),
    outputs: tuple[str, ...] = ("score",),
) -> ModelDescription:
    """A model; `inputs` has the declared type and the type in the schema."""
    tree: dict[str, Any] = {}
    for name, (_, kind) in inputs.items():
        *heads, last = name.split(".")
        inner = tree
        for head in heads:
            inner = inner.setdefault(head, {})
        inner[last] = kind
    return ModelDescription(
        name="churn",
        version="1",
        ready=True,
        backend="onnx",
        max_batch_rows=1024,
        limits={"rows": 1024, "bytes": 1 << 20, "string_bytes": 1 << 20},
        versions=("1",),
        aliases={},
        input_schema=pa.schema(fields_of(tree)),
        output_schema=pa.schema([(name, pa.float32()) for name in outputs]),
        input_types={name: declared for name, (declared, _) in inputs.items()},
        passthrough=passthrough,
        ranked_within=ranked_within,
        metadata={},
    )


def fields_of(tree: dict[str, Any]) -> list[pa.Field]:
    return [
        pa.field(name, pa.struct(fields_of(each)) if isinstance(each, dict) else each)
        for name, each in tree.items()
    ]


def simple(kind: pa.DataType, declared: str = "", **options: Any) -> ModelDescription:
    text = declared or {"float": "float32", "double": "float64", "halffloat": "float16"}.get(
        str(kind), str(kind)
    )
    return model_of({"x": (text, kind)}, **options)


def batch_of(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch(
        {k: v if isinstance(v, pa.Array) else pa.array(v) for k, v in columns.items()}
    )


def match(model: ModelDescription, batch: pa.RecordBatch, **columns: str) -> pa.RecordBatch:
    matching = Matching(model, batch.schema, columns=columns)
    sent = matching.apply(batch)
    assert sent.schema == matching.schema
    sent.validate(full=True)
    return sent


def error_of(model: ModelDescription, batch: pa.RecordBatch, **columns: str) -> ContractError:
    with pytest.raises(ContractError) as raised:
        match(model, batch, **columns)
    assert raised.value.fields["model"] == "churn"
    return raised.value


IDS = {"user": ("int64", pa.int64()), "item": ("int64", pa.int64())}


# ---- Names


def test_matching_batch_is_the_same_object() -> None:
    batch = batch_of(item=[1], user=[2])
    assert match(model_of(IDS), batch) is batch


def test_other_columns_are_left_out() -> None:
    sent = match(model_of(IDS), batch_of(a=["x"], user=[1], b=[2.0], item=[3]))
    assert sent.to_pydict() == {"user": [1], "item": [3]}


def test_missing_column_is_named_with_the_nearest() -> None:
    error = error_of(model_of(IDS), batch_of(User_=[1], item=[2]))
    assert error.fields == {
        "model": "churn",
        "column": "user",
        "wanted": "int64",
        "nearest": "User_",
    }
    assert "column `user` is missing: wanted int64; the nearest is `User_`" in error.message


def test_nearest_name_is_found_without_regard_to_case() -> None:
    assert error_of(model_of(IDS), batch_of(USER=[1], item=[2])).fields["nearest"] == "USER"


def test_missing_column_without_a_similar_name() -> None:
    error = error_of(model_of(IDS), batch_of(zzz=[1], item=[2]))
    assert "nearest" not in error.fields


def test_all_problems_are_listed() -> None:
    error = error_of(model_of(IDS), batch_of(user=["a"]))
    assert "column `user`: wanted int64, got string" in error.message
    assert "column `item` is missing" in error.message
    assert (error.fields["column"], error.fields["got"]) == ("user", "string")


def test_data_without_columns_is_an_error() -> None:
    error = error_of(model_of(IDS), pa.RecordBatch.from_pylist([], pa.schema([])))
    assert "the data has no columns; wanted `user`, `item`" in error.message


def test_empty_batch_keeps_its_types() -> None:
    sent = match(
        model_of(IDS), batch_of(user=pa.array([], pa.int8()), item=pa.array([], pa.null()))
    )
    assert sent.schema.types == [pa.int64(), pa.int64()]
    assert sent.num_rows == 0


def two_of(name: str, *others: str) -> pa.RecordBatch:
    names = [name, name, *others]
    return pa.RecordBatch.from_arrays([pa.array([1])] * len(names), names)


def test_repeated_column_that_is_needed_is_an_error() -> None:
    error = error_of(model_of(IDS), two_of("user", "item"))
    assert "2 columns are named `user`, which the model needs once" in error.message
    assert error.fields["column"] == "user"


@pytest.mark.parametrize("passthrough", ["all", ("user",), "none"])
def test_repeated_input_is_listed_once(passthrough: Any) -> None:
    model = model_of(IDS, passthrough=passthrough)
    assert error_of(model, two_of("user", "item")).message.count("columns are named") == 1
    column = pa.array([{"age": 1, "clicks": 2.0}])
    batch = pa.RecordBatch.from_arrays([column, column], ["user", "user"])
    model = model_of(NESTED, passthrough=passthrough)
    assert error_of(model, batch).message.count("columns are named") == 1


def test_repeated_column_that_is_not_needed_is_left_out() -> None:
    assert match(model_of(IDS), two_of("a", "user", "item")).schema.names == ["user", "item"]


@pytest.mark.parametrize("passthrough", ["all", ("a",)])
def test_repeated_column_that_would_be_returned_is_an_error(passthrough: Any) -> None:
    error = error_of(model_of(IDS, passthrough=passthrough), two_of("a", "user", "item"))
    assert "2 columns are named `a`" in error.message


def test_columns_renames() -> None:
    sent = match(model_of(IDS), batch_of(who=[1], item=[2]), user="who")
    assert sent.to_pydict() == {"user": [1], "item": [2]}


def test_columns_exchanges_two_names() -> None:
    sent = match(model_of(IDS), batch_of(user=[1], item=[2]), user="item", item="user")
    assert sent.to_pydict() == {"item": [1], "user": [2]}


def test_columns_uses_one_column_twice() -> None:
    sent = match(model_of(IDS), batch_of(n=[1]), user="n", item="n")
    assert sent.to_pydict() == {"user": [1], "item": [1]}


def test_columns_with_a_missing_column_names_it() -> None:
    error = error_of(model_of(IDS), batch_of(whom=[1], item=[2]), user="who")
    assert (error.fields["column"], error.fields["nearest"]) == ("who", "whom")


@pytest.mark.parametrize("passthrough", ["all", "none", ("a",)])
def test_columns_with_an_unknown_input_is_an_error(passthrough: Any) -> None:
    model = model_of(IDS, passthrough=passthrough)
    error = error_of(model, batch_of(user=[1], item=[2]), users="user")
    assert "`columns` names `users`, which is no input; the nearest is `user`" in error.message


def test_batch_of_another_schema_is_an_error() -> None:
    matching = Matching(model_of(IDS), batch_of(user=[1], item=[2]).schema)
    with pytest.raises(ContractError, match="one schema"):
        matching.apply(batch_of(user=[1], item=[2.0]))


@pytest.mark.parametrize("is_changed", [False, True])
def test_batch_whose_fields_have_other_metadata_is_an_error(is_changed: bool) -> None:
    fields = [
        pa.field("item", pa.int64()),
        pa.field("user", pa.int8() if is_changed else pa.int64()),
    ]
    batch = pa.RecordBatch.from_pylist([{"item": 1, "user": 2}], pa.schema(fields))
    matching = Matching(model_of(IDS), batch.schema)
    other = pa.schema([fields[0].with_metadata({"unit": "A"}), fields[1]])
    with pytest.raises(ContractError, match="one schema, also in the metadata of fields"):
        matching.apply(pa.RecordBatch.from_arrays(batch.columns, schema=other))
    matching.apply(batch.replace_schema_metadata({"made": "today"}))


# ---- Passthrough


def test_all_other_columns_are_passed_through_in_order() -> None:
    batch = batch_of(a=["x"], user=[1], b=[2.0], item=[3])
    assert match(model_of(IDS, passthrough="all"), batch) is batch


def test_listed_columns_are_passed_through_if_present() -> None:
    model = model_of(IDS, passthrough=("b", "c"))
    assert match(model, batch_of(a=[1], user=[1], b=[2], item=[3])).schema.names == [
        "user",
        "b",
        "item",
    ]


def test_listed_column_is_renamed() -> None:
    sent = match(model_of(IDS, passthrough=("b",)), batch_of(user=[1], item=[3], z=[2]), b="z")
    assert sent.to_pydict() == {"user": [1], "item": [3], "b": [2]}


def test_column_of_a_renamed_input_is_not_passed_through() -> None:
    model = model_of(IDS, passthrough="all")
    sent = match(model, batch_of(who=[1], item=[2], z=[3]), user="who")
    assert sent.schema.names == ["user", "item", "z"]


def test_column_with_the_name_of_a_renamed_input_is_an_error() -> None:
    model = model_of(IDS, passthrough="all")
    error = error_of(model, batch_of(who=[1], user=[5], item=[2]), user="who")
    assert "column `user` cannot be returned: the input `user` is `who`" in error.message


def test_passed_through_column_with_the_name_of_a_result_is_an_error() -> None:
    error = error_of(model_of(IDS, passthrough="all"), batch_of(user=[1], item=[2], score=[0.5]))
    assert "column `score` would be returned and is also a result" in error.message


def test_columns_that_rows_are_ranked_within_are_sent() -> None:
    model = model_of(IDS, ranked_within=("group", ""))
    sent = match(model, batch_of(a=[1], user=[1], item=[2], group=["g"]))
    assert sent.schema.names == ["user", "item", "group"]
    error = error_of(model, batch_of(user=[1], item=[2]))
    assert error.fields["column"] == "group"


def test_group_column_that_is_an_input_is_sent_once() -> None:
    sent = match(model_of(IDS, ranked_within=("user",)), batch_of(user=[1], item=[2]))
    assert sent.schema.names == ["user", "item"]


# ---- Structs

NESTED = {"user.age": ("int64", pa.int64()), "user.clicks": ("float32", pa.float32())}


def struct_of(age: Any, clicks: Any, **others: Any) -> pa.RecordBatch:
    columns = {"age": age, "clicks": clicks, **others}
    return batch_of(user=pa.StructArray.from_arrays(list(columns.values()), list(columns)))


def test_struct_is_sent_as_it_is() -> None:
    batch = struct_of(pa.array([1]), pa.array([1.5], pa.float32()), more=pa.array(["x"]))
    assert match(model_of(NESTED), batch) is batch


def test_fields_of_a_struct_are_sent_as_columns_if_one_is_cast() -> None:
    batch = struct_of(pa.array([1, 2]), pa.array([1.5, 2.5]), more=pa.array(["x", "y"]))
    sent = match(model_of(NESTED, passthrough="all"), batch)
    assert sent.schema == pa.schema([("user.age", pa.int64()), ("user.clicks", pa.float32())])
    assert sent.to_pydict() == {"user.age": [1, 2], "user.clicks": [1.5, 2.5]}


def test_field_of_a_null_struct_is_null() -> None:
    kind = pa.struct([("age", pa.int32()), ("clicks", pa.float32())])
    batch = batch_of(user=pa.array([{"age": 1, "clicks": 2.0}, None], kind))
    assert match(model_of(NESTED), batch).to_pydict() == {
        "user.age": [1, None],
        "user.clicks": [2.0, None],
    }


def test_column_with_a_dot_in_its_name_is_preferred() -> None:
    batch = pa.record_batch({"user.age": [7], "user": pa.array([{"age": 1, "clicks": 2.0}])})
    assert match(model_of(NESTED), batch).to_pydict() == {"user.age": [7], "user.clicks": [2.0]}


def test_field_of_a_struct_is_an_input_of_another_name() -> None:
    batch = batch_of(p=pa.array([{"age": 3}]), c=pa.array([1.0], pa.float32()))
    sent = match(model_of(NESTED), batch, **{"user.age": "p.age", "user.clicks": "c"})
    assert sent.to_pydict() == {"user.age": [3], "user.clicks": [1.0]}


def test_missing_field_of_a_struct_is_named() -> None:
    batch = batch_of(user=pa.array([{"age": 1}]))
    assert error_of(model_of(NESTED), batch).fields["column"] == "user.clicks"


def test_repeated_struct_is_an_error() -> None:
    column = pa.array([{"age": 1, "clicks": 2.0}])
    batch = pa.RecordBatch.from_arrays([column, column], ["user", "user"])
    assert "2 columns are named `user`" in error_of(model_of(NESTED), batch).message


# ---- Casts without loss

DAY = datetime.date(2024, 2, 29)
MIDNIGHT = datetime.datetime(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)
SECONDS = datetime.timedelta(seconds=90)

KEPT: dict[str, tuple[pa.Array, pa.DataType, pa.DataType]] = {
    "int32 to int64": (pa.array([1, None, -5], pa.int32()), pa.int64(), pa.int64()),
    "int64 to int32": (pa.array([1, None, 2**31 - 1]), pa.int32(), pa.int32()),
    "int64 to uint8": (pa.array([0, 255]), pa.uint8(), pa.uint8()),
    "uint64 to int64": (pa.array([2**63 - 1], pa.uint64()), pa.int64(), pa.int64()),
    "bool to float16": (pa.array([True, None, False]), pa.float16(), pa.float16()),
    "bool to int64": (pa.array([True, False]), pa.int64(), pa.int64()),
    "int64 to bool": (pa.array([0, 1, None]), pa.bool_(), pa.bool_()),
    "float64 to bool": (pa.array([0.0, 1.0]), pa.bool_(), pa.bool_()),
    "float64 to float32": (pa.array([0.5, None, float("nan"), float("inf")]), pa.float32(), None),
    "float64 to float16": (pa.array([0.5, float("nan")]), pa.float16(), pa.float16()),
    "float16 to float32": (pa.array(np.array([0.1], np.float16)), pa.float32(), pa.float32()),
    "float16 to int32": (pa.array(np.array([7], np.float16)), pa.int32(), pa.int32()),
    "float16 to bool": (pa.array(np.array([1], np.float16)), pa.bool_(), pa.bool_()),
    "int64 to float32": (pa.array([2**24, 2**60, -(2**63)]), pa.float32(), pa.float32()),
    "int64 to float16": (pa.array([2048, 4096]), pa.float16(), pa.float16()),
    "float32 to int8": (pa.array([3.0, -128.0], pa.float32()), pa.int8(), pa.int8()),
    "decimal to float64": (pa.array([Decimal("0.5"), None]), pa.float64(), pa.float64()),
    "decimal to int64": (pa.array([Decimal("5.00")]), pa.int64(), pa.int64()),
    "decimal to float16": (pa.array([Decimal("0.5")]), pa.float16(), pa.float16()),
    "decimal to decimal": (pa.array([Decimal("1.50")]), pa.decimal128(9, 1), pa.decimal128(9, 1)),
    "int64 to decimal": (pa.array([7]), pa.decimal128(38, 9), pa.decimal128(38, 9)),
    "int64 to a short decimal": (pa.array([7, None, -3]), pa.decimal128(10, 2), None),
    "uint64 to decimal": (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0), None),
    "int8 to a wide decimal": (pa.array([7], pa.int8()), pa.decimal256(60, 30), None),
    "lists of integers to decimals": (pa.array([[7, 8]]), pa.list_(pa.decimal128(10, 2)), None),
    "decimal to float32": (pa.array([Decimal("0.5"), Decimal("1.5")]), pa.float32(), None),
    "float64 to decimal": (pa.array([0.25]), pa.decimal128(38, 9), pa.decimal128(38, 9)),
    "date to timestamp": (pa.array([DAY, None]), pa.timestamp("us"), pa.timestamp("us")),
    "midnight to date": (pa.array([DAY]).cast(pa.timestamp("ns")), pa.date32(), pa.date32()),
    "date64 to date32": (pa.array([DAY], pa.date64()), pa.date32(), pa.date32()),
    "ns to us": (pa.array([NOON], pa.timestamp("ns")), pa.timestamp("us"), pa.timestamp("us")),
    "ns with a zone to us": (
        pa.array([NOON], pa.timestamp("ns", "Asia/Tokyo")),
        pa.timestamp("us"),
        pa.timestamp("us", "Asia/Tokyo"),
    ),
    "time32 to time64": (pa.array([5], pa.time32("s")), pa.time64("us"), pa.time64("us")),
    "durations": (pa.array([SECONDS], pa.duration("us")), pa.duration("s"), pa.duration("s")),
    "null to int64": (pa.nulls(2), pa.int64(), pa.int64()),
    "null to text": (pa.nulls(2), pa.utf8(), pa.utf8()),
    "null to lists": (pa.nulls(2), pa.list_(pa.float32(), 4), pa.list_(pa.float32(), 4)),
    "fixed-size bytes": (pa.array([b"ab"], pa.binary(2)), pa.binary(), pa.binary()),
    "uuid": (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"a" * 16], pa.binary(16))),
        pa.binary(),
        pa.binary(),
    ),
    "json": (
        pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1"])), pa.utf8(), pa.utf8()
    ),
    "dictionary": (pa.array([1, 2, 1, None]).dictionary_encode(), pa.float32(), pa.float32()),
    "runs": (
        pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array([2])),
        pa.float32(),
        pa.float32(),
    ),
    "bool8": (
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 2], pa.int8())),
        pa.int32(),
        pa.int32(),
    ),
    "lists of one length": (
        pa.array([[1.0, 2.0], None, [3.0, 4.0]]),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.float32(), 2),
    ),
    "large lists": (
        pa.array([[1, 2]], pa.large_list(pa.int64())),
        pa.list_(pa.int32(), 2),
        pa.list_(pa.int32(), 2),
    ),
    "nested lists": (
        pa.array([[[1.0, 2.0], [3.0, 4.0]]]),
        pa.list_(pa.list_(pa.float32(), 2), 2),
        pa.list_(pa.list_(pa.float32(), 2), 2),
    ),
    "elements of sized lists": (
        pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)),
        pa.list_(pa.float32(), 2),
        pa.list_(pa.float32(), 2),
    ),
    "sized lists as lists": (
        pa.array([[1, 2]], pa.list_(pa.int64(), 2)), pa.list_(pa.int64()), pa.list_(pa.int64())
    ),
    "elements of lists": (
        pa.array([[1.0], [], None]), pa.list_(pa.float32()), pa.list_(pa.float32())
    ),
    "elements of list views": (
        pa.array([[1.0], [], None, [2.0, 3.0]], pa.list_view(pa.float64())),
        pa.list_(pa.float32()),
        pa.list_(pa.float32()),
    ),
    "text in lists": (
        pa.array([["a", "b"]], pa.list_(pa.large_utf8())),
        pa.list_(pa.utf8(), 2),
        pa.list_(pa.large_utf8(), 2),
    ),
    "lists of nothing": (
        pa.array([[], []], pa.list_(pa.null())), pa.list_(pa.int64()), pa.list_(pa.int64())
    ),
    "nested lists as a tensor": (
        pa.array([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]]),
        pa.fixed_shape_tensor(pa.float32(), (2, 3)),
        pa.list_(pa.list_(pa.float32(), 3), 2),
    ),
    "tensor": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float64(), (2, 2)),
            pa.array([[1.0, 2.0, 3.0, 4.0]], pa.list_(pa.float64(), 4)),
        ),
        pa.list_(pa.list_(pa.float32(), 2), 2),
        pa.fixed_shape_tensor(pa.float32(), (2, 2)),
    ),
}  # fmt: skip


def declared_of(kind: pa.DataType) -> str:
    """The manifest's name of a type."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return (
            f"fixed_shape_tensor<{declared_of(kind.value_type)}>[{', '.join(map(str, kind.shape))}]"
        )
    if pa.types.is_fixed_size_list(kind):
        return f"fixed_size_list<{declared_of(kind.value_type)}>[{kind.list_size}]"
    if pa.types.is_list(kind):
        return f"list<{declared_of(kind.value_type)}>"
    if pa.types.is_date(kind):
        return "date32" if pa.types.is_date32(kind) else "date64"
    names = {"float": "float32", "double": "float64", "halffloat": "float16", "string": "utf8"}
    return names.get(str(kind), str(kind))


@pytest.mark.parametrize("name", KEPT)
def test_values_that_survive_are_cast(name: str) -> None:
    array, wanted, target = KEPT[name]
    model = simple(wanted, declared_of(wanted))
    sent = match(model, batch_of(x=array))
    assert sent.schema.field("x").type == (target or wanted)
    given = np.array(values_of(array), dtype=object).tolist()
    assert repr(normal(values_of(sent["x"]))) == repr(normal(given))
    assert is_sent_as(sent.schema.field("x").type, parse_sent_type(declared_of(wanted)))
    # The same for a slice.
    part = match(model, batch_of(x=array).slice(1))
    assert repr(normal(values_of(part["x"]))) == repr(normal(given[1:]))


def values_of(array: pa.Array) -> Any:
    if array.type == pa.uuid() or isinstance(array.type, pa.FixedShapeTensorType):
        array = array.storage
    return array.to_pylist()


def normal(value: Any) -> Any:
    """Equal values of different types as one value; lists flat."""
    if isinstance(value, list):
        flat = [normal(each) for each in value]
        nested = any(isinstance(each, list) for each in flat)
        if nested and all(isinstance(each, list) for each in flat):
            return list(itertools.chain.from_iterable(flat))
        return flat
    if hasattr(value, "to_pydatetime"):
        value = value.to_pydatetime()
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day)
    if isinstance(value, bool | int | float | Decimal):
        return float(value)
    return value


# ---- Values that would change

CHANGED: dict[str, tuple[Any, pa.DataType, int]] = {
    "int32 too large": (pa.array([1, None, 2**31]), pa.int32(), 2),
    "int32 too small": (pa.array([1, -(2**31) - 1]), pa.int32(), 1),
    "negative as unsigned": (pa.array([-1]), pa.uint64(), 0),
    "uint64 above int64": (pa.array([1, 2**63], pa.uint64()), pa.int64(), 1),
    "fraction to integer": (pa.array([1.0, 2.5]), pa.int64(), 1),
    "NaN to integer": (pa.array([1.0, float("nan")]), pa.int64(), 1),
    "float64 to float32": (pa.array([0.5, None, 0.1]), pa.float32(), 2),
    "float64 above float32": (pa.array([1e39]), pa.float32(), 0),
    "float32 to float16": (pa.array([0.5, 0.1], pa.float32()), pa.float16(), 1),
    "int64 to float32": (pa.array([2**24, 2**24 + 1]), pa.float32(), 1),
    "int64 to float64": (pa.array([2**53 + 1]), pa.float64(), 0),
    "largest int64 to float64": (pa.array([0, 2**63 - 1]), pa.float64(), 1),
    "largest uint64 to float32": (pa.array([2**64 - 1], pa.uint64()), pa.float32(), 0),
    "int64 to float16": (pa.array([2048, 2049]), pa.float16(), 1),
    "int64 above float16": (pa.array([10**6]), pa.float16(), 0),
    "2 to bool": (pa.array([0, 1, 2]), pa.bool_(), 2),
    "fraction to bool": (pa.array([0.5]), pa.bool_(), 0),
    "NaN to bool": (pa.array([0.0, float("nan")]), pa.bool_(), 1),
    "decimal to float": (pa.array([Decimal("12345678901234567890.123456789")]), pa.float64(), 0),
    "decimal to integer": (pa.array([Decimal("1.0"), Decimal("1.5")]), pa.int64(), 1),
    "decimal to fewer digits": (pa.array([Decimal("1.25")]), pa.decimal128(9, 1), 0),
    "small float to decimal": (pa.array([0.5, 1e-12]), pa.decimal128(38, 9), 1),
    "NaN to decimal": (pa.array([float("nan")]), pa.decimal128(38, 9), 0),
    "noon to date": (pa.array([MIDNIGHT, NOON], pa.timestamp("us")), pa.date32(), 1),
    "noon in a zone to date": (pa.array([NOON], pa.timestamp("us", "Asia/Tokyo")), pa.date32(), 0),
    "ns to us": (pa.array([1000, 1001], pa.timestamp("ns")), pa.timestamp("us"), 1),
    "duration": (pa.array([1000, 1], pa.duration("ms")), pa.duration("s"), 1),
    "time": (pa.array([1], pa.time64("us")), pa.time32("s"), 0),
    "other length": (pa.array([[1.0, 2.0], [1.0], [2.0]]), pa.list_(pa.float32(), 2), 1),
    "element": (
        pa.array([[1.0, 2.0], None, [1.0, 0.1]], pa.list_(pa.float64(), 2)),
        pa.list_(pa.float32(), 2),
        2,
    ),
    "element of a list": (pa.array([[], [1.0], [2.0, 0.1], [1.0]]), pa.list_(pa.float32()), 2),
    "dictionary": (pa.array([0.5, 0.1, 0.5]).dictionary_encode(), pa.float32(), 1),
    "infinity to integer": (pa.array([float("inf")]), pa.int64(), 0),
    "float above int8": (pa.array([128.0]), pa.int8(), 0),
    "integer to few digits": (pa.array([1, 10**8]), pa.decimal128(10, 2), 1),
    "integer above the digits of a decimal": (pa.array([7, 2**60]), pa.decimal128(38, 30), 1),
    "integer to hundreds": (pa.array([700, 7]), pa.decimal128(10, -2), 1),
    "decimal above the precision": (pa.array([Decimal("123.4")]), pa.decimal128(3, 1), 0),
    "decimal to float32": (pa.array([Decimal("0.500000000"), Decimal("0.100000002")]),
        pa.float32(), 1),
    "decimal of many places to float64": (pa.array([Decimal("0.1")], pa.decimal128(38, 18)),
        pa.float64(), 0),
    "invalid UTF-8": (pa.array([b"ab", b"\xff\xfe"], pa.binary(2)), pa.utf8(), 1),
    "date above ns": (pa.array([0, 200_000], pa.int32()).cast(pa.date32()), pa.timestamp("ns"), 1),
}  # fmt: skip
NEAR = {
    "fraction to integer", "float64 to float32", "float32 to float16", "int64 to float32",
    "int64 to float64", "largest int64 to float64", "largest uint64 to float32",
    "int64 to float16", "decimal to float", "decimal to integer", "decimal to fewer digits",
    "small float to decimal", "noon to date", "noon in a zone to date", "ns to us", "duration",
    "time", "element", "element of a list", "dictionary", "decimal to float32",
    "decimal of many places to float64",
}  # fmt: skip
"""Values of `CHANGED` that a cast with a loss turns into near ones."""


@pytest.mark.parametrize("name", CHANGED)
def test_value_that_would_change_is_named(name: str) -> None:
    array, wanted, row = CHANGED[name]
    batch = batch_of(x=array)
    matching = Matching(simple(wanted, declared_of(wanted)), batch.schema)
    with pytest.raises(ContractError, match="cannot represent") as raised:
        matching.apply(batch, first_row=1000)
    fields = raised.value.fields
    assert ("exactly" in raised.value.message) == (name in NEAR)
    assert ("cast the column to accept the loss" in raised.value.message) == (name in NEAR)
    assert fields["wanted"] == declared_of(wanted)
    assert (fields["row"], fields["column"], fields["model"]) == (1000 + row, "x", "churn")
    assert f"column `x`: row {1000 + row} has " in raised.value.message
    assert fields["wanted"]
    assert fields["got"]


VALUES = {
    "0.1": (pa.array([0.1]), pa.float32()),
    "2": (pa.array([2]).dictionary_encode(), pa.bool_()),
    "1970-01-01 00:00:00.000001001": (pa.array([1001], pa.timestamp("ns")), pa.timestamp("us")),
    "1970-01-01 00:00:00.000001001Z": (
        pa.array([1001], pa.timestamp("ns", "Asia/Tokyo")),
        pa.timestamp("us"),
    ),
    "[1,2]": (pa.array([[1, 2]]), pa.list_(pa.int64(), 3)),
}


@pytest.mark.parametrize("text", VALUES)
def test_error_has_the_value(text: str) -> None:
    array, wanted = VALUES[text]
    error = error_of(simple(wanted, declared_of(wanted)), batch_of(x=array))
    assert f"row 0 has {text}, which" in error.message


def test_long_value_is_shortened() -> None:
    array = pa.array([[0.1] * 1000], pa.list_(pa.float64(), 1000))
    error = error_of(
        simple(pa.list_(pa.float32(), 1000), "fixed_size_list<float32>[1000]"), batch_of(x=array)
    )
    assert len(error.message) < 400


WANTED = {
    "utf8": (pa.utf8(), pa.array([b"\xff"], pa.binary(1)), pa.array([1])),
    "date32": (pa.date32(), pa.array([NOON]), pa.array([1])),
    "fixed_size_list<float32>[2]": (
        pa.list_(pa.float32(), 2),
        pa.array([[0.1, 1.0]]),
        pa.array([1]),
    ),
    "number": (pa.float32(), pa.array([Decimal("0.1")], pa.decimal128(38, 18)), pa.array(["1"])),
}


@pytest.mark.parametrize("declared", WANTED)
def test_wanted_is_the_declared_type_in_all_errors(declared: str) -> None:
    kind, bad_value, bad_type = WANTED[declared]
    model = simple(kind, declared)
    errors = [error_of(model, batch_of(x=each)) for each in (bad_value, bad_type)]
    errors.append(error_of(model, batch_of(y=[1])))
    assert [error.fields["wanted"] for error in errors] == [declared] * 3
    assert all(declared in error.message for error in errors)


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_decimal_becomes_the_nearest_float_or_is_named(kind: pa.DataType) -> None:
    random = np.random.default_rng(7)
    dtype = kind.to_pandas_dtype()
    kept = 0
    for _ in range(300):
        places = int(random.integers(0, 19))
        number = Decimal(int(random.integers(0, 10 ** random.integers(1, 18)))).scaleb(-places)
        nearest = float(dtype(str(number)))
        batch = batch_of(x=pa.array([number], pa.decimal128(38, places)))
        if round(Decimal(nearest), places) == number:
            assert match(simple(kind), batch)["x"].to_pylist() == [nearest]
            kept += 1
        else:
            assert error_of(simple(kind), batch).fields["row"] == 0
    assert 20 < kept < 300


@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 1023])
def test_first_bad_row_is_found_at_any_place(rows: int) -> None:
    for bad in {0, rows // 3, rows // 2, rows - 1}:
        values = np.zeros(rows)
        values[bad:] = 0.1
        assert error_of(simple(pa.float32()), batch_of(x=values)).fields["row"] == bad


# ---- Types without a cast

REJECTED = {
    "text to number": (pa.array(["1"]), pa.int64()),
    "number to text": (pa.array([1]), pa.utf8()),
    "integer to timestamp": (pa.array([1]), pa.timestamp("us")),
    "timestamp to integer": (pa.array([NOON]), pa.int64()),
    "time to duration": (pa.array([1], pa.time64("us")), pa.duration("us")),
    "text to date": (pa.array(["2024-01-01"]), pa.date32()),
    "struct": (pa.array([{"a": 1}]), pa.int64()),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.utf8(), pa.int8())), pa.int64()),
    "scalar to list": (pa.array([1.0]), pa.list_(pa.float32(), 1)),
    "list to scalar": (pa.array([[1.0]]), pa.float32()),
    "other size": (pa.array([[1.0]], pa.list_(pa.float32(), 1)), pa.list_(pa.float32(), 2)),
    "flat for nested": (
        pa.array([[1.0] * 4], pa.list_(pa.float32(), 4)),
        pa.list_(pa.list_(pa.float32(), 2), 2),
    ),
    "permuted tensor": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (2, 2), permutation=[1, 0]),
            pa.array([[1.0] * 4], pa.list_(pa.float32(), 4)),
        ),
        pa.fixed_shape_tensor(pa.float32(), (2, 2)),
    ),
    "bfloat16 to float32": (
        pa.ExtensionArray.from_storage(BFloat16(), pa.array([1], pa.uint16())), pa.float32()
    ),
    "bfloat16 to uint16": (
        pa.ExtensionArray.from_storage(BFloat16(), pa.array([1], pa.uint16())), pa.uint16()
    ),
    "uint16 to bfloat16": (pa.array([1], pa.uint16()), BFloat16()),
    "union": (
        pa.UnionArray.from_dense(
            pa.array([0], pa.int8()), pa.array([0], pa.int32()), [pa.array([1])]
        ),
        pa.int64(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_type_without_a_lossless_cast_is_an_error(name: str) -> None:
    array, wanted = REJECTED[name]
    declared = "bfloat16" if wanted == BFloat16() else declared_of(wanted)
    error = error_of(simple(wanted, declared), batch_of(x=array))
    assert error.fields["wanted"] == declared
    assert error.fields["got"]
    assert f"column `x`: wanted {declared}, got " in error.message


def test_bfloat16_without_its_python_type_is_recognized() -> None:
    """A client without the server's package sees the storage, and the name in the metadata."""
    metadata = {"ARROW:extension:name": "iskander.bfloat16"}
    field = pa.field("x", pa.uint16(), metadata=metadata)
    model = simple(BFloat16(), "bfloat16")
    object.__setattr__(model, "input_schema", pa.schema([field]))
    batch = pa.RecordBatch.from_arrays([pa.array([1], pa.uint16())], schema=pa.schema([field]))
    assert match(model, batch) is batch
    assert match(simple(pa.int64(), "number"), batch) is batch
    assert error_of(simple(pa.uint16(), "uint16"), batch).fields["got"] == "bfloat16"


# ---- The server's rules

ACCEPTED_TYPES = [
    pa.null(), pa.bool_(), pa.bool8(), pa.int8(), pa.int64(), pa.uint16(), pa.float16(),
    pa.float32(), pa.float64(), pa.utf8(), pa.large_utf8(), pa.string_view(), pa.binary(),
    pa.binary_view(), pa.binary(4), pa.date32(), pa.date64(), pa.time32("s"), pa.time64("ns"),
    pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.duration("ms"), pa.decimal128(10, 2),
    pa.decimal256(10, 2), BFloat16(), pa.uuid(), pa.struct([("a", pa.int8())]),
]  # fmt: skip
DECLARED: dict[str, pa.DataType] = {
    "number": pa.float32(),
    "bool": pa.bool_(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "utf8": pa.utf8(),
    "binary": pa.binary(),
    "bfloat16": BFloat16(),
    "date": pa.date32(),
    "date64": pa.date64(),
    "time": pa.time64("us"),
    "time32[s]": pa.time32("s"),
    "timestamp": pa.timestamp("us"),
    "timestamp[us]": pa.timestamp("us"),
    "duration": pa.duration("us"),
    "decimal": pa.decimal128(38, 9),
    "decimal128(10, 2)": pa.decimal128(10, 2),
}


def shaped(leaf: pa.DataType) -> list[pa.DataType]:
    kinds = [leaf, pa.list_(leaf), pa.large_list(leaf), pa.list_view(leaf), pa.list_(leaf, 2)]
    kinds += [pa.list_(pa.list_(leaf, 2), 3), pa.list_(pa.list_(leaf, 2)), pa.list_(pa.list_(leaf))]
    if not isinstance(leaf, pa.BaseExtensionType):
        kinds += [pa.dictionary(pa.int8(), leaf), pa.list_(pa.dictionary(pa.int8(), leaf))]
        kinds += [pa.run_end_encoded(pa.int32(), leaf)]
    if pa.types.is_floating(leaf) or pa.types.is_integer(leaf):
        tensor = pa.fixed_shape_tensor(leaf, (3, 2))
        kinds += [tensor, pa.fixed_shape_tensor(leaf, (2,)), pa.list_(tensor)]
        kinds += [pa.fixed_shape_tensor(leaf, (3, 2), permutation=[1, 0])]
    return kinds


def declared_shapes(name: str, leaf: pa.DataType) -> dict[str, pa.DataType]:
    found = {
        name: leaf,
        f"list<{name}>": pa.list_(leaf),
        f"fixed_size_list<{name}>[2]": pa.list_(leaf, 2),
        f"fixed_size_list<fixed_size_list<{name}>[2]>[3]": pa.list_(pa.list_(leaf, 2), 3),
        f"list<fixed_size_list<{name}>[2]>": pa.list_(pa.list_(leaf, 2)),
    }
    if name in ("int64", "float32"):
        found[f"fixed_shape_tensor<{name}>[3, 2]"] = pa.fixed_shape_tensor(leaf, (3, 2))
    return found


@pytest.mark.parametrize("name", DECLARED)
def test_types_that_the_server_accepts_are_sent_as_they_are_and_all_others_become_such(
    name: str,
) -> None:
    cast_count = 0
    for declared, wanted in declared_shapes(name, DECLARED[name]).items():
        sent = parse_sent_type(declared)
        for kind in itertools.chain.from_iterable(map(shaped, ACCEPTED_TYPES)):
            schema = pa.schema([("x", kind)])
            try:
                target = Matching(simple(wanted, declared), schema).schema.field("x").type
            except ContractError:
                assert not is_sent_as(kind, sent), (declared, kind)
                continue
            assert is_sent_as(target, sent), (declared, kind, target)
            assert (target == kind) == is_sent_as(kind, sent), (declared, kind, target)
            cast_count += target != kind
    assert cast_count or name == "bfloat16"


NUMBERS = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMBERS += ["float16", "float32", "float64"]


@pytest.mark.parametrize(("source", "target"), list(itertools.product(NUMBERS, NUMBERS)))
def test_random_numbers_are_cast_exactly_or_named(source: str, target: str) -> None:
    random = np.random.default_rng([NUMBERS.index(source), NUMBERS.index(target)])
    arrow = pa.bool_() if target == "bool" else getattr(pa, target)()
    for _ in range(20):
        numbers = random_numbers(random, source)
        wanted = [exact(value, target) for value in numbers]
        bad = next((row for row, fits in enumerate(wanted) if not fits), None)
        mask = random.random(len(numbers)) < 0.2
        if bad is not None:
            mask[bad] = False
        batch = batch_of(x=pa.array(numbers, mask=mask))
        bad = next((r for r, fits in enumerate(wanted) if not fits and not mask[r]), None)
        if bad is None:
            sent = match(simple(arrow, target), batch)
            assert sent["x"].null_count == int(mask.sum())
            for row, value in enumerate(sent["x"].to_pylist()):
                if not mask[row]:
                    given = numbers[row].item()
                    assert value == given or (math.isnan(value) and math.isnan(given))
        else:
            assert error_of(simple(arrow, target), batch).fields["row"] == bad


def random_numbers(random: np.random.Generator, dtype_name: str) -> np.ndarray:
    """Numbers of all magnitudes, among them the limits of other types."""
    rows = int(random.integers(1, 12))
    bits = random.integers(0, 65)
    whole = [int(random.integers(0, 2**63)) >> int(random.integers(0, 63)) for _ in range(rows)]
    edges = [0, 1, 127, 128, 255, 256, 2048, 2**24, 2**24 + 2, 2**31, 2**53, 2**62, 2**63 - 1]
    numbers = [edges[random.integers(len(edges))] if bits % 2 else each for each in whole]
    if random.random() < 0.5:
        numbers = [number % 2 for number in numbers]
    dtype = np.dtype(dtype_name)
    if dtype.kind == "b":
        return np.array([number % 2 == 0 for number in numbers])
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            found = np.array([float(number) for number in numbers]).astype(dtype)
        special = [0.5, -1.0, np.nan, np.inf, 0.1]
        picks = random.random(rows) < 0.1
        found[picks] = np.array(special, dtype)[random.integers(0, 5, int(picks.sum()))]
        return found
    limits = np.iinfo(dtype)
    signs = [1 if limits.min == 0 or random.random() < 0.7 else -1 for _ in numbers]
    return np.array(
        [max(min(s * n, limits.max), limits.min) for s, n in zip(signs, numbers, strict=True)],
        dtype,
    )


def exact(value: Any, dtype_name: str) -> bool:
    """Whether a number has an equal value of a type, by Python's exact comparisons."""
    dtype, number = np.dtype(dtype_name), value.item()
    if dtype.kind == "b":
        return bool(number in (0, 1))
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if isinstance(number, float) and not math.isfinite(number):
            return False
        return bool(int(number) == number and limits.min <= int(number) <= limits.max)
    with np.errstate(over="ignore"):
        near = np.array(number).astype(np.float64).astype(dtype).item()
    return bool(near == number or (math.isnan(number) and math.isnan(near)))


@pytest.mark.parametrize(
    ("kind", "declared", "near"),
    [
        (pa.float32(), "float32", float(np.float32(5.123456789012345))),
        (pa.float32(), "number", float(np.float32(5.123456789012345))),
        (pa.float16(), "float16", float(np.float16(5.123456789012345))),
        (pa.float64(), "float64", 5.123456789012345),
    ],
)
def test_decimal_text_becomes_the_nearest_number(
    kind: pa.DataType, declared: str, near: float
) -> None:
    batch = batch_of(x=pa.array([5.123456789012345, None, math.inf, math.nan]))
    matching = Matching(simple(kind, declared), batch.schema, decimals={"x"})
    sent = matching.apply(batch)
    assert sent.schema == matching.schema and sent.schema.field("x").type == kind
    found = sent["x"].to_pylist()
    assert found[:3] == [near, None, math.inf] and math.isnan(found[3])


def test_decimal_text_beyond_the_range_is_an_error() -> None:
    batch = batch_of(x=[1.5, 1e39])
    matching = Matching(simple(pa.float32(), "number"), batch.schema, decimals={"x"})
    with pytest.raises(ContractError, match=r"`x`: row 6 has 1e\+39, which number cannot repre"):
        matching.apply(batch, first_row=5)


def test_decimal_text_for_an_integer_is_an_error() -> None:
    batch = batch_of(x=[1.0, 30.5])
    matching = Matching(simple(pa.int32()), batch.schema, decimals={"x"})
    with pytest.raises(ContractError, match=r"`x`: row 1 has 30\.5, .*int32.*got float64"):
        matching.apply(batch)
