"""Model inputs built from columns that need a conversion.

    schema, contract   ->  InputBuilder  finds and checks the columns of one entry
    batch              ->  BuiltTensor   elements, decoded, without nulls, of the tensor's type
    BuiltTensor, rows  ->  Buffers       as an arena stores them

Padding comes last, because its length depends on the bucket.

Runs on: gateway loop, and the thread that reads large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow import casts
from iskander.arrow import values as arrays
from iskander.arrow.casts import BFLOAT16, UNIT_NS, ValueLocation, Values, reject_nulls
from iskander.arrow.columns import ColumnPath, column_at, find_column
from iskander.contract.column_types import DECIMAL, TEMPORAL, parse_sent_type
from iskander.contract.inputs import columns_of
from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError

TEXT_BYTES = 8
"""Offsets of a string, as sent and as stored."""
MASK_BYTES = 2
"""Masks of an element."""
CAST_BYTES = 24
"""Intermediate values of an element that is cast or rescaled."""


class Buffers(NamedTuple):
    """One tensor as an arena stores it: values, or string offsets and bytes."""

    values: memoryview
    joined: memoryview | None = None


class InputBuilder:
    """Builds the tensors of one contract entry; `problems` lists its mismatched columns."""

    def __init__(self, entry: InputColumn, contract: Contract, schema: pa.Schema) -> None:
        self.entry = entry
        self.sent = parse_sent_type(entry.type)
        self._specs = {spec.tensor: spec for spec in contract.inputs}
        self.spec = self._specs[entry.tensor]
        self.rejects_nulls = entry.nulls in (None, "reject")
        self.names = columns_of(entry)
        self.paths: list[ColumnPath] = []
        self.is_nested = False
        self.problems: list[str] = []
        for name in self.names:
            path = find_column(schema, name)
            if path is None:
                self.problems.append(f"column `{name}` is missing: wanted {self.sent}")
            elif not arrays.is_sent_as(path.type, self.sent):
                self.problems.append(
                    f"column `{name}`: wanted {self.sent}, got {path.type}"
                    + (", which has no values" if pa.types.is_null(path.type) else "")
                )
            else:
                self.paths.append(path)
                self.is_nested = self.is_nested or len(path.indices) > 1

    @property
    def row_decoded_bytes(self) -> int:
        """Bytes of each row as sent and decoded, or as the tensor; without those of strings."""
        return self._row_elements * max(self._item_bytes, self._tensor_bytes)

    @property
    def row_work_bytes(self) -> int:
        """Temporary memory for each row, without the bytes of strings."""
        item, tensor = self._item_bytes, self._tensor_bytes
        # Decoded, without nulls, and as the tensor; list elements also have an index.
        each = 2 * (item + tensor) + MASK_BYTES
        if item != tensor:
            each += CAST_BYTES
        if self.sent.is_ragged:
            each += 2 * arrays.INDEX_BYTES
        return self._row_elements * each

    @property
    def _row_elements(self) -> int:
        return max(self.spec.elements, len(self.paths))

    @property
    def _item_bytes(self) -> int:
        return max((arrays.item_bytes(path.type) for path in self.paths), default=0)

    @property
    def _tensor_bytes(self) -> int:
        return TEXT_BYTES if self.spec.is_string else max(self.spec.type.dtype.arrow_bits // 8, 1)

    @property
    def expands_text(self) -> bool:
        """Whether a few bytes of strings may become many."""
        types = pa.types
        return self.sent.is_text and any(
            not (types.is_string(path.type) or types.is_large_string(path.type))
            for path in self.paths
        )

    def text_bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes of the entry's strings when decoded."""
        if not self.sent.is_text:
            return 0
        return sum(arrays.decoded_text_bytes(column_at(batch, path.indices)) for path in self.paths)

    def view_index_bytes(self, batch: pa.RecordBatch) -> int:
        """Memory to expand list views, which may share elements."""
        if not self.sent.is_ragged:
            return 0
        return arrays.view_index_bytes(column_at(batch, self.paths[0].indices))

    def make(self, batch: pa.RecordBatch) -> BuiltTensor:
        """Read the entry's columns; raises ContractError for values the tensor cannot hold."""
        columns = [column_at(batch, path.indices) for path in self.paths]
        if self.sent.is_ragged:
            return _Ragged(self, columns[0])
        return _Text(self, columns) if self.spec.is_string else _Numbers(self, columns)

    def mask(self, valid: np.ndarray | None, shape: tuple[int, ...]) -> dict[str, Buffers]:
        """The entry's mask tensor, if declared."""
        if not (name := self.entry.mask):
            return {}
        whole = np.ones(shape, np.bool_) if valid is None else valid
        return {name: _buffer(whole, self._specs[name])}

    def lengths(self, lengths: np.ndarray) -> dict[str, Buffers]:
        """The entry's tensor of list lengths, if declared."""
        if not (name := self.entry.lengths):
            return {}
        spec, location = self._specs[name], ValueLocation(self.names[0])
        return {
            name: _buffer(casts.cast_values(Values(lengths), spec.type.dtype_name, location), spec)
        }

    def elements(
        self, array: pa.Array, location: ValueLocation
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Elements of the tensor's type, nulls filled in; and the mask of valid ones."""
        entry, dtype_name = self.entry, self.spec.type.dtype_name
        values = self._numbers(array, location)
        data, valid = casts.cast_values(values, dtype_name, location), values.valid
        if valid is None:
            return data, None
        if self.rejects_nulls:
            reject_nulls(~valid, location)
        fill = float("nan") if entry.nulls == "nan" else entry.fill
        return np.where(
            valid, data, casts.cast_constant(0 if fill is None else fill, dtype_name)
        ), valid

    def text(self, array: pa.Array, location: ValueLocation) -> tuple[pa.Array, np.ndarray]:
        """Strings as flat `binary`, nulls filled in; and the mask of valid ones, by row."""
        array, shape, validity = arrays.innermost_values(array)
        valid = np.ones(shape, np.bool_) if validity is None else validity
        if validity is not None and self.rejects_nulls:
            reject_nulls(~valid, location)
        if array.type != pa.binary():
            # Numbers become decimal text.
            array = array if self.sent.is_text else array.cast(pa.utf8())
            array = arrays.without_null_views(array).cast(pa.binary())
        if validity is not None:
            fill = pa.scalar(str(self.entry.fill or "").encode(), pa.binary())
            array = pc.if_else(pa.array(valid.reshape(-1)), array, fill)
        return array, valid

    def _numbers(self, array: pa.Array, location: ValueLocation) -> Values:
        """Elements as numbers; dates, times and decimals in the declared unit."""
        family, dtype_name, unit = self.sent.family, self.spec.type.dtype_name, self.entry.unit
        if not family:
            return arrays.stored_elements(array)
        if family == DECIMAL:
            return self._decimals(array, dtype_name, location)
        assert family in TEMPORAL
        assert unit is not None
        source, target = (
            UNIT_NS[arrays.time_unit(arrays.innermost_values(array).array.type)],
            UNIT_NS[unit],
        )
        multiply, divide = max(source // target, 1), max(target // source, 1)
        values = arrays.stored_elements(array)
        data = casts.rescale(values, multiply, divide, dtype_name, location)
        return Values(data, values.valid, dtype_name == BFLOAT16)

    def _decimals(self, array: pa.Array, dtype_name: str, location: ValueLocation) -> Values:
        array, shape, valid = arrays.innermost_values(array)
        unscaled, is_wide = arrays.unscaled_decimals(array)
        multiply, divide = 1, 1
        if is_number := self.entry.conversion == "number":
            scale = array.type.scale
            multiply, divide = 10 ** max(-scale, 0), 10 ** max(scale, 0)
        data: np.ndarray | None = None
        if max(multiply, divide) < 1 << 63:
            values = Values(unscaled.reshape(shape), valid)
            data = casts.rescale(values, multiply, divide, dtype_name, location)
            if is_wide is None:
                return Values(data, valid, dtype_name == BFLOAT16)
        if not is_number or not dtype_name.startswith(("float", "bfloat")):
            text = f"column `{location.column}` has a value of over 64 bits; "
            text += f"{dtype_name} cannot represent it"
            raise ContractError(text, column=location.column)
        floats = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
        wide = casts.cast_values(Values(floats.reshape(shape), valid), dtype_name, location)
        if data is not None and is_wide is not None:
            # A row's value does not depend on the other rows.
            wide = np.where(is_wide.reshape(shape), wide, data)
        return Values(wide, valid, dtype_name == BFLOAT16)


class BuiltTensor:
    """An entry's elements, before the selection of rows; `lengths` are those of lists."""

    lengths: np.ndarray | None = None
    has_buckets = False

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        """The entry's tensors, of some rows or all, with lists padded to `length`."""
        raise NotImplementedError


class _Numbers(BuiltTensor):
    """Numeric columns, stacked along the last axis."""

    def __init__(self, builder: InputBuilder, columns: list[pa.Array]) -> None:
        self._builder = builder
        parts = list(map(builder.elements, columns, map(ValueLocation, builder.names)))
        self._data, self._valid = parts[0]
        if builder.entry.columns:
            self._data = np.stack([data for data, _ in parts], axis=1)
            whole = np.ones(len(columns[0]), np.bool_)
            valid = [whole if valid is None else valid for _, valid in parts]
            self._valid = np.stack(valid, axis=1) if builder.entry.mask else None

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        del length
        data, valid = self._data, self._valid
        if rows is not None:
            data, valid = data[rows], None if valid is None else valid[rows]
        spec = self._builder.spec
        return {spec.tensor: _buffer(data, spec)} | self._builder.mask(valid, data.shape)


class _Text(BuiltTensor):
    """String columns, stacked along the last axis."""

    def __init__(self, builder: InputBuilder, columns: list[pa.Array]) -> None:
        self._builder = builder
        parts = list(map(builder.text, columns, map(ValueLocation, builder.names)))
        self._array, self._valid = parts[0]
        self._strings_per_row = len(self._array) // len(columns[0]) if len(columns[0]) else 1
        if len(parts) > 1:
            whole = pa.concat_arrays([array for array, _ in parts])
            order = np.arange(len(whole)).reshape(len(parts), -1).T.reshape(-1)
            self._array, self._strings_per_row = whole.take(pa.array(order)), len(parts)
            self._valid = np.stack([valid for _, valid in parts], axis=1)

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        del length
        array, valid = self._array, self._valid
        if rows is not None:
            index = rows[:, None] * self._strings_per_row + np.arange(self._strings_per_row)
            array, valid = array.take(pa.array(index.reshape(-1))), valid[rows]
        text = Buffers(*arrays.text_buffers(array))
        return {self._builder.spec.tensor: text} | self._builder.mask(valid, valid.shape)


class _Ragged(BuiltTensor):
    """A column of lists, truncated and padded."""

    def __init__(self, builder: InputBuilder, array: pa.Array) -> None:
        entry, name = builder.entry, builder.names[0]
        self._builder = builder
        found = arrays.list_rows(arrays.decode(array))
        if found.valid is not None and builder.rejects_nulls:
            reject_nulls(~found.valid, ValueLocation(name))
        limit = entry.max_length
        assert limit is not None
        too_long = found.lengths > limit
        if entry.truncate == "refuse" and too_long.any():
            row = int(np.flatnonzero(too_long)[0])
            got = f"column `{name}`: row {row} has {found.lengths[row]} elements, limit {limit}"
            share = f"{int(np.count_nonzero(too_long))} of {len(array)} rows"
            raise ContractError(f"{got} (`max_length` in the manifest; {share})", column=name)
        self.lengths = np.minimum(found.lengths, limit)
        self.has_buckets = bool(entry.buckets)
        self._elements, self._starts = found.elements, found.starts
        if entry.truncate == "tail":
            self._starts = found.starts + found.lengths - self.lengths

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        builder, spec = self._builder, self._builder.spec
        lengths, starts = self.lengths, self._starts
        if not self.has_buckets:
            length = spec.shape[0]
        assert lengths is not None
        if rows is not None:
            lengths, starts = lengths[rows], starts[rows]
        keep = np.arange(length) < lengths[:, None]
        numbers = np.arange(len(lengths)) if rows is None else rows
        location = ValueLocation(builder.names[0], np.repeat(numbers, lengths))
        array = arrays.take_decoded(self._elements, _ranges(starts, lengths))
        pad = self._text if spec.is_string else self._numbers
        tensor, valid = pad(array, keep, location)
        present = keep
        if valid is not None:
            present = keep.copy()
            present[keep] = valid.all(axis=tuple(range(1, valid.ndim)))
        return {spec.tensor: tensor} | builder.mask(present, keep.shape) | builder.lengths(lengths)

    def _numbers(
        self, array: pa.Array, keep: np.ndarray, location: ValueLocation
    ) -> tuple[Buffers, np.ndarray | None]:
        spec, padding = self._builder.spec, self._builder.entry.padding
        data, valid = self._builder.elements(array, location)
        pad = casts.cast_constant(0 if padding is None else padding, spec.type.dtype_name)
        out = np.full((*keep.shape, *data.shape[1:]), pad, data.dtype)
        out[keep] = data
        return _buffer(out, spec), valid

    def _text(
        self, array: pa.Array, keep: np.ndarray, location: ValueLocation
    ) -> tuple[Buffers, np.ndarray | None]:
        padding = self._builder.entry.padding
        texts, valid = self._builder.text(array, location)
        pad = pa.array([str("" if padding is None else padding).encode()], pa.binary())
        at = np.full(keep.size, len(texts))
        at[keep.reshape(-1)] = np.arange(len(texts))
        padded = pa.concat_arrays([texts, pad]).take(pa.array(at))
        return Buffers(*arrays.text_buffers(padded)), valid


def bucket_numbers(built: Sequence[BuiltTensor], buckets: tuple[int, ...]) -> np.ndarray:
    """Index of the smallest bucket that holds all lists of a row, per row."""
    lengths = [each.lengths for each in built if each.lengths is not None and each.has_buckets]
    numbers: np.ndarray = np.searchsorted(buckets, np.max(lengths, axis=0))
    return numbers


def assemble(
    contract: Contract, built: Sequence[BuiltTensor], rows: np.ndarray | None, length: int
) -> list[memoryview]:
    """Buffers of a request: of each input in order, then the bytes of each string input."""
    tensors: dict[str, Buffers] = {}
    for each in built:
        tensors |= each.buffers(rows, length)
    ordered = [tensors[spec.tensor] for spec in contract.inputs]
    joined = [each.joined for each in ordered if each.joined is not None]
    return [*(each.values for each in ordered), *joined]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Indices of the elements of all lists, in order."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _buffer(data: np.ndarray, spec: TensorSpec) -> Buffers:
    """Values in Arrow's layout; booleans are bits."""
    if spec.type.dtype_name == "bool":
        return Buffers(np.packbits(data.reshape(-1).astype(np.bool_), bitorder="little").data)
    dtype = np.dtype(spec.type.dtype.numpy)
    return Buffers(np.ascontiguousarray(data, dtype).reshape(-1).view(np.uint8).data)
