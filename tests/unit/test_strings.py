"""Strings in bodies: put together and taken apart as plain Python would with lists of them."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iskander.contract import rows as rows_module
from iskander.contract import strings as strings_module
from iskander.contract.rows import RowCopier, Rows
from iskander.contract.strings import body_to_strings, strings_to_body
from iskander.contract.tensors import ALIGNMENT, ColumnType, TensorSpec
from iskander.errors import ContractError, ExecutionFailed, LimitExceeded, MalformedInput
from iskander.gateway.texts import require_strings

KINDS = ["utf8", "binary", "bool", "int64", "int8", "bfloat16"]
SPEC = st.builds(
    lambda dtype, shape: TensorSpec("x", "x", ColumnType(dtype, tuple(shape)), tuple(shape)),
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 3), max_size=2),
)
SPECS = st.lists(SPEC, min_size=1, max_size=4).map(tuple)

Column = list[Any]
"""A list for each row: of bytes, or of numbers."""


@st.composite
def columns(draw: st.DrawFn, specs: tuple[TensorSpec, ...], rows: int) -> list[Column]:
    found = []
    for spec in specs:
        if spec.is_string:
            value: Any = st.binary(max_size=5)
        else:
            value = st.integers(0, 1 if spec.type.dtype_name == "bool" else 127)
        row = st.lists(value, min_size=spec.elements, max_size=spec.elements)
        found.append(draw(st.lists(row, min_size=rows, max_size=rows)))
    return found


def body_of(specs: tuple[TensorSpec, ...], values: list[Column], skipped: bytes = b"") -> bytes:
    """A body as the documentation describes it, with bytes before the first string of a column."""
    body, behind = bytearray(), []
    for spec, column in zip(specs, values, strict=True):
        flat = list(itertools.chain(*column))
        if spec.is_string:
            ends = itertools.accumulate(map(len, flat), initial=len(skipped))
            body += struct.pack(f"<{len(flat) + 1}i", *ends)
            behind.append(skipped + b"".join(flat))
        elif spec.type.dtype_name == "bool":
            body += np.packbits(flat, bitorder="little").tobytes()
        else:
            body += np.array(flat, spec.type.dtype.numpy).tobytes()
        body += bytes(-len(body) % ALIGNMENT)
    for strings in behind:
        body += strings + bytes(-len(strings) % ALIGNMENT)
    return bytes(body)


@settings(deadline=None, max_examples=300)
@given(st.data(), SPECS, st.lists(st.integers(1, 9), min_size=1, max_size=4), st.binary(max_size=3))
def test_rows_of_several_bodies_make_one(
    data: st.DataObject, specs: tuple[TensorSpec, ...], sizes: list[int], skipped: bytes
) -> None:
    """Any rows of each, in any order, as with lists."""
    copier = RowCopier(specs)
    parts, wanted = [], [[] for _ in specs]  # type: ignore[var-annotated]
    for rows in sizes:
        values = data.draw(columns(specs, rows))
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        # What lies behind a body belongs to somebody else.
        body = memoryview(body_of(specs, values, skipped) + b"\xff" * 64)
        parts.append((count, Rows(body, rows, first)))
        for column, more in zip(wanted, values, strict=True):
            column.extend(more[first : first + count])

    joined = joined_by(copier, parts)

    assert bytes(joined) == body_of(specs, wanted)
    assert joined.nbytes == copier.string_ranges(joined, sum(count for count, _ in parts))[1]


def test_every_part_is_a_step_of_its_own() -> None:
    """So that whoever joins large bodies can let others have their turn."""
    specs = (text_spec(),)
    body = memoryview(body_of(specs, [[[b"a"], [b"bc"]]]))

    steps = RowCopier(specs).join([(2, Rows(body, 2, 0))] * 5)

    assert sum(1 for _ in steps) == 5


@pytest.mark.parametrize("offsets", [(0, 1, 200), (0, 1, -1), (5, 1, 2), (-1, 1, 2), (0, 1, 65)])
def test_nothing_is_read_beyond_a_body(offsets: tuple[int, ...]) -> None:
    """Whatever the offsets say; 64 bytes are there, of which the strings have two."""
    body = struct.pack("<3i", *offsets) + bytes(52) + b"ab" + bytes(62)

    with pytest.raises(AssertionError):
        joined_by(RowCopier((text_spec(),)), [(2, Rows(memoryview(body), 2, 0))])


def test_more_strings_than_offsets_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the limit, in a batch and in a tensor."""
    specs = (text_spec(),)
    part = (1, Rows(memoryview(body_of(specs, [[[b"four"]]])), 1, 0))
    monkeypatch.setattr(rows_module, "COLUMN_BYTES_MAX", 8)
    monkeypatch.setattr(strings_module, "COLUMN_BYTES_MAX", 8)

    joined_by(RowCopier(specs), [part] * 2)
    strings_to_body([b"four"] * 2)
    with pytest.raises(ExecutionFailed, match="12 bytes together and may have 8"):
        joined_by(RowCopier(specs), [part] * 3)
    with pytest.raises(LimitExceeded, match="may have 8 bytes, got 12"):
        strings_to_body([b"four"] * 3)


@given(st.lists(st.binary(max_size=9), max_size=20))
def test_a_column_in_one_piece(strings: list[bytes]) -> None:
    body = strings_to_body(strings)

    offsets = np.frombuffer(body, np.int32, len(strings) + 1)
    assert offsets.tolist() == [0, *itertools.accumulate(map(len, strings))]
    assert body[offsets.nbytes :] == b"".join(strings)
    assert body_to_strings(memoryview(body), len(strings)) == strings


def test_no_strings_need_no_offsets() -> None:
    assert body_to_strings(b"", 0) == []


@pytest.mark.parametrize(
    ("offsets", "joined", "error"),
    [
        ((0, 2, 4), "é🦎".encode()[:4], ContractError),
        ((0, 1, 2), "é".encode(), ContractError),
        ((0, 1, 2), b"\xff\xff", ContractError),
        ((0, 2, 1), b"ab", MalformedInput),
        ((-1, 1, 2), b"ab", MalformedInput),
        ((0, 1, 3), b"ab", MalformedInput),
    ],
)
def test_strings_that_no_model_can_take(
    offsets: tuple[int, ...], joined: bytes, error: type[Exception]
) -> None:
    """Not text, or text that begins within a letter of its neighbour; or offsets that are wrong."""
    with pytest.raises(error, match=r"^input `x`: "):
        require_strings("input `x`", 2, struct.pack("<3i", *offsets), joined)


def test_strings_that_a_model_can_take() -> None:
    """What lies before the first one is nobody's."""
    require_strings("input `x`", 2, struct.pack("<3i", 1, 3, 7), b"\xff" + "é🦎".encode())
    require_strings("input `x`", 0, b"", b"")


def text_spec() -> TensorSpec:
    return TensorSpec("x", "x", ColumnType("utf8"), ())


def joined_by(copier: RowCopier, parts: list[tuple[int, Rows]]) -> memoryview:
    steps = copier.join(parts)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            body: memoryview = end.value
            return body
