"""Arrow arrays as NumPy arrays: column lookup by path, decoding, element access.

Arrays may be slices, and structs, lists and elements may be null.

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
from iskander.arrow.columns import is_list, is_list_view
from iskander.arrow.types import (
    BFloat16,
    element_name,
    is_permuted,
    received_type,
    storage_of,
    values_of,
)
from iskander.contract.column_types import SentType

INDEX_BYTES = 8
"""Index memory per gathered element."""


class ListRows(NamedTuple):
    """Rows that are lists."""

    starts: np.ndarray  # Index of each row's first element.
    lengths: np.ndarray  # 0 for null rows.
    elements: pa.Array
    valid: np.ndarray | None  # None if there are no null rows.


def is_sent_as(arrow: pa.DataType, sent: SentType) -> bool:
    """Return whether a column of this type matches a manifest's declared type."""
    if not sent.is_ragged:
        arrow = values_of(arrow)
    elif not is_list(arrow):
        return False
    else:
        arrow = arrow.value_type
        # The decoded size of runs, and of dictionary text, is not bounded early enough.
        if pa.types.is_dictionary(arrow) and not sent.is_text:
            arrow = arrow.value_type
    shape: list[int] = []
    while pa.types.is_fixed_size_list(arrow):
        shape.append(arrow.list_size)
        arrow = arrow.value_type
    if isinstance(arrow, pa.FixedShapeTensorType):
        if is_permuted(arrow):
            return False
        shape += arrow.shape
        arrow = arrow.value_type
    name = None if values_of(arrow) != arrow else element_name(arrow)
    return name is not None and tuple(shape) == sent.shape and sent.admits(name)


def decode(array: pa.Array) -> pa.Array:
    """Decode a dictionary or run-end encoded array."""
    if pa.types.is_dictionary(array.type):
        return plain_array(array.dictionary).take(array.indices)
    if pa.types.is_run_end_encoded(array.type):
        values = plain_array(array.values)
        if isinstance(values.type, pa.BaseExtensionType):  # No kernel decodes them.
            stored = _decoded_runs(array, values.storage)
            return pa.ExtensionArray.from_storage(values.type, stored)
        return _decoded_runs(array, values)
    return array


def take_decoded(array: pa.Array, index: np.ndarray) -> pa.Array:
    """Decode the elements at `index` only."""
    if pa.types.is_dictionary(array.type):
        return plain_array(array.dictionary).take(array.indices.take(pa.array(index)))
    return plain_array(decode(array)).take(pa.array(index))


def list_rows(array: pa.Array) -> ListRows:
    """Return the rows of a list array; rows of list views may overlap, in any order."""
    valid = _validity(array)
    starts = array.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    if is_list_view(array.type):
        lengths = array.sizes.to_numpy(zero_copy_only=False).astype(np.int64)
    else:
        lengths, starts = np.diff(starts), starts[:-1]
    if valid is not None:
        lengths = np.where(valid, lengths, 0)
    return ListRows(starts, lengths, array.values, valid)


def view_index_bytes(array: pa.Array) -> int:
    """Return the index memory to expand list views, which may share elements; 0 for other types."""
    return int(list_rows(array).lengths.sum()) * INDEX_BYTES if is_list_view(array.type) else 0


class InnermostValues(NamedTuple):
    """Innermost values of an array whose rows have equal sizes.

    Shape:
        `(rows, *sizes)`, by the enclosing fixed-size lists.
    """

    array: pa.Array  # The values of all rows, without nesting.
    shape: list[int]
    valid: np.ndarray | None  # False also inside a null list; None if there are no nulls.


def innermost_values(array: pa.Array) -> InnermostValues:
    """Return the innermost values of an array, decoded."""
    array = decode(array)
    shape, valid = [len(array)], _validity(array)
    array = _storage_array(array)
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        array = _list_values(array)
        shape.append(size)
        child = _validity(array)
        if valid is not None:
            valid = np.repeat(valid, size)
            child = valid if child is None else valid & child
        valid, array = child, _storage_array(array)
    return InnermostValues(
        array, shape, None if valid is None or valid.all() else valid.reshape(shape)
    )


def stored_elements(array: pa.Array) -> Values:
    """Return stored elements of an array of fixed size, in the shape of its `InnermostValues`."""
    values, shape, valid = innermost_values(array)
    return Values(
        _fixed_width_values(values).reshape(shape), valid, isinstance(values.type, BFloat16)
    )


def unscaled_decimals(array: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
    """Return unscaled integers of a decimal array; and a mask of values of over 64 bits, or None.

    Values of over 64 bits are 0 in the first array.
    """
    width = array.type.bit_width // 8
    raw = np.frombuffer(array.buffers()[1] or b"", np.uint8)
    raw = raw[array.offset * width :][: len(array) * width]
    if width <= 8:
        return raw.view(np.dtype(f"i{width}")).astype(np.int64), None
    words = raw.view(np.int64).reshape(len(array), width // 8)
    valid = _validity(array)
    is_wide = (words[:, 1:] != (words[:, :1] >> 63)).any(axis=1)
    if valid is not None:
        is_wide &= valid
    if not is_wide.any():
        return words[:, 0].copy(), None
    return np.where(is_wide, 0, words[:, 0]), is_wide


def view_bytes(array: pa.Array) -> int:
    """Count bytes to which valid views of a string view array refer; the array may be invalid."""
    lengths, valid = _view_lengths(array).astype(np.int64), _validity(array)
    if valid is not None:
        lengths = lengths[valid]
    return int(lengths.clip(0).sum())


def text_lengths(array: pa.Array) -> np.ndarray:
    """Return the length in bytes of each string of an array; 0 for a null."""
    if _is_string_view(array.type):
        views, valid = _view_lengths(array), _validity(array)
        return views if valid is None else np.where(valid, views, 0)
    lengths: np.ndarray = pc.fill_null(pc.binary_length(array), 0).to_numpy()
    return lengths


def decoded_text_bytes(array: pa.Array) -> int:
    """Count bytes of a column's strings when decoded: entries, runs and views may share bytes."""
    if is_list(array.type):
        found = list_rows(array)
        lengths = text_lengths(found.elements).astype(np.int64)
        sums = np.concatenate(([0], np.cumsum(lengths)))
        in_rows = int((sums[found.starts + found.lengths] - sums[found.starts]).sum())
        return max(in_rows, int(lengths.sum()))
    is_dictionary = pa.types.is_dictionary(array.type)
    is_runs = pa.types.is_run_end_encoded(array.type)
    if is_dictionary:
        entries = array.dictionary
    elif is_runs:
        entries = array.values
    else:
        entries = array
    values = entries
    while pa.types.is_fixed_size_list(values.type):
        values = _list_values(values)
    if not len(values):
        return 0
    if is_dictionary and values is entries:
        # Only entries in use: a dictionary may have many times more entries than rows.
        return _text_bytes_at(entries, array.indices.drop_null().to_numpy())
    lengths = text_lengths(values).astype(np.int64)
    if not is_dictionary and not is_runs:
        return int(lengths.sum())
    of_entry = lengths.reshape(len(entries), -1).sum(axis=1)
    if is_dictionary:
        return int(of_entry[array.indices.drop_null().to_numpy()].sum())
    return pc.sum(_decoded_runs(array, pa.array(of_entry))).as_py() or 0


def _text_bytes_at(array: pa.Array, index: np.ndarray) -> int:
    """Return the sum of the string lengths at `index`; a null counts 0."""
    kind = array.type
    if array.null_count:
        bits = np.frombuffer(array.buffers()[0], np.uint8)
        at = array.offset + index.astype(np.int64)
        index = index[(bits[at >> 3] >> (at & 7)) & 1 == 1]
    if _is_string_view(kind):
        return int(_view_lengths(array)[index].sum(dtype=np.int64))
    is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not is_large and not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        return int(text_lengths(array).astype(np.int64)[index].sum())
    offset = np.dtype(np.int64 if is_large else np.int32)
    count = array.offset + len(array) + 1
    offsets = np.frombuffer(array.buffers()[1], offset, count)[array.offset :]
    at = index.astype(np.int64)
    return int((offsets[at + 1].astype(np.int64) - offsets[at]).sum())


def text_buffers(array: pa.Array) -> tuple[memoryview, memoryview]:
    """Return the offsets and bytes of a `binary` array without nulls."""
    raw = array.buffers()[1] or bytes(4)
    count = array.offset + len(array) + 1
    offsets = np.frombuffer(raw, np.int32, count)[array.offset :]
    joined = memoryview(array.buffers()[2] or b"").cast("B")[: offsets[-1]]
    return offsets.data.cast("B"), joined


def item_bytes(arrow: pa.DataType) -> int:
    """Return the bytes of one innermost value of a type.

    For text, the bytes of its offset or view.
    """
    while True:
        arrow = values_of(storage_of(arrow))
        if not (is_list(arrow) or pa.types.is_fixed_size_list(arrow)):
            break
        arrow = arrow.value_type
    try:
        return int(arrow.bit_width + 7) // 8
    except ValueError:  # The width varies.
        return 2 * INDEX_BYTES


def time_unit(arrow: pa.DataType) -> str:
    """Return the unit of a date, time, timestamp or duration."""
    if pa.types.is_date32(arrow):
        return "d"
    return "ms" if pa.types.is_date64(arrow) else str(arrow.unit)


def plain_array(array: pa.Array) -> pa.Array:
    """Cast an array to a type that `take` supports, which excludes views."""
    plain = received_type(array.type)
    if plain == array.type or plain == pa.bool_():
        return array
    return without_null_views(array).cast(plain)


def without_null_views(array: pa.Array) -> pa.Array:
    """Clear the string views of null rows, whose bytes are undefined.

    pyarrow's validation ignores the views of null rows, and its cast uses them: a length of 2 GiB
    is allocated, and a negative length ends the process.
    """
    valid = _validity(array) if _is_string_view(array.type) else None
    if valid is None:
        return array
    views = _fixed_width(array, np.dtype("V16")).view(np.int32).reshape(-1, 4).copy()
    views[~valid] = 0
    bits = np.packbits(valid, bitorder="little")
    buffers = [pa.py_buffer(bits), pa.py_buffer(views), *array.buffers()[2:]]
    return pa.Array.from_buffers(array.type, len(array), buffers, array.null_count)


def _is_string_view(arrow: pa.DataType) -> bool:
    return bool(pa.types.is_string_view(arrow) or pa.types.is_binary_view(arrow))


def _view_lengths(array: pa.Array) -> np.ndarray:
    """Return the length of each string view: the first 4 of its 16 bytes."""
    return _fixed_width(array, np.dtype("V16")).view(np.int32)[::4]


def _list_values(array: pa.FixedSizeListArray) -> pa.Array:
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def _decoded_runs(array: pa.RunEndEncodedArray, values: pa.Array) -> pa.Array:
    """Decode the runs of an array with other values in place of the array's own."""
    runs = pa.RunEndEncodedArray.from_arrays(array.run_ends, values)
    return pc.run_end_decode(runs.slice(array.offset, len(array)))


def _validity(array: pa.Array) -> np.ndarray | None:
    if not array.null_count:
        return None
    valid: np.ndarray = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _storage_array(array: pa.Array) -> pa.Array:
    """Return the storage of a tensor of fixed shape; other extension types unchanged."""
    return array.storage if isinstance(array.type, pa.FixedShapeTensorType) else array


def _fixed_width_values(array: pa.Array) -> np.ndarray:
    """Return the values of an array of fixed width; a value is undefined where it is null."""
    kind, count = array.type, len(array)
    if pa.types.is_boolean(kind):
        bits = np.frombuffer(array.buffers()[1] or b"", np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset :][:count].view(np.bool_)
    if isinstance(kind, pa.Bool8Type):
        return _fixed_width(array.storage, np.dtype(np.int8)).astype(np.bool_)
    if isinstance(kind, BFloat16):
        dtype = np.dtype(np.uint16)
    elif pa.types.is_temporal(kind):
        dtype = np.dtype(f"i{kind.bit_width // 8}")
    else:
        dtype = np.dtype(kind.to_pandas_dtype())
    return _fixed_width(array, dtype)


def _fixed_width(array: pa.Array, dtype: np.dtype) -> np.ndarray:
    """Return a view of the values; their buffer may be longer, and end within an element."""
    raw = array.buffers()[1] or b""
    return np.frombuffer(raw, dtype, array.offset + len(array))[array.offset :]
