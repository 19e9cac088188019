"""Typed contents and raw strings: every datatype, every limit, nothing taken for something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander._generated import oip_pb2
from iskander.contract.dtypes import DTYPES
from iskander.errors import MalformedInput
from iskander.gateway.frontends import oip_tensors
from iskander.gateway.frontends.oip_tensors import (
    FIELDS,
    raw_of,
    strings_of,
)

RAW_ONLY = {"FP16", "BF16"}
CONTENTS = oip_pb2.InferTensorContents
BEYOND: list[tuple[str, str, int]] = [
    ("INT8", "int_contents", 128),
    ("INT8", "int_contents", -129),
    ("INT16", "int_contents", 1 << 15),
    ("UINT8", "uint_contents", 256),
    ("UINT16", "uint_contents", 1 << 16),
]


def test_every_datatype_has_a_field_or_is_raw_only() -> None:
    assert {dtype.oip for dtype in DTYPES} <= FIELDS.keys() | RAW_ONLY


@pytest.mark.parametrize("dtype", [each for each in DTYPES if each.oip not in RAW_ONLY | {"BYTES"}])
def test_typed_contents_are_their_raw_bytes(dtype: Any) -> None:
    """At both ends of the range."""
    numpy = np.dtype(dtype.numpy)
    if numpy.kind in "iu":
        limits = np.iinfo(numpy)
        values = [0, 1, limits.min, limits.max]
    else:
        values = [True, False] if numpy.kind == "b" else [0.0, -1.5, float("inf"), 1e-300]
    contents = CONTENTS(**{FIELDS[dtype.oip][0]: values})
    wanted = np.array(values, numpy)
    if dtype.oip == "FP32":
        wanted = np.array(contents.fp32_contents, numpy)
    assert bytes(raw_of("x", dtype.oip, contents)) == wanted.tobytes()


def test_strings_in_typed_contents_are_as_they_are() -> None:
    strings = [b"ab", b"", b"\x00\xff"]
    assert list(strings_of("x", CONTENTS(bytes_contents=strings))) == strings
    with pytest.raises(MalformedInput, match="BYTES is in `bytes_contents`, got `int_contents`"):
        strings_of("x", CONTENTS(int_contents=[1]))


@pytest.mark.parametrize(("datatype", "field", "value"), BEYOND)
def test_a_value_out_of_range_is_refused(datatype: str, field: str, value: int) -> None:
    with pytest.raises(MalformedInput, match=f"`x` has a value that is no {datatype}"):
        raw_of("x", datatype, CONTENTS(**{field: [0, value]}))


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "", "FP128", "int8"])
def test_a_datatype_without_typed_contents_is_refused(datatype: str) -> None:
    with pytest.raises(MalformedInput, match="send its raw bytes"):
        raw_of("x", datatype, CONTENTS(fp32_contents=[1]))


@pytest.mark.parametrize("more", [{}, {"fp32_contents": [1]}])
def test_elements_in_another_field_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(MalformedInput, match="FP32 is in `fp32_contents`, got `fp64_contents`"):
        raw_of("x", "FP32", CONTENTS(fp64_contents=[1], **more))


@pytest.mark.parametrize("piece_bytes", [10, 11, 64, 1 << 20])
@pytest.mark.parametrize("datatype", ["INT32", "INT64", "UINT32", "UINT64"])
def test_numbers_of_every_length_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, datatype: str, piece_bytes: int
) -> None:
    """Each piece ends with a whole number, however they are cut."""
    monkeypatch.setattr(oip_tensors, "PIECE_BYTES", piece_bytes)
    limits = np.iinfo(datatype.lower())
    powers = [1 << power for power in range(63)]
    values = [each - 1 for each in powers] + powers + [-each for each in powers]
    values = [each for each in values if limits.min <= each <= limits.max] + [limits.max]
    contents = CONTENTS(**{FIELDS[datatype][0]: values})
    wanted = np.array(values, datatype.lower()).tobytes()
    assert bytes(raw_of("x", datatype, contents)) == wanted


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)))
def test_any_numbers_are_their_raw_bytes(values: list[int]) -> None:
    raw = raw_of("x", "INT64", CONTENTS(int64_contents=values))
    assert np.frombuffer(raw, np.int64).tolist() == values


@pytest.mark.parametrize("unpacked", [False, True])
@pytest.mark.parametrize("unknown", [b"", b"\xfa\x01\x02\xff\xff", b"\xf8\x01\xff\x01"])
def test_numbers_are_read_however_they_were_written(unknown: bytes, *, unpacked: bool) -> None:
    """Each with a key of its own, or with fields beside them that nobody knows."""
    written = b"\x10\x05\x10\x07" if unpacked else b"\x12\x02\x05\x07"
    for raw in (unknown + written, written + unknown):
        contents = CONTENTS.FromString(raw)
        assert bytes(raw_of("x", "INT8", contents)) == b"\x05\x07"


@pytest.mark.parametrize("datatype", FIELDS)
def test_no_elements_are_no_bytes_of_any_datatype(datatype: str) -> None:
    assert bytes(raw_of("x", datatype, CONTENTS())) == b""
