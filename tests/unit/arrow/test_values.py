"""Conversion of Arrow arrays to NumPy: slices, nulls at every level, and encodings.

The arrays are sliced in memory, not storage an IPC message: a message has only the sliced values,
but a slice in memory shares the buffers of the whole array.
"""

from __future__ import annotations

import struct
from decimal import Decimal
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.arrow_memory import peak_of

from iskander.arrow.columns import column_at, find_column
from iskander.arrow.types import BFloat16
from iskander.arrow.values import (
    decode,
    decoded_text_bytes,
    list_rows,
    plain_array,
    stored_elements,
    take_decoded,
    text_buffers,
    text_lengths,
    unscaled_decimals,
)

KINDS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int8(),
        pa.uint64(),
        pa.float16(),
        pa.float32(),
        pa.date32(),
        pa.timestamp("ns"),
        pa.bool_(),
    ],
    ids=str,
)
def test_elements_of_a_slice(kind: pa.DataType) -> None:
    whole = pa.array([1, 0, None, 1, 0, 1, 1, 0, 1, None, 1], pa.int8())
    storage = {pa.timestamp("ns"): pa.int64(), pa.date32(): pa.int32()}.get(kind, pa.int8())
    array = whole.cast(storage).cast(kind)
    actual = stored_elements(array.slice(1, 9))
    assert actual.valid is not None
    assert actual.valid.tolist() == [True, False] + [True] * 6 + [False]
    assert actual.data[actual.valid].tolist() == [0, 1, 0, 1, 1, 0, 1]
    assert stored_elements(array.slice(3, 4)).valid is None


def test_elements_of_lists_of_a_slice_with_nulls_at_every_level() -> None:
    kind = pa.list_(pa.list_(pa.int16(), 2), 2)
    array = pa.array([[[9, 9], [9, 9]], [[1, None], None], None, [[5, 6], [7, 8]]], kind)
    actual = stored_elements(array.slice(1))
    assert actual.data.shape == (3, 2, 2) and actual.valid is not None
    assert actual.valid.tolist() == [
        [[True, False], [False, False]], [[False] * 2] * 2, [[True] * 2] * 2,
    ]  # fmt: skip
    assert actual.data[actual.valid].tolist() == [1, 5, 6, 7, 8]
    shaped = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int16(), [2]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int16(), 2))
    )
    assert stored_elements(shaped.slice(1)).data.tolist() == [[3, 4]]


def test_extensions_of_a_slice() -> None:
    small = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 7, None], pa.int8()))
    assert stored_elements(small.slice(1, 2)).data.tolist() == [False, True]
    halves = pa.ExtensionArray.from_storage(BFloat16(), pa.array([1, 2, 3], pa.uint16()))
    actual = stored_elements(halves.slice(1))
    assert actual.data.tolist() == [2, 3] and actual.is_bfloat16


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_lists_of_a_slice(kind: Any) -> None:
    array = pa.array([[9] * 5, [1, 2], None, [], [3]], kind(pa.int32())).slice(1)
    actual = list_rows(array)
    assert actual.lengths.tolist() == [2, 0, 0, 1]
    rows = [
        take_decoded(actual.elements, np.arange(start, start + length)).to_pylist()
        for start, length in zip(actual.starts, actual.lengths, strict=True)
    ]
    assert rows == [[1, 2], [], [], [3]]


def test_null_lists_have_no_valid_elements() -> None:
    mask = pa.array([True, False])
    pairs = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3, 4]), 2, mask=mask)
    actual = stored_elements(pairs)
    assert actual.valid is not None and actual.valid.tolist() == [[False, False], [True, True]]
    array = pa.ListArray.from_arrays(
        [0, 2, 4], pa.array([1, 2, 3, 4]), mask=pa.array([False, True])
    )
    assert list_rows(array).lengths.tolist() == [2, 0]


def test_encodings_of_a_slice() -> None:
    runs = pa.RunEndEncodedArray.from_arrays([2, 4, 7], pa.array(["a", None, "bcd"]))
    assert decode(runs.slice(1, 4)).to_pylist() == ["a", None, None, "bcd"]
    assert decoded_text_bytes(runs.slice(1, 4)) == 4 and decoded_text_bytes(runs) == 2 + 9
    words = pa.DictionaryArray.from_arrays(
        pa.array([1, 0, None, 1], pa.int8()), pa.array(["a", "bcd"], pa.string_view())
    )
    assert decode(words.slice(1)).to_pylist() == [b"a", None, b"bcd"]
    assert decoded_text_bytes(words.slice(1)) == 4


def test_only_taken_dictionary_elements_are_decoded() -> None:
    """A list column can have many elements of few dictionary entries, of which few are taken."""
    points = pa.array([[0.5] * 1000, [1.5] * 1000], pa.list_(pa.float32(), 1000))
    index = pa.array(np.arange(100_000, dtype=np.int32) % 2)
    words = pa.DictionaryArray.from_arrays(index, points)
    actual, peak = peak_of(lambda: take_decoded(words.slice(1), np.array([2, 1])))
    assert [row[0].as_py() for row in actual] == [1.5, 0.5]
    assert peak < 16 << 20


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_binary(), pa.string_view(), pa.binary_view()])
def test_text_of_a_slice(kind: pa.DataType) -> None:
    array = pa.array(["x" * 40, "a", None, "b" * 30], pa.utf8()).cast(kind).slice(1)
    assert text_lengths(array).tolist() == [1, 0, 30] and decoded_text_bytes(array) == 31
    pairs = pa.FixedSizeListArray.from_arrays(pa.array(["x", "yy", "z", "w" * 9]), 2)
    assert decoded_text_bytes(pairs.slice(1)) == 10
    many = pa.ListViewArray.from_arrays([0, 0], [1, 2], pa.array(["ab", "c"]).cast(kind))
    assert decoded_text_bytes(many) == 2 + 3


@pytest.mark.parametrize("length", [100_000_000, -715_171_413])
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_of_null_rows_are_not_read(kind: pa.DataType, length: int) -> None:
    """Their bytes are undefined: pyarrow's cast reserves their length, or ends the process."""
    views = np.zeros((4, 4), np.int32)
    views[:, 0], views[:, 1] = 1, ord("a")
    views[2] = length, 7, 1000, -1
    buffers = [pa.py_buffer(b"\x0b"), pa.py_buffer(views.tobytes())]
    array = pa.Array.from_buffers(kind, 4, buffers, 1)
    array.validate(full=True)
    for sent, expected in ((array, [b"a", b"a", None, b"a"]), (array[1:], [b"a", None, b"a"])):
        made, peak = peak_of(partial(plain_array, sent))
        assert made.type == pa.binary() and made.to_pylist() == expected
        assert peak < 10_000


def test_text_buffers_of_a_slice() -> None:
    ends, joined = text_buffers(pa.array([b"xx", b"a", b"bc"], pa.binary()).slice(1))
    offsets = np.frombuffer(ends, np.int32)
    assert [bytes(joined[a:b]) for a, b in pairwise(offsets)] == [b"a", b"bc"]


def test_buffers_that_end_inside_an_element() -> None:
    """A client can send more bytes than its rows need."""
    bits = pa.py_buffer(struct.pack("<iih", 7, 8, 9))
    ints = pa.Array.from_buffers(pa.int32(), 2, [None, bits])
    ints.validate(full=True)
    assert stored_elements(ints).data.tolist() == [7, 8]
    assert stored_elements(ints.slice(1)).data.tolist() == [8]
    assert stored_elements(ints.slice(2)).data.tolist() == []
    ends = pa.py_buffer(struct.pack("<iiih", 0, 1, 3, 9))
    text = pa.Array.from_buffers(pa.binary(), 2, [None, ends, pa.py_buffer(b"abc")])
    text.validate(full=True)
    offsets, joined = text_buffers(text.slice(1))
    assert np.frombuffer(offsets, np.int32).tolist() == [1, 3] and bytes(joined) == b"abc"
    views = pa.py_buffer(struct.pack("<i12si12sh", 2, b"ab", 1, b"c", 9))
    array = pa.Array.from_buffers(pa.string_view(), 2, [None, views])
    array.validate(full=True)
    assert text_lengths(array).tolist() == [2, 1] and text_lengths(array.slice(1)).tolist() == [1]


def test_empty_arrays_can_have_empty_buffers() -> None:
    empty = pa.py_buffer(b"")
    assert stored_elements(pa.Array.from_buffers(pa.int32(), 0, [None, empty])).data.tolist() == []
    nothing = pa.Array.from_buffers(pa.string_view(), 0, [None, empty])
    assert text_lengths(nothing).tolist() == []
    offsets, joined = text_buffers(pa.Array.from_buffers(pa.binary(), 0, [None, empty, empty]))
    assert (offsets.tobytes(), len(joined)) == (bytes(4), 0)


@pytest.mark.parametrize("scale", [2, 0, -2])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_unscaled_decimals_of_a_slice(width: int, scale: int) -> None:
    kind = getattr(pa, f"decimal{width}")(9, scale)
    step = Decimal(10) ** -scale
    array = pa.array([9 * step, -3 * step, None, 5 * step], kind).slice(1)
    unscaled, is_wide = unscaled_decimals(array)
    assert is_wide is None
    assert (unscaled[0], unscaled[2]) == (-3, 5)


@pytest.mark.parametrize("width", [128, 256])
def test_decimals_of_over_64_bits_are_marked(width: int) -> None:
    """Not those of null slots, whose bytes are undefined."""
    kind = getattr(pa, f"decimal{width}")(38, 2)
    array = pa.array([1, Decimal(2) ** 70, None, -(Decimal(2) ** 63), -1], kind)
    scaled = [100, 0, 0, 0, -100]
    unscaled, is_wide = unscaled_decimals(array)
    assert is_wide is not None and is_wide.tolist() == [False, True, False, True, False]
    assert np.where(is_wide | ~array.is_valid().to_numpy(False), 0, unscaled).tolist() == scaled


@pytest.mark.parametrize("kind", [pa.bool8(), BFloat16()], ids=str)
def test_runs_of_an_extension_type(kind: pa.DataType) -> None:
    """Arrow decodes no runs of extension types."""
    stored = pa.array([1, 0, None], kind.storage_type)
    values = pa.ExtensionArray.from_storage(kind, stored)
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int32()), values)
    found = stored_elements(runs.slice(1))
    assert found.data.astype(int)[:2].tolist() == [1, 0]
    assert found.valid is not None and found.valid.tolist() == [True, True, False, False]


def test_struct_field_in_a_slice() -> None:
    inner = pa.struct([("b.c", pa.int8()), ("b", pa.struct([("c", pa.int8())]))])
    values = [{"b.c": 9, "b": None}, {"b.c": 1, "b": {"c": 2}}, None, {"b.c": None, "b": {"c": 4}}]
    batch = pa.record_batch({"a": pa.array(values, inner)}).slice(1)
    path = find_column(batch.schema, "a.b.c")
    assert path is not None and column_at(batch, path.indices).to_pylist() == [1, None, None]
    duplicate = pa.struct([("c", pa.int8()), ("c", pa.int8())])
    assert find_column(pa.schema([("a", duplicate)]), "a.c") is None
    assert find_column(pa.schema([("a", pa.int8())]), "a.b") is None
