"""Strings in raw tensors: conversion, malformed data and memory use."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iskander.contract.processing.strings import body_to_strings, strings_to_body
from iskander.errors import MalformedInput
from iskander.gateway.protocols.oip import tensors as oip_strings
from iskander.gateway.protocols.oip.tensors import body_to_raw, raw_strings, raw_to_body

STRINGS = st.lists(st.binary(max_size=300), max_size=10)


@given(STRINGS)
def test_raw_strings_are_converted_to_the_body_layout(values: list[bytes]) -> None:
    body = raw_to_body(memoryview(raw_strings(values)), len(values))
    assert bytes(body) == strings_to_body(values)


def test_strings_are_converted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk_strings in (1, 2, 3, 100):
        monkeypatch.setattr(oip_strings, "AT_ONCE", chunk_strings)
        values = [b"x" * (number % 5) for number in range(100)]
        body = raw_to_body(memoryview(raw_strings(values)), len(values))
        assert bytes(body) == strings_to_body(values)


@given(STRINGS)
def test_body_strings_are_converted_to_raw_strings(values: list[bytes]) -> None:
    body = memoryview(strings_to_body(values))
    assert bytes(body_to_raw(body, len(values))) == raw_strings(values)


@pytest.mark.parametrize(
    ("raw", "count", "message"),
    [
        (b"", 1, "1 strings need more than 0 bytes"),
        (b"", -2, "a shape of -2 strings is negative"),
        (b"\x01\x00\x00", 1, "need more"),
        (b"\x01\x00\x00\x00a", 1 << 62, "need more"),
        (b"\x02\x00\x00\x00a", 1, "string 0 of 1 is truncated"),
        (b"\xff\xff\xff\xffabcd", 1, "truncated"),
        (b"\x01\x00\x00\x00ab\x00\x00", 2, "the bytes end after 1"),
        (b"\x01\x00\x00\x00ab", 1, "1 bytes follow after 1 strings"),
        (b"\x00\x00\x00\x00", 0, "4 bytes follow after 0 strings"),
    ],
)
def test_bytes_with_a_wrong_string_count_are_rejected(raw: bytes, count: int, message: str) -> None:
    with pytest.raises(MalformedInput, match=message):
        raw_to_body(memoryview(raw), count)


@given(st.binary(max_size=60), st.integers(0, 10))
def test_arbitrary_bytes_are_strings_or_malformed(raw: bytes, count: int) -> None:
    try:
        body = raw_to_body(memoryview(raw), count)
    except MalformedInput:
        return
    strings = body_to_strings(body, count)
    assert raw_strings(strings) == raw and len(strings) == count


def test_memory_for_many_short_strings_is_bounded() -> None:
    """One object for each string would take sixty times as much."""
    count = 200_000
    raw = memoryview(bytes(4 * count))
    tracemalloc.start()
    body = raw_to_body(raw, count)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not np.frombuffer(body, np.int32).any() and len(body) == 4 * count + 4
    assert peak_bytes < 6 * len(raw)
