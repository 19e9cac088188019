"""Conversion of columns of every type to tensors, and rejected columns.

pyarrow writes a batch, the stream codec reads it, and the tensors are compared with NumPy.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.codecs import decode
from support.random_examples import up_to

from iskander.arrow import ipc
from iskander.arrow.request_schema import request_schema
from iskander.arrow.types import BFloat16
from iskander.config.schema import LimitsConfig
from iskander.contract.compile import compile_contract
from iskander.contract.dtypes import BY_ARROW
from iskander.contract.graph import Dimension, Graph, GraphTensor
from iskander.contract.manifest import InputColumn, Manifest, OutputColumn, Passthrough
from iskander.contract.processing.strings import split_strings
from iskander.contract.tensors import Contract
from iskander.errors import ContractError, IskanderError, LimitExceeded, ManifestError
from iskander.gateway.protocols.flight.codec import ParsedBatch, StreamCodec
from iskander.gateway.protocols.flight.plan import Plan

LIMITS = LimitsConfig()
OUTPUT = OutputColumn(tensor="y", column="y", type="float32")


def tensor(name: str, element: str, *trailing: Dimension) -> GraphTensor:
    """Return an input of a graph; the element type has its name in a manifest."""
    return GraphTensor(name, BY_ARROW[element].onnx, ("rows", *trailing))


def contract_of(
    *entries: InputColumn, passthrough: Passthrough = "all", **tensors: tuple[Any, ...]
) -> Contract:
    """Compile a contract from entries and from graph inputs `name=(element, *trailing)`."""
    inputs = tuple(tensor(name, *shape) for name, shape in tensors.items())
    graph = Graph(inputs, (tensor("y", "float32"),))
    return compile_contract(Manifest(1, entries, (OUTPUT,), passthrough), graph)


def entry(**keys: Any) -> InputColumn:
    return InputColumn(**({"tensor": "x", "column": "x"} | keys))


def packed(*columns: str, **keys: Any) -> InputColumn:
    return InputColumn(tensor="x", columns=columns, **keys)


def read(contract: Contract, batch: pa.RecordBatch, limits: LimitsConfig = LIMITS) -> ParsedBatch:
    """Return a batch as the gateway parses it."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    codec: StreamCodec | None = None
    parsed = None
    for message in pa.ipc.MessageReader.open_stream(sink.getvalue()):
        header = bytes(message.metadata)
        if codec is None:
            codec = StreamCodec(Plan(header, contract, limits), limits)
        else:
            body = memoryview(bytes(message.body) if message.body else b"")
            parsed = decode(codec, memoryview(header), body, b"")
    assert parsed is not None
    return parsed


def tensors_of(contract: Contract, parsed: ParsedBatch) -> dict[str, Any]:
    """Return the tensors of a request by name, with strings as bytes."""
    buffers = [parsed.body[start:stop] for start, stop in parsed.tensors]
    if parsed.portions:
        buffers = parsed.portions[0].tensors
    joined = iter(buffers[len(contract.inputs) :])
    actual: dict[str, Any] = {}
    for spec, buffer in zip(contract.inputs, buffers, strict=False):
        count = parsed.rows * spec.elements
        shape = (parsed.rows, *spec.shape)
        if spec.is_string:
            array: Any = np.array(split_strings(buffer, next(joined), count), object)
        elif spec.type.dtype_name == "bool":
            raw = np.frombuffer(buffer, np.uint8)
            array = np.unpackbits(raw, count=count, bitorder="little").astype(bool)
        else:
            array = np.frombuffer(buffer, spec.type.dtype.numpy)
        assert len(array) == count
        actual[spec.tensor] = array.reshape(shape)
    return actual


def convert(contract: Contract, **columns: pa.Array) -> dict[str, Any]:
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    return tensors_of(contract, read(contract, batch))


def rejection(contract: Contract, **columns: pa.Array) -> str:
    with pytest.raises(ContractError) as caught:
        convert(contract, **columns)
    return caught.value.message


def numbers(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """Return a slice from the middle of an array, so that wrong offsets read other values."""
    return pa.array([values[0], *values, values[-1]], kind).slice(1, len(values))


SIGNED = [(pa.int8(), "int8"), (pa.int16(), "int16"), (pa.int32(), "int32"), (pa.int64(), "int64")]
UNSIGNED = [(pa.uint8(), "uint8"), (pa.uint16(), "uint16"), (pa.uint32(), "uint32")]
UNSIGNED += [(pa.uint64(), "uint64")]
FLOATS = [(pa.float16(), "float16"), (pa.float32(), "float32"), (pa.float64(), "float64")]


@pytest.mark.parametrize(("kind", "name"), [*SIGNED, *UNSIGNED, *FLOATS])
def test_numbers_of_every_type_with_nulls_are_filled_and_masked(kind: Any, name: str) -> None:
    """Fill values replace nulls, and the mask marks their positions."""
    values = [np.dtype(name).type(each) for each in (1, 2, 3)]
    array = numbers(kind, [values[0], None, values[1], None, values[2], None])
    contract = contract_of(entry(fill=7, nulls="mask", mask="m"), x=(name,), m=("bool",))
    actual = convert(contract, x=array)
    assert actual["x"].tolist() == [1, 7, 2, 7, 3, 7] and actual["x"].dtype == name
    assert actual["m"].tolist() == [True, False] * 3


@pytest.mark.parametrize(("kind", "name"), FLOATS)
def test_nulls_become_nan(kind: Any, name: str) -> None:
    actual = convert(
        contract_of(entry(nulls="nan"), x=(name,)), x=numbers(kind, [None, np.float16(2)])
    )
    assert np.isnan(actual["x"][0]) and actual["x"][1] == 2


def test_booleans_of_both_encodings() -> None:
    contract = contract_of(entry(fill=True), x=("bool",))
    assert convert(contract, x=numbers(pa.bool_(), [False, None]))["x"].tolist() == [False, True]
    small = pa.ExtensionArray.from_storage(pa.bool8(), numbers(pa.int8(), [0, 5, None]))
    assert convert(contract, x=small)["x"].tolist() == [False, True, True]
    plain = contract_of(entry(type="bool"), x=("bool",))
    assert not plain.sources
    assert convert(plain, x=small.slice(0, 2))["x"].tolist() == [False, True]


def test_bfloat16_extension_type() -> None:
    halves = pa.array([0x3F80, 0x4000, 0x4040], pa.uint16())
    array = pa.ExtensionArray.from_storage(BFloat16(), halves)
    same = contract_of(entry(type="bfloat16", fill=2.0), x=("bfloat16",))
    assert convert(same, x=array)["x"].tolist() == [0x3F80, 0x4000, 0x4040]
    wide = contract_of(entry(type="bfloat16", cast=True), x=("float32",))
    assert convert(wide, x=array)["x"].tolist() == [1.0, 2.0, 3.0]
    narrow = contract_of(entry(type="float32", cast=True, nulls="nan"), x=("bfloat16",))
    actual = convert(narrow, x=pa.array([1.0, None, float("inf"), 1.00390625], pa.float32()))["x"]
    assert actual.tolist() == [0x3F80, 0x7FC0, 0x7F80, 0x3F80]
    assert "row 0" in rejection(
        contract_of(entry(type="int32", cast=True), x=("bfloat16",)), x=pa.array([257], pa.int32())
    )


@pytest.mark.parametrize(
    ("kind", "values", "target", "row"),
    [
        (pa.int64(), [1, 2**31], "int32", 1),
        (pa.int64(), [-(2**31) - 1], "int32", 0),
        (pa.int8(), [0, 0, -1], "uint64", 2),
        (pa.uint64(), [2**63], "int64", 0),
        (pa.int64(), [2**53, 2**53 + 1], "float64", 1),
        (pa.int64(), [2**63 - 1], "float64", 0),
        (pa.int32(), [2**24, 2**24 + 1], "float32", 1),
        (pa.int32(), [65_520], "float16", 0),
        (pa.float64(), [0.5], "int64", 0),
        (pa.float64(), [1.0, float("nan")], "int8", 1),
        (pa.float64(), [2.0**63], "int64", 0),
        (pa.float64(), [-1.0], "uint8", 0),
        (pa.float64(), [1e39], "float32", 0),
        (pa.int8(), [0, 1, 2], "bool", 2),
        (pa.float32(), [0.5], "bool", 0),
    ],
)
def test_lossy_cast_is_rejected(kind: Any, values: Any, target: str, row: int) -> None:
    contract = contract_of(entry(cast=True), x=(target,))
    message = rejection(contract, x=numbers(kind, values))
    assert f"column `x`: row {row} has" in message and target in message


@pytest.mark.parametrize(
    ("kind", "values", "target"),
    [
        (pa.int64(), [-(2**31), 2**31 - 1], "int32"),
        (pa.uint64(), [2**63 - 1], "int64"),
        (pa.int64(), [2**53, -(2**62)], "float64"),
        (pa.float64(), [-(2.0**63), 2.0**62], "int64"),
        (pa.bool_(), [True, False], "float32"),
        (pa.int8(), [0, 1], "bool"),
        (pa.float64(), [0.1, float("nan"), float("-inf")], "float32"),
    ],
)
def test_exact_cast_is_accepted(kind: Any, values: Any, target: str) -> None:
    actual = convert(contract_of(entry(cast=True), x=(target,)), x=pa.array(values, kind))["x"]
    np.testing.assert_array_equal(actual, np.array(values, target))


def test_memory_of_a_null_is_not_checked_by_a_cast() -> None:
    """The memory of a null has no defined value and is not checked."""
    buffers = [pa.py_buffer(b"\x05"), pa.py_buffer(np.array([1, 2**40, 3]))]
    array = pa.Array.from_buffers(pa.int64(), 3, buffers)
    assert convert(contract_of(entry(cast=True, fill=9), x=("int8",)), x=array)["x"].tolist() == [
        1, 9, 3,
    ]  # fmt: skip


def test_column_is_not_cast_without_the_manifest_setting() -> None:
    contract = contract_of(entry(fill=0), x=("int32",))
    assert "column `x`: wanted int32, got int64" in rejection(contract, x=pa.array([1], pa.int64()))
    exact = contract_of(entry(type="int64", cast=True), x=("int32",))
    assert "wanted int64, got int16" in rejection(exact, x=pa.array([1], pa.int16()))


def test_column_of_null_type_is_rejected() -> None:
    contract = contract_of(entry(nulls="nan"), x=("float32",))
    assert "got null, which has no values" in rejection(contract, x=pa.nulls(3))


def test_rejection_of_nulls_names_the_first_row() -> None:
    array = pa.array([1, 2, None, None], pa.int64())
    plain = contract_of(entry(type="int64"), x=("int64",))
    assert "2 nulls" in rejection(plain, x=array)
    cast = contract_of(entry(cast=True), x=("float32",))
    assert "2 nulls, the first in row 2" in rejection(cast, x=array)


def test_columns_are_packed_in_manifest_order() -> None:
    contract = contract_of(packed("b", "a", "c", cast=True, nulls="nan"), x=("float32", 3))
    actual = convert(
        contract,
        a=pa.array([1, 2, None], pa.int16()),
        c=pa.array([True, None, False]),
        b=pa.array([0.5, 1.5, 2.5], pa.float64()),
        extra=pa.array(["x", "y", "z"]),
    )["x"]
    nan = float("nan")
    np.testing.assert_array_equal(actual, np.array([[0.5, 1, 1], [1.5, 2, nan], [2.5, nan, 0]]))


def test_packed_columns_share_one_mask() -> None:
    contract = contract_of(
        packed("a", "b", nulls="mask", mask="m", fill=-1), x=("int64", 2), m=("float32", 2)
    )
    actual = convert(contract, a=pa.array([1, None]), b=pa.array([3, 4]))
    assert actual["x"].tolist() == [[1, 3], [-1, 4]]
    assert actual["m"].tolist() == [[1.0, 1.0], [0.0, 1.0]]


def test_packed_strings() -> None:
    contract = contract_of(packed("a", "b", fill="?"), x=("utf8", 2))
    actual = convert(contract, a=pa.array(["1", None]), b=pa.array(["33", "4"], pa.large_utf8()))
    assert actual["x"].tolist() == [[b"1", b"33"], [b"?", b"4"]]


STRUCT = pa.struct([("age", pa.int32()), ("place", pa.struct([("zip.code", pa.int32())]))])


def test_struct_fields_by_path_with_nulls_at_every_level() -> None:
    array = pa.array(
        [
            None,
            {"age": 1, "place": {"zip.code": 10}},
            None,
            {"age": None, "place": None},
            {"age": 4, "place": {"zip.code": None}},
        ],
        STRUCT,
    ).slice(1)
    contract = contract_of(
        entry(column="user.age", fill=-1),
        InputColumn(tensor="z", column="user.place.zip.code", fill=-2),
        x=("int32",),
        z=("int32",),
    )
    actual = convert(contract, user=array)
    assert actual["x"].tolist() == [1, -1, -1, 4] and actual["z"].tolist() == [10, -2, -2, -2]
    plain = contract_of(entry(column="user.age", type="int32"), x=("int32",))
    assert "2 nulls" in rejection(plain, user=array.slice(1))
    assert convert(plain, user=array.slice(0, 1))["x"].tolist() == [1]
    assert convert(plain, **{"user.age": pa.array([5], pa.int32())})["x"].tolist() == [5]
    assert "column `user.age` is missing" in rejection(plain, user=pa.array([1]))
    assert "column `user.age` is missing" in rejection(
        plain, user=pa.array([{"name": 1}], pa.struct([("name", pa.int32())]))
    )


def test_dictionaries_and_run_ends_are_decoded() -> None:
    contract = contract_of(entry(fill=0.0, cast=True), x=("float64",))
    encoded = pa.array([5, None, 7, 5], pa.int32()).dictionary_encode()
    assert convert(contract, x=encoded.slice(1))["x"].tolist() == [0, 7, 5]
    runs = pa.RunEndEncodedArray.from_arrays([2, 3, 5], pa.array([1.5, None, 3.0]))
    assert convert(contract, x=runs)["x"].tolist() == [1.5, 1.5, 0, 3, 3]
    assert convert(contract, x=runs.slice(1, 3))["x"].tolist() == [1.5, 0, 3]
    plain = contract_of(entry(type="int64"), x=("int64",))
    runs = pa.RunEndEncodedArray.from_arrays([1, 3], pa.array([8, 9]))
    assert convert(plain, x=runs)["x"].tolist() == [8, 9, 9]
    text = contract_of(entry(type="utf8"), x=("utf8",))
    runs = pa.RunEndEncodedArray.from_arrays([1, 3], pa.array(["a", "bc"]))
    assert convert(text, x=runs)["x"].tolist() == [b"a", b"bc", b"bc"]


def test_run_end_encoded_text_is_limited_before_it_is_decoded() -> None:
    contract = contract_of(entry(type="utf8"), x=("utf8",))
    runs = pa.RunEndEncodedArray.from_arrays([1000], pa.array(["a" * 1000]))
    limits = LimitsConfig(string_bytes=100_000)
    with pytest.raises(LimitExceeded, match="1000000"):
        read(contract, pa.record_batch([runs], names=["x"]), limits)


MOMENTS = [
    dt.datetime(2024, 2, 29, 12, 30, 15, tzinfo=dt.UTC),
    None,
    dt.datetime(1969, 12, 31, tzinfo=dt.UTC),
]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "Asia/Tokyo"])
def test_timestamps_of_every_unit(unit: str, zone: str | None) -> None:
    array = pa.array([each and each.timestamp() for each in MOMENTS], pa.float64())
    array = pa.array([each and int(each.timestamp()) for each in MOMENTS], pa.timestamp("s"))
    array = array.cast(pa.timestamp(unit, zone))
    full = contract_of(entry(type="timestamp", unit="s", fill=0), x=("int64",))
    assert convert(full, x=array)["x"].tolist() == [1709209815, 0, -86400]
    hours = contract_of(entry(type="timestamp", unit="h", nulls="nan"), x=("float64",))
    assert convert(hours, x=array)["x"][0] == 1709209815 / 3600
    days = contract_of(entry(type="timestamp", unit="d", fill=0), x=("int64",))
    assert "row 0 has" in rejection(days, x=array)
    fine = contract_of(entry(type=f"timestamp[{unit}]", unit="ns", fill=0), x=("int64",))
    assert convert(fine, x=array)["x"][2] == -86_400 * 10**9


def test_dates_times_and_durations() -> None:
    def converted(kind: str, unit: str, target: str, array: pa.Array) -> list[Any]:
        contract = contract_of(entry(type=kind, unit=unit), x=(target,))
        actual: list[Any] = convert(contract, x=array)["x"].tolist()
        return actual

    day = [dt.date(1970, 1, 11)]
    assert converted("date", "d", "int32", pa.array(day, pa.date32())) == [10]
    assert converted("date", "h", "float32", pa.array(day, pa.date64())) == [240]
    assert converted("date32", "s", "int64", pa.array(day, pa.date32())) == [864_000]
    assert converted("time", "m", "float64", pa.array([90], pa.time32("s"))) == [1.5]
    assert converted("time32[ms]", "ms", "int32", pa.array([90], pa.time32("ms"))) == [90]
    assert converted("time64[ns]", "us", "int64", pa.array([9000], pa.time64("ns"))) == [9]
    assert converted("duration", "s", "float64", pa.array([-1500], pa.duration("ms"))) == [-1.5]
    far = contract_of(entry(type="timestamp", unit="ns"), x=("int64",))
    assert "row 0" in rejection(far, x=pa.array([2**40], pa.timestamp("s")))
    wrong = contract_of(entry(type="timestamp[s]", unit="s"), x=("int64",))
    assert "wanted timestamp[s]" in rejection(wrong, x=pa.array([1], pa.timestamp("ms")))


@pytest.mark.parametrize(
    "kind", [pa.decimal32(9, 2), pa.decimal64(18, 2), pa.decimal128(38, 2), pa.decimal256(60, 2)]
)
def test_decimals_of_every_width(kind: pa.DataType) -> None:
    array = pa.array([Decimal("9.99"), Decimal("-12.34"), None, Decimal("5.00")], kind).slice(1)
    value = contract_of(entry(**{"type": "decimal", "conversion": "number"}, nulls="nan"),
                        x=("float64",))  # fmt: skip
    np.testing.assert_array_equal(convert(value, x=array)["x"], [-12.34, float("nan"), 5])
    cents = contract_of(entry(type=str(kind), conversion="unscaled", fill=0), x=("int64",))
    assert convert(cents, x=array)["x"].tolist() == [-1234, 0, 500]
    full = contract_of(entry(type="decimal", conversion="number", fill=1), x=("int32",))
    assert convert(full, x=array.slice(1))["x"].tolist() == [1, 5]
    assert "row 0 has -1234" in rejection(full, x=array)


def test_decimals_of_more_than_64_bits() -> None:
    array = pa.array([Decimal(2) ** 80], pa.decimal128(38, 2))
    value = contract_of(entry(type="decimal", conversion="number"), x=("float64",))
    assert convert(value, x=array)["x"].tolist() == [2.0**80]
    full = contract_of(entry(type="decimal", conversion="number"), x=("int64",))
    assert "over 64 bits" in rejection(full, x=array)


def test_dates_and_decimals_in_lists() -> None:
    moments = contract_of(
        entry(type="fixed_size_list<timestamp>[2]", unit="s", fill=-1), x=("int64", 2)
    )
    array = pa.array([[1, 2], [None, 4]], pa.list_(pa.timestamp("s"), 2))
    assert convert(moments, x=array)["x"].tolist() == [[1, 2], [-1, 4]]
    shaped = pa.fixed_shape_tensor(pa.timestamp("s"), [2])
    array = pa.ExtensionArray.from_storage(shaped, array.slice(0, 1))
    assert convert(moments, x=array)["x"].tolist() == [[1, 2]]
    kind = pa.decimal128(5, 1)
    prices = contract_of(
        entry(type="fixed_size_list<decimal>[2]", conversion="number", fill=0.5),
        x=("float64", 2),
    )
    array = pa.array([[Decimal("1.5"), None], None], pa.list_(kind, 2))
    assert convert(prices, x=array)["x"].tolist() == [[1.5, 0.5], [0.5, 0.5]]
    ragged = contract_of(
        entry(type="list<decimal>", conversion="number", max_length=2), x=("float64", "n")
    )
    array = pa.array([[Decimal("1.5")], []], pa.list_(kind))
    assert convert(ragged, x=array)["x"].tolist() == [[1.5, 0], [0, 0]]


def test_dictionary_of_lists_is_rejected() -> None:
    """A short message could expand to the longest list in every row."""
    contract = contract_of(entry(type="list<int64>", max_length=2), x=("int64", "n"))
    array = pa.DictionaryArray.from_arrays(pa.array([0, 0]), pa.array([[1, 2]]))
    assert "wanted list<int64>, got dictionary" in rejection(contract, x=array)


def test_fixed_size_lists_are_cast_and_filled_per_element() -> None:
    contract = contract_of(
        entry(type="fixed_size_list<int32>[2]", cast=True, nulls="mask", mask="m", fill=0.5),
        x=("float32", 2),
        m=("int8", 2),
    )
    array = pa.array([[9, 9], [1, None], None, [3, 4]], pa.list_(pa.int32(), 2)).slice(1)
    actual = convert(contract, x=array)
    assert actual["x"].tolist() == [[1, 0.5], [0.5, 0.5], [3, 4]]
    assert actual["m"].tolist() == [[1, 0], [0, 0], [1, 1]]
    shaped = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), array.slice(2))
    assert convert(contract, x=shaped)["x"].tolist() == [[3, 4]]


LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]
ROWS = [[9], [1, 2, 3], [], None, [4], [None, 6], [7, 8, 9, 10]]


@pytest.mark.parametrize("kind", LISTS)
def test_ragged_rows_are_padded_with_mask_and_lengths(kind: Any) -> None:
    array = pa.array(ROWS, kind(pa.int32())).slice(1, 5)
    contract = contract_of(
        entry(max_length=4, padding=-1, nulls="mask", fill=-2, mask="m", lengths="n"),
        x=("int32", "long"),
        m=("bool", "long"),
        n=("int64",),
    )
    actual = convert(contract, x=array)
    assert actual["x"].tolist() == [
        [1, 2, 3, -1], [-1] * 4, [-1] * 4, [4, -1, -1, -1], [-2, 6, -1, -1],
    ]  # fmt: skip
    assert actual["m"].sum(axis=1).tolist() == [3, 0, 0, 1, 1]
    assert actual["n"].tolist() == [3, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("truncate", "expected"), [("head", [7, 8]), ("tail", [9, 10]), ("refuse", None)]
)
@pytest.mark.parametrize("kind", LISTS)
def test_long_rows_are_truncated_or_rejected(
    truncate: Any, expected: list[int] | None, kind: Any
) -> None:
    array = pa.array([[1], [7, 8, 9, 10]], kind(pa.float32()))
    contract = contract_of(entry(max_length=2, truncate=truncate), x=("float32", 2))
    if expected is None:
        assert (
            "row 1 has 4 elements, limit 2 (`max_length` in the manifest; 1 of 2 rows)"
            in rejection(contract, x=array)
        )
    else:
        assert convert(contract, x=array)["x"].tolist() == [[1, 0], expected]


def test_ragged_errors_name_the_row_of_the_batch() -> None:
    contract = contract_of(entry(max_length=3, cast=True), x=("int8", 3))
    array = pa.array([[1], [], [1, 2, 300]], pa.list_(pa.int64()))
    assert "row 2 has 300" in rejection(contract, x=array)
    array = pa.array([[1], [], [1, None]], pa.list_(pa.int64()))
    assert "row 2" in rejection(contract, x=array)
    array = pa.array([[1], None], pa.list_(pa.int64()))
    assert "1 nulls, the first in row 1" in rejection(contract, x=array)


def test_ragged_points_text_and_dictionaries() -> None:
    points = contract_of(
        entry(type="list<fixed_size_list<float32>[2]>", max_length=2, mask="m"),
        x=("float32", "n", 2),
        m=("float32", "n"),
    )
    array = pa.array([[[1, 2]], [[3, 4], [5, 6]]], pa.list_(pa.list_(pa.float32(), 2)))
    actual = convert(points, x=array)
    assert actual["x"].tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]
    assert actual["m"].tolist() == [[1, 0], [1, 1]]
    message = contract_of(entry(max_length=2, padding="-", fill="?"), x=("utf8", 2))
    for kind in (pa.large_utf8(), pa.string_view(), pa.utf8()):
        text = pa.array([["a"], [], ["b", None]], pa.list_(kind))
        assert convert(message, x=text)["x"].tolist() == [[b"a", b"-"], [b"-", b"-"], [b"b", b"?"]]
    codes = contract_of(entry(max_length=2), x=("int64", 2))
    child = pa.array([5, 7, 5], pa.int64()).dictionary_encode()
    array = pa.ListArray.from_arrays([0, 1, 3], child)
    assert convert(codes, x=array)["x"].tolist() == [[5, 0], [7, 5]]


def test_padded_size_is_limited_before_it_is_allocated() -> None:
    contract = contract_of(entry(max_length=1 << 20), x=("float32", "n"))
    array = pa.array([[]] * 100, pa.list_(pa.float32()))
    with pytest.raises(LimitExceeded, match="bytes"):
        convert(contract, x=array)


def test_shared_elements_of_list_views_are_counted_per_view() -> None:
    contract = contract_of(entry(max_length=4096, truncate="head"), x=("int8", "n"))
    series, starts = pa.array([7] * 4096, pa.int8()), [0] * 4000
    views = pa.ListViewArray.from_arrays(starts, [2000] * 4000, series)
    with pytest.raises(LimitExceeded, match="bytes"):
        convert(contract, x=views)
    windows = pa.ListViewArray.from_arrays([0, 1, 0], [3, 2, 1], pa.array([1, 2, 3], pa.int8()))
    contract = contract_of(entry(type="list<int8>"), x=("int8", 3))
    assert convert(contract, x=windows)["x"].tolist() == [[1, 2, 3], [2, 3, 0], [1, 0, 0]]


def test_request_schema_lists_the_columns_of_the_contract() -> None:
    contract = contract_of(
        packed("user.age", "user.rate", cast=True),
        entry(tensor="l", column="l", type="list<timestamp>", unit="s", max_length=2),
        entry(tensor="d", column="d", type="decimal64(9, 2)", conversion="number"),
        entry(tensor="t", column="t", type="time32[ms]", unit="s"),
        x=("float32", 2), l=("int64", "n"), d=("float64",), t=("float32",),
    )  # fmt: skip
    assert request_schema(contract) == pa.schema(
        {
            "user": pa.struct({"age": pa.float32(), "rate": pa.float32()}),
            "l": pa.list_(pa.timestamp("us")),
            "d": pa.decimal64(9, 2),
            "t": pa.time32("ms"),
        }
    )
    plain = contract_of(entry(column="a.b", type="int64"), x=("int64",))
    assert request_schema(plain) == pa.schema({"a.b": pa.int64()})


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_request_schema_keeps_a_column_with_the_name_of_a_struct(names: tuple[str, str]) -> None:
    contract = contract_of(
        *(InputColumn(tensor=f"t{at}", column=name, fill=0) for at, name in enumerate(names)),
        t0=("int64",),
        t1=("int64",),
    )
    assert request_schema(contract) == pa.schema({name: pa.int64() for name in names})


def test_batch_without_rows() -> None:
    contract = contract_of(entry(max_length=4, cast=True), x=("float32", 4))
    batch = pa.record_batch([pa.array([], pa.list_(pa.int8()))], names=["x"])
    assert read(contract, batch).rows == 0


def test_passthrough_columns_do_not_change_the_tensors() -> None:
    """Passthrough columns are kept, with and without an extent."""
    contract = contract_of(entry(fill=0), x=("int64",))
    for extra in (pa.array([1.5, None]), pa.array([["a"], None]), None):
        columns = {"x": pa.array([1, None])} | ({} if extra is None else {"aside": extra})
        batch = pa.record_batch(list(columns.values()), names=list(columns))
        parsed = read(contract, batch)
        assert parsed.rows == 2 and tensors_of(contract, parsed)["x"].tolist() == [1, 0]


def test_input_column_can_be_passed_through() -> None:
    contract = contract_of(entry(type="utf8"), passthrough=("x",), x=("utf8",))
    for kind in (pa.utf8(), pa.large_utf8(), pa.string_view()):
        assert convert(contract, x=pa.array(["a", "bc"], kind))["x"].tolist() == [b"a", b"bc"]


@given(
    rows=st.lists(st.none() | st.lists(st.integers(-99, 99) | st.none(), max_size=9), max_size=12),
    most=st.integers(1, 9),
    truncate=st.sampled_from(["head", "tail"]),
    kind=st.sampled_from(LISTS),
    cut=st.integers(0, 3),
)
@settings(max_examples=up_to(150), deadline=None)
def test_lengths_recover_the_ragged_rows(
    rows: Any, most: int, truncate: Any, kind: Any, cut: int
) -> None:
    """The lengths recover the sent rows, truncated as declared."""
    array = pa.array(rows, kind(pa.int16())).slice(min(cut, len(rows)))
    contract = contract_of(
        entry(
            type="list<int16>", cast=True, nulls="nan", max_length=most, truncate=truncate,
            lengths="n", padding=1000.0,
        ),
        x=("float32", "long"), n=("uint8",),
    )  # fmt: skip
    if not len(array):
        return
    actual = convert(contract, x=array)
    for row, padded, length in zip(array.to_pylist(), actual["x"], actual["n"], strict=True):
        full = row or []
        expected = full[-most:] if truncate == "tail" else full[:most]
        unpadded = [None if np.isnan(each) else int(each) for each in padded[:length]]
        assert unpadded == expected and (padded[length:] == 1000).all()


REJECTED: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("needs either `column` or `columns`", {"columns": ("a",)}, ("float32",)),
    ("needs a `unit`", {"type": "timestamp"}, ("int64",)),
    ("the key `unit`", {"type": "int64", "unit": "s"}, ("int64",)),
    ("needs an `as`", {"type": "decimal"}, ("float64",)),
    ("precision and scale", {"type": "decimal", "conversion": "unscaled"}, ("int64",)),
    ("the key `as`", {"type": "int64", "conversion": "number"}, ("int64",)),
    ("the key `cast`", {"type": "date", "unit": "d", "cast": True}, ("int64",)),
    ("only `cast = true`", {"type": "int64", "fill": 0}, ("float32",)),
    ("cannot be cast", {"type": "utf8", "cast": True}, ("float32",)),
    ("no `fill`", {"nulls": "fill"}, ("float32",)),
    ("the key `fill`", {"nulls": "nan", "fill": 1.0}, ("float32",)),
    ("has no NaN", {"nulls": "nan"}, ("int32",)),
    ("no `mask` tensor", {"nulls": "mask"}, ("int32",)),
    ("the key `mask`", {"mask": "m"}, ("int32",)),
    ("is nullable", {"nullable": True}, ("int32",)),
    ("fill 1.5", {"fill": 1.5}, ("int32",)),
    ("fill 300", {"fill": 300}, ("uint8",)),
    ("fill 'a'", {"fill": "a"}, ("float32",)),
    ("padding True", {"type": "list<int8>", "max_length": 2, "padding": True}, ("int8", 2)),
    ("the key `max_length`", {"type": "int8", "max_length": 2}, ("int8",)),
    ("needs a `max_length`", {"type": "list<int8>"}, ("int8", "n")),
    ("second axis is 3", {"type": "list<int8>", "max_length": 2}, ("int8", 3)),
    ("list of lists", {"type": "list<list<int8>>", "max_length": 2}, ("int8", "n")),
    ("the key `one_hot`", {"one_hot": True}, ("int64",)),
    ("has the shape", {"fill": 1, "type": "fixed_size_list<int8>[2]"}, ("int8", 3)),
    ("is not in the graph", {"nulls": "mask", "mask": "none"}, ("int8",)),
]


@pytest.mark.parametrize(("message", "keys", "shape"), REJECTED)
def test_inconsistent_entry_is_rejected(
    message: str, keys: dict[str, Any], shape: tuple[Any, ...]
) -> None:
    tensors = {"x": shape} | ({"m": ("bool",)} if keys.get("mask") == "m" else {})
    with pytest.raises(ManifestError) as caught:
        contract_of(entry(**keys), **tensors)
    assert message in caught.value.message


def test_error_names_the_column() -> None:
    with pytest.raises(IskanderError) as caught:
        convert(contract_of(entry(cast=True), x=("int8",)), x=pa.array([300]))
    assert caught.value.to_wire()["column"] == "x"


def test_header_of_a_batch_without_columns_is_read() -> None:
    """All columns of the batch are inputs, so no column remains."""
    empty = pa.RecordBatch.from_arrays([], schema=pa.schema([])).serialize()
    header = ipc.header_of(empty)
    assert ipc.read_batch(header, ipc.read_message(header)).nodes == ()


def test_integers_are_looked_up_by_their_decimal_text() -> None:
    contract = contract_of(
        entry(type="int64", cast=True, vocabulary="zips.txt", fill="none"), x=("int64",)
    )
    actual = convert(contract, x=pa.array([1, None, -30]))
    assert actual["x"].tolist() == [b"1", b"none", b"-30"]
    with pytest.raises(ManifestError, match="makes text of whole numbers"):
        contract_of(entry(type="float32", cast=True, vocabulary="a.txt"), x=("int64",))
