"""Tensor elements as JSON: conversion in both directions, and errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from iskander.contract.strings import body_to_strings, strings_to_body
from iskander.errors import ContractError, IskanderError, MalformedInput
from iskander.protocols.oip.http.json_values import FLOATS, INTEGERS, read_data, write_data
from iskander.protocols.tensors import Tensor

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

    assert read(datatype, array.shape, written) == array.tobytes()
    if str not in map(type, written):
        assert read(datatype, array.shape, array.tolist()) == array.tobytes()


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_strings_round_trip(texts: list[str]) -> None:
    raw = read("BYTES", (len(texts),), texts)

    assert write_data(Tensor("y", "BYTES", (len(texts),), memoryview(raw))) == texts


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


@pytest.mark.parametrize("raw", [b"[NaN]", b"[1", b'["\xff"]', b"[1e999]", b"[" * 10**6, b""])
def test_invalid_json_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedInput, match="`x`"):
        read_data("x", "FP64", (1,), raw)


def test_strings_that_are_not_utf8_require_the_binary_form() -> None:
    with pytest.raises(IskanderError, match=r"element 1 of `y`.*binary"):
        write_data(Tensor("y", "BYTES", (2,), memoryview(strings_to_body([b"a", b"\xff"]))))
