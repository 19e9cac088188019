"""Arrow arrays as NumPy's: a column found by its path, decoded, and its elements.

Arrays may be slices, and nulls may be at every level: in a struct, a list, or an element.

Runs on: gateway loop, and the thread that reads large batches.

Source: Arrow columnar format 1.5, "Physical Memory Layout"; canonical extensions `arrow.bool8` and
`arrow.fixed_shape_tensor`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow.casts import Values
from iskander.arrow.types import BFloat16, element_name, plain_of, storage_of, values_of
from iskander.contract.column_types import SentType

INDEX_BYTES = 8
"""Of an element that is taken from where it lies."""


class Path(NamedTuple):
    """Where a column is: its index in the batch, then in each struct; and its type."""

    indices: tuple[int, ...]
    type: pa.DataType


class Lists(NamedTuple):
    """Rows that are lists.

    Attributes:
        starts: Of each row in the elements.
        lengths: Of each row; 0 where it is null.
        elements: Of all of them, decoded.
        valid: Which rows are not null; None: all.
    """

    starts: np.ndarray
    lengths: np.ndarray
    elements: pa.Array
    valid: np.ndarray | None


def find(fields: pa.Schema | pa.StructType, name: str) -> Path | None:
    """The column of a dotted name; a column that has the whole name comes before a struct's field.

    Fields that share a name are not found.
    """
    indices: list[int] = []
    parent, rest = fields, name
    while True:
        index = _index(parent, rest)
        if index >= 0:
            return Path((*indices, index), parent.field(index).type)
        head, index = rest, -1
        while index < 0 and "." in head:
            head = head.rpartition(".")[0]
            index = _index(parent, head)
        if index < 0 or not pa.types.is_struct(parent.field(index).type):
            return None
        indices.append(index)
        parent, rest = parent.field(index).type, rest[len(head) + 1 :]


def is_sent_as(arrow: pa.DataType, wanted: SentType) -> bool:
    """Whether a column of this type is what a manifest says is sent."""
    if not wanted.is_ragged:
        arrow = values_of(arrow)
    elif not is_list(arrow):
        return False
    else:
        arrow = arrow.value_type
        # What runs make when they are written out, and text of a dictionary, is known too late.
        if pa.types.is_dictionary(arrow) and not wanted.is_text:
            arrow = arrow.value_type
    shape: list[int] = []
    while True:
        if isinstance(arrow, pa.FixedShapeTensorType):
            if arrow.permutation not in (None, list(range(len(arrow.shape)))):
                return False
            shape += arrow.shape
            arrow = arrow.value_type
            break
        if not pa.types.is_fixed_size_list(arrow):
            break
        shape.append(arrow.list_size)
        arrow = arrow.value_type
    name = None if values_of(arrow) != arrow else element_name(arrow)
    return name is not None and tuple(shape) == wanted.shape and wanted.admits(name)


def is_list(arrow: pa.DataType) -> bool:
    """Whether rows of this type are lists of a length of their own."""
    kinds = pa.types
    return bool(
        kinds.is_list(arrow)
        or kinds.is_large_list(arrow)
        or kinds.is_list_view(arrow)
        or kinds.is_large_list_view(arrow)
    )


def pick(batch: pa.RecordBatch, indices: tuple[int, ...]) -> pa.Array:
    """The column at a path; null where a struct around it is."""
    array = batch.column(indices[0])
    for index in indices[1:]:
        array = pc.struct_field(array, [index])
    return array


def decoded(array: pa.Array) -> pa.Array:
    """An array without dictionary or runs."""
    if pa.types.is_dictionary(array.type):
        return _taken(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(array.type):
        values = _taken(array.values)
        runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, values)
        return pc.run_end_decode(runs.slice(array.offset, len(array)))
    return array


def taken(array: pa.Array, index: np.ndarray) -> pa.Array:
    """Some elements of an array, decoded; of a dictionary no others are written out."""
    if pa.types.is_dictionary(array.type):
        return _taken(array.dictionary).take(array.indices.take(pa.array(index)))
    return _taken(decoded(array)).take(pa.array(index))


def lists(array: pa.Array) -> Lists:
    """The rows of lists of any encoding; those of views may overlap, and be in any order."""
    valid = _valid(array)
    starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        lengths, starts = np.diff(starts), starts[:-1]
    else:
        lengths = array.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    return Lists(starts, lengths, array.values, valid)


def shared_bytes(array: pa.Array) -> int:
    """What it takes to write out lists that are views, which may be of the same elements."""
    is_view = pa.types.is_list_view(array.type) or pa.types.is_large_list_view(array.type)
    return int(lists(array).lengths.sum()) * INDEX_BYTES if is_view else 0


class Leaf(NamedTuple):
    """The single values of an array of fixed size.

    Attributes:
        array: All of them, flat.
        shape: `(rows, *sizes)`, by the fixed-size lists that they are in.
        valid: Which are not null, nor in a list that is; flat; None: all.
    """

    array: pa.Array
    shape: tuple[int, ...]
    valid: np.ndarray | None


def leaf(array: pa.Array) -> Leaf:
    """The innermost values of an array that may be encoded, and may be a slice."""
    array = decoded(array)
    shape, valid = [len(array)], _valid(array)
    array = _storage(array)
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        array = array.values.slice(array.offset * size, len(array) * size)
        shape.append(size)
        child = _valid(array)
        if valid is not None:
            valid = np.repeat(valid, size)
            child = valid if child is None else valid & child
        valid, array = child, _storage(array)
    return Leaf(array, tuple(shape), None if valid is None or valid.all() else valid)


def elements(array: pa.Array) -> Values:
    """The elements of an array of fixed size, as they are stored.

    Shape:
        `(rows, *sizes)`, by the fixed-size lists that they are in.
    """
    values, shape, valid = leaf(array)
    valid = None if valid is None else valid.reshape(shape)
    return Values(_data(values).reshape(shape), valid, isinstance(values.type, BFloat16))


def decimals(array: pa.Array) -> tuple[np.ndarray | None, int]:
    """The unscaled whole numbers of an array of decimals, and their scale.

    None where one of them needs more than 64 bits; what lies where there is none does not count.
    """
    kind, width = array.type, array.type.bit_width // 8
    raw = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    raw = raw[array.offset * width :][: len(array) * width]
    if width <= 8:
        return raw.view(np.dtype(f"i{width}")).astype(np.int64), kind.scale
    words = raw.view(np.int64).reshape(len(array), width // 8)
    valid = _valid(array)
    is_wide = (words[:, 1:] != (words[:, :1] >> 63)).any(axis=1)
    if (is_wide if valid is None else is_wide & valid).any():
        return None, kind.scale
    return words[:, 0].copy(), kind.scale


def text_lengths(array: pa.Array) -> np.ndarray:
    """Bytes of each string of an array, 0 for a null."""
    if pa.types.is_string_view(array.type) or pa.types.is_binary_view(array.type):
        # A view is 16 bytes, and its length is the first four of them.
        lengths = _seen(array, np.dtype("V16")).view(np.int32)[::4]
        valid = _valid(array)
        return lengths if valid is None else np.where(valid, lengths, 0)
    made: np.ndarray = pc.fill_null(pc.binary_length(array), 0).to_numpy()
    return made


def written_bytes(array: pa.Array) -> int:
    """Bytes of a column's strings when each is written out; many may be the same few bytes.

    They are where a dictionary is looked up for every row, where runs are, and where views see the
    same buffer.
    """
    if is_list(array.type):
        found = lists(array)
        lengths = text_lengths(found.elements).astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(lengths)))
        kept = int((sums[found.starts + found.lengths] - sums[found.starts]).sum())
        return max(kept, int(lengths.sum()))
    is_dictionary = pa.types.is_dictionary(array.type)
    is_runs = pa.types.is_run_end_encoded(array.type)
    leaf = entries = array.dictionary if is_dictionary else array.values if is_runs else array
    while pa.types.is_fixed_size_list(leaf.type):
        leaf = leaf.values.slice(leaf.offset * leaf.type.list_size, len(leaf) * leaf.type.list_size)
    if not len(leaf):
        return 0
    if is_dictionary and leaf is entries:
        # Only of the entries that are used: there may be many times more than rows.
        return _text_bytes_at(entries, array.indices.drop_null().to_numpy())
    lengths = text_lengths(leaf).astype(np.int64)
    if not is_dictionary and not is_runs:
        return int(lengths.sum())
    of_entry = lengths.reshape(len(entries), -1).sum(axis=1)
    if is_dictionary:
        return int(of_entry[array.indices.drop_null().to_numpy()].sum())
    runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, pa.array(of_entry))
    return pc.sum(pc.run_end_decode(runs.slice(array.offset, len(array)))).as_py() or 0


def _text_bytes_at(array: pa.Array, index: np.ndarray) -> int:
    """Bytes of some strings of an array, one or many times each; a null has none."""
    kind = array.type
    if array.null_count:
        bits = np.frombuffer(array.buffers()[0], np.uint8)
        at = array.offset + index.astype(np.int64)
        index = index[(bits[at >> 3] >> (at & 7)) & 1 == 1]
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return int(_seen(array, np.dtype("V16")).view(np.int32)[::4][index].sum(dtype=np.int64))
    is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not is_large and not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return int(text_lengths(array).astype(np.int64)[index].sum())
    offset = np.dtype(np.int64 if is_large else np.int32)
    count = array.offset + len(array) + 1
    offsets = np.frombuffer(array.buffers()[1], offset, count)[array.offset :]
    at = index.astype(np.int64)
    return int((offsets[at + 1].astype(np.int64) - offsets[at]).sum())


def text_buffers(array: pa.Array) -> tuple[memoryview, memoryview]:
    """The offsets of a `binary` array without nulls, and the bytes that they are offsets in."""
    raw = array.buffers()[1] or bytes(4)
    count = array.offset + len(array) + 1
    offsets = np.frombuffer(raw, np.int32, count)[array.offset :]
    joined = memoryview(array.buffers()[2] or b"").cast("B")[: offsets[-1]]
    return offsets.data.cast("B"), joined


def time_unit(arrow: pa.DataType) -> str:
    """The unit that a date, time, timestamp or duration counts in."""
    if pa.types.is_date32(arrow):
        return "d"
    return "ms" if pa.types.is_date64(arrow) else str(arrow.unit)


def _taken(array: pa.Array) -> pa.Array:
    """An array that elements can be taken from, which pyarrow does not of views."""
    plain = plain_of(array.type)
    return array if plain == array.type or plain == pa.bool_() else array.cast(plain)


def _index(parent: pa.Schema | pa.StructType, name: str) -> int:
    if isinstance(parent, pa.Schema):
        return int(parent.get_field_index(name))
    indices = parent.get_all_field_indices(name)
    return indices[0] if len(indices) == 1 else -1


def _valid(array: pa.Array) -> np.ndarray | None:
    if not array.null_count:
        return None
    valid: np.ndarray = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _storage(array: pa.Array) -> pa.Array:
    """What a tensor of fixed shape is stored as; the types of elements stay."""
    return array.storage if isinstance(array.type, pa.FixedShapeTensorType) else array


def _is_bool8(arrow: pa.DataType) -> bool:
    return isinstance(arrow, pa.Bool8Type)


def _data(array: pa.Array) -> np.ndarray:
    """Values of fixed width, zero or anything where there is none."""
    kind, count = array.type, len(array)
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset :][:count].view(np.bool_)
    width = storage_of(kind).bit_width // 8
    dtype = np.dtype(f"i{width}")
    if isinstance(kind, BFloat16):
        dtype = np.dtype(np.uint16)
    elif _is_bool8(kind):
        array = array.storage
    elif not pa.types.is_temporal(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    values = _seen(array, dtype)
    return values != 0 if _is_bool8(kind) else values


def _seen(array: pa.Array, dtype: np.dtype) -> np.ndarray:
    """What an array sees of its values; their buffer may go on, and end within an element."""
    raw = array.buffers()[1] or b""
    return np.frombuffer(raw, dtype, array.offset + len(array))[array.offset :]
