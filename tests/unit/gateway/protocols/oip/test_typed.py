"""Typed contents of OIP requests: datatypes, encodings, limits and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from iskander._generated import oip_pb2
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import DTYPES
from iskander.contract.processing.strings import body_to_strings
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import LimitExceeded, MalformedInput
from iskander.foundation.varint import encode_varint
from iskander.gateway.protocols.oip import typed as oip_typed
from iskander.gateway.protocols.oip.typed import (
    AT_ONCE_BYTES,
    CONTENTS,
    FIELDS,
    FIELDS_SPARE,
    are_slow,
    typed_tensors,
)
from iskander.gateway.protocols.tensors import Tensor

RAW_ONLY = {"FP16", "BF16"}
Contents = oip_pb2.InferTensorContents
ROWS = 1000
CONTRACT = Contract(
    inputs=(
        TensorSpec("x", "x", ColumnType("int64"), ()),
        TensorSpec("words", "words", ColumnType("binary"), ()),
    ),
    outputs=(),
)


def field_of(datatype: str) -> str:
    return CONTENTS[FIELDS[datatype].number][0]


def read(datatype: str, contents: Any, count: int) -> memoryview:
    """Returns the data of a tensor of `count` elements, read from a message or its bytes."""
    raw = contents if isinstance(contents, bytes) else contents.SerializeToString()
    described = [("x", datatype, (count,))]
    typed = {0: memoryview(raw)}
    (tensor,) = typed_tensors(described, typed, CONTRACT, LimitsConfig(rows=ROWS))
    return tensor.data


def test_fields_match_the_protocol() -> None:
    described = Contents.DESCRIPTOR.fields
    names = {number: name for number, (name, _) in CONTENTS.items()}
    assert {each.number: each.name for each in described} == names


def test_every_datatype_has_a_field_or_is_raw_only() -> None:
    assert {dtype.oip for dtype in DTYPES} <= FIELDS.keys() | RAW_ONLY


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.oip not in RAW_ONLY | {"BYTES"}])
def test_typed_contents_equal_raw_bytes(dtype: Any) -> None:
    """Includes both ends of the range."""
    numpy = np.dtype(dtype.numpy)
    if numpy.kind in "iu":
        limits = np.iinfo(numpy)
        values = [0, 1, limits.min, limits.max]
    else:
        values = [True, False] if numpy.kind == "b" else [0.0, -1.5, float("inf"), 1e-300]
    contents = Contents(**{field_of(dtype.oip): values})
    expected = np.array(values, numpy)
    if dtype.oip == "FP32":
        expected = np.array(contents.fp32_contents, numpy)
    assert bytes(read(dtype.oip, contents, len(values))) == expected.tobytes()


@pytest.mark.parametrize(
    ("datatype", "values"), [("FP32", [1.5, 2]), ("FP64", [1.5, 2]), ("BOOL", [True, False])]
)
def test_packed_fixed_width_contents_are_not_copied(datatype: str, values: Sequence[float]) -> None:
    raw = bytearray(Contents(**{field_of(datatype): values}).SerializeToString())
    described, typed = [("x", datatype, (2,))], {0: memoryview(raw)}
    (actual,) = typed_tensors(described, typed, CONTRACT, LimitsConfig())
    raw[:] = b"\xff" * len(raw)
    assert set(actual.data) == {255}


def test_strings_are_converted_to_the_body_layout() -> None:
    strings = [b"ab", b"", b"\x00\xff"]
    actual = read("BYTES", Contents(bytes_contents=strings), 3)
    assert body_to_strings(actual, 3) == strings
    assert bytes(read("BYTES", b"", 0)) == bytes(4)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT8", 128),
        ("INT8", -129),
        ("INT16", 1 << 15),
        ("UINT8", 256),
        ("UINT16", 1 << 16),
    ],
)
def test_value_out_of_range_is_rejected(datatype: str, value: int) -> None:
    with pytest.raises(MalformedInput, match=f"`x`: a value is out of range for {datatype}"):
        read(datatype, Contents(**{field_of(datatype): [0, value]}), 2)


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "", "FP128", "int8"])
def test_datatype_without_typed_contents_is_rejected(datatype: str) -> None:
    with pytest.raises(MalformedInput, match="send its raw bytes"):
        read(datatype, Contents(fp32_contents=[1]), 1)


@pytest.mark.parametrize("more", [{}, {"fp32_contents": [1]}])
def test_elements_in_a_wrong_field_are_rejected(more: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput, match="FP32 uses `fp32_contents`, got `fp64_contents`"):
        read("FP32", Contents(fp64_contents=[1], **more), 1)
    with pytest.raises(MalformedInput, match="BYTES uses `bytes_contents`, got `fp64_contents`"):
        read("BYTES", Contents(fp64_contents=[1]), 1)


@pytest.mark.parametrize("piece_bytes", [10, 11, 64, 1 << 20])
@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32", "UINT64"])
def test_numbers_of_every_length_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, datatype: str, piece_bytes: int
) -> None:
    """Each piece ends at the end of a number, for every piece size."""
    monkeypatch.setattr(oip_typed, "PIECE_BYTES", piece_bytes)
    limits = np.iinfo(datatype.lower())
    powers = [1 << power for power in range(63)]
    values = [each - 1 for each in powers] + powers + [-each for each in powers]
    values = [each for each in values if limits.min <= each <= limits.max] + [limits.max]
    contents = Contents(**{field_of(datatype): values})
    expected = np.array(values, datatype.lower()).tobytes()
    assert bytes(read(datatype, contents, len(values))) == expected


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_any_numbers_equal_their_raw_bytes(values: list[int]) -> None:
    raw = read("INT64", Contents(int64_contents=values), len(values))
    assert np.frombuffer(raw, np.int64).tolist() == values


FIVE_AND_SEVEN = {
    "packed": b"\x12\x02\x05\x07",
    "unpacked": b"\x10\x05\x10\x07",
    "two packed fields": b"\x12\x01\x05\x12\x01\x07",
    "packed and unpacked": b"\x12\x01\x05\x10\x07",
    "with an empty packed field": b"\x12\x01\x05\x12\x00\x10\x07",
    "with a wrong wire type in another field": b"\x30\x05\x12\x02\x05\x07",
    "overlong varints": b"\x12\x04\x85\x00\x87\x00",
    "with a fixed32 in the same field": b"\x15abcd\x12\x02\x05\x07",
    "with another empty field": b"\x0a\x00\x12\x02\x05\x07",
}


@pytest.mark.parametrize("encoding", FIVE_AND_SEVEN)
@pytest.mark.parametrize("unknown", [b"", b"\xfa\x01\x02\xff\xff", b"\xf8\x01\xff\x01"])
def test_numbers_are_read_in_every_encoding(unknown: bytes, encoding: str) -> None:
    """Also with unknown fields before and after the numbers."""
    written = FIVE_AND_SEVEN[encoding]
    assert list(Contents.FromString(written).int_contents) == [5, 7]
    for raw in (unknown + written, written + unknown):
        assert bytes(read("INT8", raw, 2)) == b"\x05\x07"


@pytest.mark.parametrize(
    ("datatype", "written", "value"),
    [
        ("INT32", b"\x12\x05\xff\xff\xff\xff\x0f", -1),
        ("INT8", b"\x12\x05\xfe\xff\xff\xff\x0f", -2),
        ("INT32", b"\x12\x0a" + b"\xff" * 9 + b"\x01", -1),
        ("UINT32", b"\x22\x0a" + b"\xff" * 9 + b"\x01", (1 << 32) - 1),
        ("INT32", b"\x12\x05\x85\x80\x80\x80\x10", 5),
    ],
)
def test_numbers_are_truncated_to_the_width_of_their_field(
    datatype: str, written: bytes, value: int
) -> None:
    """As in protobuf."""
    assert list(getattr(Contents.FromString(written), field_of(datatype))) == [value]
    dtype = np.dtype(datatype.lower())
    assert np.frombuffer(read(datatype, written, 1), dtype).tolist() == [value]


@pytest.mark.parametrize("written", [b"\x0a\x03\x02\x00\x01", b"\x0a\x04\x80\x01\x00\x01"])
def test_nonzero_values_are_true(written: bytes) -> None:
    assert list(Contents.FromString(written).bool_contents) == [True, False, True]
    assert bytes(read("BOOL", written, 3)) == b"\x01\x00\x01"


def test_floats_in_several_fields_are_joined() -> None:
    written = b"\x32\x04abcd" + b"\x35efgh"
    assert bytes(read("FP32", written, 2)) == b"abcdefgh"


@pytest.mark.parametrize("datatype", FIELDS)
def test_zero_elements_are_read_for_every_datatype(datatype: str) -> None:
    assert not any(read(datatype, Contents(), 0))


MALFORMED = {
    "a truncated value": ("INT8", b"\x12\x05\x05"),
    "a key without a value": ("INT8", b"\x12"),
    "a truncated length": ("INT8", b"\x12\x85"),
    "a truncated number": ("INT8", b"\x12\x02\x05\x87"),
    "a number split over two fields": ("INT8", b"\x12\x01\x85\x12\x01\x07"),
    "a truncated float": ("FP32", b"\x32\x06abcdef"),
    "a group": ("INT8", b"\x13\x14"),
    "field number 0": ("INT8", b"\x00\x05"),
    "an overlong key": ("INT8", b"\x92\x80\x80\x80\x80\x00\x01\x05"),
    "a field number above the maximum": ("INT8", b"\x80\x80\x80\x80\x10\x05"),
    "truncated strings": ("BYTES", b"\x42\x05ab"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_invalid_protobuf_is_malformed(case: str) -> None:
    datatype, raw = MALFORMED[case]
    if case != "a group":  # Protobuf still reads groups.
        with pytest.raises(DecodeError):
            Contents.FromString(raw)
    with pytest.raises(MalformedInput, match="`x`: its typed contents are not a valid message"):
        read(datatype, raw, 1)


@pytest.mark.parametrize("length", [10, 200, 1 << 10])
def test_unterminated_number_is_rejected(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(oip_typed, "PIECE_BYTES", 100)
    number = b"\x80" * length + b"\x00"
    with pytest.raises(MalformedInput, match="a value is out of range for INT64"):
        read("INT64", b"\x1a" + encode_varint(len(number)) + number, 1)


@pytest.mark.parametrize("datatype", FIELDS)
@pytest.mark.parametrize("count", [0, 2, 4, -3])
def test_element_count_must_match_the_shape(datatype: str, count: int) -> None:
    value: Any = b"s" if datatype == "BYTES" else 1
    contents = Contents(**{field_of(datatype): [value] * 3})
    with pytest.raises(MalformedInput, match=f"shape has {count} (elements|strings), got 3"):
        read(datatype, contents, count)


@pytest.mark.parametrize("field", [b"\x42\x00", b"\xc2\x00\x00"])
def test_field_count_is_limited_by_the_element_count(field: bytes) -> None:
    """So the time to read a tensor depends on its rows only."""
    assert len(read("BYTES", field * ROWS, ROWS)) == 4 * (ROWS + 1)
    assert len(read("INT8", b"\x10\x01" * ROWS, ROWS)) == ROWS
    ones = (("BYTES", field), ("INT8", b"\x10\x01"), ("INT8", b"\x12\x00"), ("FP32", b"\x32\x00"))
    for datatype, one in ones:
        for count in (ROWS, 0, -1):
            too_many = one * (max(count, 0) + FIELDS_SPARE + 1)
            with pytest.raises(MalformedInput, match="more fields than its shape elements"):
                read(datatype, too_many + b"\x0b", count)  # The invalid end is not read.


def test_total_field_count_of_all_inputs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oip_typed, "FIELDS_MAX", 30)
    described = [("x", "INT8", (10,)), ("words", "BYTES", (10,)), ("y", "INT8", (10,))]
    parts = [b"\x10\x01" * 10, b"\x42\x00" * 10, b"\x12\x0a" + bytes(10)]

    def read_all() -> list[Tensor]:
        typed = {index: memoryview(part) for index, part in enumerate(parts)}
        return typed_tensors(described, typed, CONTRACT, LimitsConfig())

    assert [len(each.data) for each in read_all()[::2]] == [10, 10]
    parts[2] = b"\x10\x01" * 10
    assert [len(each.data) for each in read_all()[::2]] == [10, 10]
    parts[2] += b"\x12\x00"
    with pytest.raises(LimitExceeded, match="more than 30 strings and unpacked numbers"):
        read_all()


@given(st.sampled_from(sorted(FIELDS)), st.binary(max_size=40))
@example("INT8", b"\x10\x05")
@example("FP32", b"\x30\x05")
@example("BOOL", b"\x0a\x01\x02")
def test_any_bytes_are_read_as_by_protobuf_or_rejected(datatype: str, raw: bytes) -> None:
    try:
        values = getattr(Contents.FromString(raw), field_of(datatype))
    except DecodeError:
        values = None
    count = 0 if values is None else len(values)
    try:
        actual = read(datatype, raw, count)
    except (MalformedInput, LimitExceeded):
        return
    assert values is not None
    if datatype == "BYTES":
        assert body_to_strings(actual, count) == list(values)
    else:
        dtype = next(each.numpy for each in DTYPES if each.oip == datatype)
        assert np.array_equal(np.frombuffer(actual, dtype), np.array(values, dtype), equal_nan=True)


FLOATS = b"\x32" + encode_varint(4 << 20) + bytes(4 << 20)
SLOW: dict[str, tuple[str, int, bytes, bool]] = {
    "integers": (
        "INT64",
        9,
        b"\x1a" + encode_varint(AT_ONCE_BYTES) + bytes(AT_ONCE_BYTES),
        True,
    ),
    "fewer integers": (
        "INT64",
        9,
        b"\x1a" + encode_varint(AT_ONCE_BYTES - 9) + bytes(AT_ONCE_BYTES - 9),
        False,
    ),
    "booleans": ("BOOL", 9, b"\x0a" + encode_varint(AT_ONCE_BYTES) + bytes(AT_ONCE_BYTES), True),
    "floats": ("FP32", 1 << 20, FLOATS, False),
    "floats in two fields": ("FP32", 1 << 20, FLOATS + b"\x32\x00", True),
    "unpacked floats": ("FP32", 9000, b"\x35abcd" * 9000, True),
    "empty float fields": ("FP32", 1, b"\x32\x00" * 9000, False),
    "short strings": ("BYTES", 9000, b"\x42\x00" * 9000, True),
    "more strings than the shape": ("BYTES", 1, b"\x42\x00" * 9000, False),
    "a long string": (
        "BYTES",
        1,
        b"\x42" + encode_varint(AT_ONCE_BYTES) + bytes(AT_ONCE_BYTES),
        True,
    ),
    "a raw-only datatype": ("FP16", 1, bytes(AT_ONCE_BYTES + 1), False),
    "an invalid message": ("FP32", 1, b"\x32", False),
    "no elements": ("FP32", 0, b"", False),
}


@pytest.mark.parametrize("case", SLOW)
def test_slow_contents_are_read_in_a_thread(case: str) -> None:
    datatype, count, contents, is_slow = SLOW[case]
    described = [("x", "INT8", (1,)), ("y", datatype, (count,))]
    typed = {0: memoryview(b"\x12\x01\x07"), 1: memoryview(contents)}
    assert are_slow(described, typed) is is_slow


def test_contents_that_are_slow_together_are_read_in_a_thread() -> None:
    contents = b"\x12" + encode_varint(AT_ONCE_BYTES // 4) + bytes(AT_ONCE_BYTES // 4)
    described = [(f"x{index}", "INT8", (9,)) for index in range(4)]
    assert not are_slow(described, {index: memoryview(contents) for index in range(3)})
    assert are_slow(described, {index: memoryview(contents) for index in range(4)})
