"""Copies of rows padding bodies, compared with NumPy for every type and bit offset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_examples import up_to

from iskander.contract.column_types import ColumnType
from iskander.contract.dtypes import DTYPES
from iskander.contract.processing.rows import LAYOUTS_MAX, RowCopier, Rows
from iskander.contract.tensors import TensorSpec, body_layout

NUMBERS = [dtype for dtype in DTYPES if dtype.arrow_bits]
SPEC = st.builds(
    lambda dtype, shape: TensorSpec("x", "x", ColumnType(dtype, tuple(shape)), tuple(shape)),
    st.sampled_from([dtype.arrow for dtype in NUMBERS]),
    st.lists(st.integers(1, 3), max_size=2),
)
SPECS = st.lists(SPEC, min_size=1, max_size=4).map(tuple)


def bits_of(spec: TensorSpec, body: bytes | memoryview, rows: int, offset: int) -> Any:
    """Return a column as an array of bits, one line per row, so that all types compare alike."""
    width = spec.elements * spec.type.dtype.arrow_bits
    raw = np.frombuffer(body, np.uint8)[offset : offset + spec.buffer_bytes(rows)]
    return np.unpackbits(raw, bitorder="little")[: rows * width].reshape(rows, width)


def random_body(specs: tuple[TensorSpec, ...], rows: int, seed: int) -> bytearray:
    length = body_layout(specs, rows)[1]
    return bytearray(np.random.default_rng(seed).integers(0, 256, length, np.uint8).tobytes())


def row_mask(specs: tuple[TensorSpec, ...], rows: int) -> Any:
    """Return a mask of the bits of a body that belong to rows; others are padding."""
    mask = np.zeros(body_layout(specs, rows)[1] * 8, bool)
    for spec, offset in zip(specs, body_layout(specs, rows)[0], strict=True):
        start = offset * 8
        mask[start : start + rows * spec.elements * spec.type.dtype.arrow_bits] = True
    return mask


@settings(deadline=None, max_examples=up_to(300))
@given(st.data(), SPECS, st.integers(1, 40), st.integers(1, 40))
def test_copy_changes_only_the_target_rows(
    data: st.DataObject, specs: tuple[TensorSpec, ...], source_rows: int, target_rows: int
) -> None:
    """Copy any rows to any position; all other rows of the target keep their values."""
    rows = data.draw(st.integers(0, min(source_rows, target_rows)))
    first = data.draw(st.integers(0, source_rows - rows))
    at = data.draw(st.integers(0, target_rows - rows))
    source, target = random_body(specs, source_rows, 1), random_body(specs, target_rows, 2)
    before, source_before = bytes(target), bytes(source)

    RowCopier(specs).copy(
        rows,
        Rows(memoryview(source), source_rows, first),
        Rows(memoryview(target), target_rows, at),
    )

    from_offsets, to_offsets = (
        body_layout(specs, source_rows)[0],
        body_layout(specs, target_rows)[0],
    )
    for spec, start, begin in zip(specs, from_offsets, to_offsets, strict=True):
        expected = bits_of(spec, before, target_rows, begin).copy()
        expected[at : at + rows] = bits_of(spec, source, source_rows, start)[first : first + rows]
        assert np.array_equal(bits_of(spec, target, target_rows, begin), expected)
    padding = ~row_mask(specs, target_rows)
    changed = np.unpackbits(np.frombuffer(before, np.uint8) ^ np.frombuffer(target, np.uint8))
    is_set = changed.reshape(-1, 8)[:, ::-1].reshape(-1).astype(bool)
    assert not (is_set & padding).any()
    assert source == source_before


@settings(deadline=None, max_examples=up_to(150))
@given(SPECS, st.integers(1, 40))
def test_padding_is_cleared_and_no_value_changes(specs: tuple[TensorSpec, ...], rows: int) -> None:
    body = random_body(specs, rows, 5)
    before = np.unpackbits(np.frombuffer(bytes(body), np.uint8), bitorder="little")

    RowCopier(specs).clear_padding(memoryview(body), rows)

    after = np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")
    assert np.array_equal(after, before * row_mask(specs, rows))


@settings(deadline=None, max_examples=up_to(150))
@given(SPECS, st.integers(1, 20), st.integers(0, 20))
def test_repeat_last_fills_the_body_with_its_last_row(
    specs: tuple[TensorSpec, ...], rows: int, more: int
) -> None:
    body = random_body(specs, rows + more, 3)
    before = bytes(body)

    RowCopier(specs).repeat_last(memoryview(body), rows, rows + more)

    for spec, offset in zip(specs, body_layout(specs, rows + more)[0], strict=True):
        original = bits_of(spec, before, rows + more, offset)
        after = bits_of(spec, body, rows + more, offset)
        assert np.array_equal(after[:rows], original[:rows])
        assert np.array_equal(after[rows:], np.repeat(original[rows - 1 : rows], more, axis=0))


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.arrow)
def test_values_of_every_type_are_copied_unchanged(dtype: Any) -> None:
    """Two requests are copied into one batch and compared with the NumPy array."""
    spec = TensorSpec("x", "x", ColumnType(dtype.arrow, (3,)), (3,))
    copier = RowCopier((spec,))
    batch = memoryview(bytearray(copier.layout(7)[1]))
    values = (np.arange(7 * 3) % 5).astype(dtype.numpy)
    packed = np.packbits(values, bitorder="little") if dtype.arrow_bits == 1 else values

    def body(rows: slice) -> memoryview:
        part = values.reshape(7, 3)[rows]
        raw = np.packbits(part, bitorder="little") if dtype.arrow_bits == 1 else part
        return memoryview(raw.tobytes())

    copier.copy(5, Rows(body(slice(0, 5)), 5, 0), Rows(batch, 7, 0))
    copier.copy(2, Rows(body(slice(5, 7)), 2, 0), Rows(batch, 7, 5))

    assert bytes(batch[: packed.nbytes]) == packed.tobytes()


def test_booleans_are_copied_at_every_bit_offset() -> None:
    """All pairs of bit offsets, with lengths up to more than two bytes."""
    copier = RowCopier((TensorSpec("x", "x", ColumnType("bool"), ()),))
    bits = np.random.default_rng(4).integers(0, 2, 40).astype(np.uint8)
    source = memoryview(np.packbits(bits, bitorder="little").tobytes())
    for first in range(9):
        for at in range(9):
            for rows in (0, 1, 7, 8, 9, 17):
                target = memoryview(bytearray(b"\xff" * 64))
                copier.copy(rows, Rows(source, 40, first), Rows(target, 40, at))
                actual = np.unpackbits(np.frombuffer(target, np.uint8), bitorder="little")
                expected = np.ones(512, np.uint8)
                expected[at : at + rows] = bits[first : first + rows]
                assert np.array_equal(actual, expected), (first, at, rows)


def test_layout_cache_is_bounded() -> None:
    specs = (TensorSpec("x", "x", ColumnType("int64"), ()),)
    copier = RowCopier(specs)

    for rows in range(3 * LAYOUTS_MAX):
        assert copier.layout(rows) == body_layout(specs, rows)
        copier.clear_padding(memoryview(bytearray(body_layout(specs, rows)[1])), rows)
        assert max(len(copier._layouts), len(copier._paddings)) <= LAYOUTS_MAX
