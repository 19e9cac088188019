"""Tensor elements as JSON: conversion in both directions, and errors."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.errors import ContractError, IskanderError, LimitExceeded, MalformedInput
from iskander.gateway.protocols.oip.http import json_bounds
from iskander.gateway.protocols.oip.http.json_values import FLOATS, INTEGERS, read_data, write_data
from iskander.gateway.protocols.tensors import Tensor

NUMPY = INTEGERS | FLOATS | {"BOOL": np.dtype("bool")}


def read(datatype: str, shape: tuple[int, ...], data: Any) -> bytes:
    return read_data("x", datatype, shape, json.dumps(data).encode())


def error_of(datatype: str, data: Any, shape: tuple[int, ...] | None = None) -> str:
    shape = (len(data),) if shape is None else shape
    with pytest.raises(ContractError) as raised:
        read(datatype, shape, data)
    assert "`x`" in raised.value.message
    return raised.value.message


@pytest.mark.parametrize("datatype", NUMPY)
@given(data=st.data())
def test_json_values_round_trip_exactly(datatype: str, data: st.DataObject) -> None:
    """Includes infinities; all NaNs are equal."""
    array = data.draw(npst.arrays(NUMPY[datatype], npst.array_shapes(max_dims=3, min_side=0)))
    if datatype in FLOATS:
        array[np.isnan(array)] = np.nan

    written = write_data(Tensor("y", datatype, array.shape, memoryview(array.tobytes())))

    assert read_data("x", datatype, array.shape, written) == array.tobytes()
    if str not in map(type, json.loads(bytes(written))):
        assert read(datatype, array.shape, array.tolist()) == array.tobytes()


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_strings_round_trip(texts: list[str]) -> None:
    raw = read("BYTES", (len(texts),), texts)

    written = write_data(Tensor("y", "BYTES", (len(texts),), memoryview(raw)))
    assert json.loads(bytes(written)) == texts


def test_strings_are_encoded_as_utf8() -> None:
    assert body_to_strings(read("BYTES", (2,), ["ä", ""]), 2) == ["ä".encode(), b""]


def test_integer_can_be_written_as_a_float() -> None:
    assert read("INT8", (3,), [1.0, -2e0, 3]) == bytes([1, 254, 3])


@pytest.mark.parametrize(
    ("datatype", "value", "message"),
    [
        ("INT8", 128, "128 is not INT8: the range is -128 to 127"),
        ("UINT8", -1, "-1 is not UINT8"),
        ("UINT64", 2**64, "18446744073709551616 is not UINT64"),
        ("INT64", 10**400, ""),
        ("INT32", 1.5, "1.5 is not INT32"),
        ("INT32", True, "true is not INT32"),
        ("INT32", "1", '"1" is not INT32'),
        ("INT32", None, "null is not INT32"),
        ("FP32", 1e39, "1e39 is not FP32: out of range"),
        ("FP64", False, "false is not FP64"),
        ("FP64", "inf", '"inf" is not FP64'),
        ("BOOL", 1, "1 is not BOOL"),
        ("BYTES", 1, "1 is not BYTES"),
        ("BYTES", [1], "a list of 1 is not BYTES"),
    ],
)
def test_element_of_a_wrong_type_or_range_is_named(datatype: str, value: Any, message: str) -> None:
    other = {"BOOL": True, "BYTES": ""}.get(datatype, 1)
    try:
        assert message in error_of(datatype, [other, value])
    except MalformedInput as error:
        assert value == 10**400 and "out of range" in error.message


def test_large_integer_is_converted_to_a_float_in_range() -> None:
    assert read("FP64", (1,), [10**30]) == np.float64(1e30).tobytes()
    assert "out of range" in error_of("FP64", [10**309])


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_precision_requires_the_binary_form(datatype: str) -> None:
    assert "binary" in error_of(datatype, [1.0])
    with pytest.raises(ContractError, match="binary"):
        write_data(Tensor("y", datatype, (1,), memoryview(b"\0\0")))


def test_unknown_datatype_is_named() -> None:
    assert "`FP8`" in error_of("FP8", [1.0])


@pytest.mark.parametrize(
    ("shape", "data"),
    [
        ((3,), [1, 2]),
        ((2, 2), [1, 2, 3]),
        ((2, 2), [[1, 2], [3]]),
        ((2, 2), [[1, 2], 3]),
        ((2, 2), [[1, 2, 3, 4]]),
        ((2, 2), [[[1, 2], [3, 4]]]),
        ((2**62, 2**62), [1]),
        ((0, 5), [1]),
        ((1,), 7),
        ((1,), {"a": 1}),
    ],
)
def test_data_of_a_wrong_shape_is_rejected(shape: tuple[int, ...], data: Any) -> None:
    assert error_of("INT32", data, shape)


@pytest.mark.parametrize("raw", [b"[NaN]", b"[1", b'["\xff"]', b"[1e999]", b"[" * 4000, b""])
def test_invalid_json_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedInput, match="`x`"):
        read_data("x", "FP64", (1,), raw)


def test_strings_that_are_not_utf8_require_the_binary_form() -> None:
    with pytest.raises(IskanderError, match=r"element 1 of `y`.*binary"):
        write_data(Tensor("y", "BYTES", (2,), memoryview(strings_to_body([b"a", b"\xff"]))))


@pytest.mark.parametrize("piece_bytes", [1, 7, 50])
@given(data=st.data())
def test_pieces_have_the_values_of_the_whole(piece_bytes: int, data: st.DataObject) -> None:
    """Of any text that fits the shape, flat or nested, with brackets and commas in strings."""
    shape = data.draw(npst.array_shapes(max_dims=3, max_side=4, min_side=0))
    letters = st.text(st.sampled_from('a[],"\\{}:é \n'), max_size=4)
    values = st.one_of(st.integers(), st.booleans(), letters)
    flat = data.draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape)))
    nested: Any = flat
    for axis in reversed(shape[1:]):
        nested = [nested[at : at + axis] for at in range(0, len(nested), axis)] if axis else nested
    indent = data.draw(st.sampled_from([None, 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE_BYTES", piece_bytes)
        for written in (flat, nested):
            raw = json.dumps(written, indent=indent, ensure_ascii=False).encode()
            found = [value for piece in json_bounds.pieces(raw, shape) for value in piece]
            assert found == flat and list(map(type, found)) == list(map(type, flat))


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        ((1, 0, 4), b"[[]]"),
        ((2, 0), b"[[],[]]"),
        ((0, 3), b"[]"),
        ((3, 2, 0), b"[[[],[]],[[],[]],[[],[]]]"),
    ],
)
def test_pieces_of_an_empty_tensor(shape: tuple[int, ...], raw: bytes) -> None:
    """The axes inside an empty one are not written, also not in a text that is read in pieces."""
    for text in (raw, b"[]"):
        assert [value for piece in json_bounds.pieces(text, shape) for value in piece] == []


@given(raw=st.text(st.sampled_from('1,[]"\\{}: '), max_size=12), shape=st.data())
def test_pieces_accept_only_json_of_the_shape(raw: str, shape: st.DataObject) -> None:
    """What is accepted in pieces is accepted as a whole, with the same values."""
    sides = shape.draw(npst.array_shapes(max_dims=3, max_side=3, min_side=0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "PIECE_BYTES", 1)
        try:
            found = [v for piece in json_bounds.pieces(raw.encode(), sides) for v in piece]
        except (json_bounds.InvalidStructure, MalformedInput):
            return
    if any(isinstance(value, dict) for value in found):
        return  # Of no datatype.
    whole = json.loads(raw)
    for _ in sides[1:]:
        if any(isinstance(each, list) for each in whole):
            whole = [value for each in whole for value in each]
    assert found == whole and len(found) == math.prod(sides)


def long(element: bytes, count: int) -> bytes:
    return b"[" + b",".join([element] * count) + b"]"


@pytest.mark.parametrize(
    ("element", "shape", "message"),
    [
        (b"[]", (30_000,), "neither a flat list of 30000 elements nor nested"),
        (b"[]", (30_000, 1), "cannot be read"),  # Of the right structure.
        (b"[[]]", (30_000, 1), "neither a flat list"),
        (b"[1,2]", (30_000, 1), "neither a flat list"),
        (b"1", (30_000, 2), "neither a flat list of 60000"),
        (b"1", (2**62, 2**62), "neither a flat list"),
        (b"{}", (30_000,), "is not INT32"),
        (b"true", (30_000,), "true is not INT32"),
        (b"1.5", (30_000,), "1.5 is not INT32"),
        (b"3000000000", (30_000,), "the range is"),
        (b'"1,2"', (30_000,), "is not INT32"),
    ],
)
def test_long_data_of_another_form_is_rejected_before_its_values_are_created(
    element: bytes, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(IskanderError, match=message):
        read_data("x", "INT32", shape, long(element, 30_000))


@pytest.mark.parametrize("shape", [(30_000,), (30_000, 1), (100, 300), (2, 150, 100)])
def test_long_data_equals_short_data(shape: tuple[int, ...]) -> None:
    numbers = np.arange(30_000, dtype=np.int32).reshape(shape)
    floats = numbers.astype(np.float32) / 7
    for values in (numbers.ravel(), numbers):
        assert read("INT32", shape, values.tolist()) == numbers.tobytes()
    assert read("FP32", shape, floats.tolist()) == floats.tobytes()
    assert read("BOOL", shape, (numbers % 2 == 1).tolist()) == (numbers % 2 == 1).tobytes()
    texts = [f'[{number}],"' for number in range(30_000)]
    body = read("BYTES", shape, np.array(texts, object).reshape(shape).tolist())
    assert body_to_strings(body, 30_000) == [text.encode() for text in texts]
    for datatype, array in (("INT32", numbers), ("FP32", floats)):
        written = write_data(Tensor("y", datatype, shape, memoryview(array.tobytes())))
        assert json.loads(bytes(written)) == array.ravel().tolist()
    written = write_data(Tensor("y", "BYTES", shape, memoryview(body)))
    assert json.loads(bytes(written)) == texts


def request_json(**parts: bytes) -> bytes:
    fields = {"inputs": b"[]"} | parts
    return b"{" + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in fields.items()) + b"}"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"inputs": long(b'{"name":"","datatype":"","shape":[]}', 1000)}, "1001 objects, limit 36"),
        ({"outputs": long(b'{"name":""}', 5000)}, "objects, limit 36"),
        (
            {"parameters": b"{" + b",".join(b'"%d":0' % n for n in range(5000)) + b"}"},
            "5002 members, limit 288",
        ),
    ],
)
def test_requests_with_many_objects_are_rejected_before_they_are_created(
    parts: dict[str, bytes], message: str
) -> None:
    with pytest.raises(LimitExceeded, match=message):
        json_bounds.require_members(memoryview(request_json(**parts)), 8)


def test_braces_in_strings_are_no_objects() -> None:
    text = json.dumps('{:\\"' * 10_000).encode()
    json_bounds.require_members(memoryview(request_json(id=text)), 8)


@pytest.mark.parametrize("datatype", INTEGERS)
@pytest.mark.parametrize("count", [1, 100])
def test_range_of_integers_does_not_depend_on_their_number(datatype: str, count: int) -> None:
    info = np.iinfo(INTEGERS[datatype])
    for value in (int(info.min), int(info.max)):
        values = [0] * (count - 1) + [value]
        assert read(datatype, (count,), values) == np.array(values, INTEGERS[datatype]).tobytes()
    for value in (int(info.min) - 1, int(info.max) + 1):
        assert "the range is" in error_of(datatype, [0] * (count - 1) + [value])
    for value in (True, "1", None, 0.5):
        assert f"is not {datatype}" in error_of(datatype, [0] * (count - 1) + [value])
    assert read(datatype, (count,), [1.0] * count) == read(datatype, (count,), [1] * count)
