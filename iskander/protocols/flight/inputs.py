"""A model's tensors made of a batch's columns, where these are not the tensors as they come.

    schema, contract  ->  Maker      of each entry: where its columns are, and that they fit
    batch             ->  Made       its elements, decoded, without nulls, of the tensor's type
    Made, some rows   ->  Buffers    as an arena has them

What a row of lists becomes depends on the rows that it is padded together with, so that is done
last, for as many rows and elements as are asked for.

Runs on: gateway loop, and the thread that reads large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from iskander.arrow import casts
from iskander.arrow.casts import BFLOAT16, UNIT_NS, ValueLocation, Values, refuse_nulls
from iskander.arrow.values import (
    Path,
    decimals,
    decoded,
    elements,
    find,
    is_sent_as,
    leaf,
    lists,
    pick,
    shared_bytes,
    taken,
    text_buffers,
    time_unit,
    written_bytes,
)
from iskander.contract.column_types import DECIMAL, TEMPORAL, parse_sent_type
from iskander.contract.inputs import columns_of
from iskander.contract.manifest import InputColumn
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError


class Buffers(NamedTuple):
    """One tensor as an arena has it: values, or the offsets of strings and their bytes."""

    values: memoryview
    joined: memoryview | None = None


class InputBuilder:
    """Makes the tensors of one entry.

    Args:
        entry: Of the contract, with its defaults.
        contract: Of the model version.
        schema: Of the stream.

    Attributes:
        paths: Of the entry's columns, as far as they were found.
        is_nested: One of them is in a struct.
        are_nulls_refused: Nothing is to stand for a null.
        problems: Columns that are missing or of another type.
    """

    def __init__(self, entry: InputColumn, contract: Contract, schema: pa.Schema) -> None:
        self.entry = entry
        self.sent = parse_sent_type(entry.type)
        self._specs = {spec.tensor: spec for spec in contract.inputs}
        self.spec = self._specs[entry.tensor]
        self.are_nulls_refused = entry.nulls in (None, "reject")
        self.names = columns_of(entry)
        self.paths: list[Path] = []
        self.is_nested = False
        self.problems: list[str] = []
        for name in self.names:
            path = find(schema, name)
            if path is None:
                self.problems.append(f"column `{name}` is missing: wanted {self.sent}")
            elif not is_sent_as(path.type, self.sent):
                self.problems.append(
                    f"column `{name}`: wanted {self.sent}, got {path.type}"
                    + (", which has no values" if pa.types.is_null(path.type) else "")
                )
            else:
                self.paths.append(path)
                self.is_nested = self.is_nested or len(path.indices) > 1

    def text_bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes of the column's strings when each is written out, before any is."""
        if not self.sent.is_text:
            return 0
        return sum(written_bytes(pick(batch, path.indices)) for path in self.paths)

    def shared_bytes(self, batch: pa.RecordBatch) -> int:
        """Bytes of lists that may be of the same elements when each is written out."""
        if not self.sent.is_ragged:
            return 0
        return shared_bytes(pick(batch, self.paths[0].indices))

    def make(self, batch: pa.RecordBatch) -> BuiltTensor:
        """Read the entry's columns.

        Raises:
            ContractError: Nulls that are not allowed, or a value that the tensor cannot hold.
        """
        arrays = [pick(batch, path.indices) for path in self.paths]
        if self.sent.is_ragged:
            return _Ragged(self, arrays[0])
        if self.spec.is_string:
            return _Text(self, arrays)
        return _Numbers(self, arrays)

    def others(self, valid: np.ndarray | None, shape: tuple[int, ...]) -> dict[str, Buffers]:
        """The mask, where the entry has one."""
        mask = self.entry.mask
        if not mask:
            return {}
        whole = np.ones(shape, np.bool_) if valid is None else valid
        return {mask: _buffer(whole, self._specs[mask])}

    def lengths(self, lengths: np.ndarray) -> dict[str, Buffers]:
        """The lengths of lists, where the entry has a tensor for them.

        Raises:
            ContractError: One is larger than the tensor's type can say.
        """
        name = self.entry.lengths
        if not name:
            return {}
        spec = self._specs[name]
        where = ValueLocation(self.names[0])
        return {name: _buffer(casts.cast(Values(lengths), spec.type.dtype_name, where), spec)}

    def whole(self, values: Values, where: ValueLocation) -> tuple[np.ndarray, np.ndarray | None]:
        """Elements as the tensor has them, nulls done away with, and where there were none."""
        entry, wanted = self.entry, self.spec.type.dtype_name
        data, valid = casts.cast(values, wanted, where), values.valid
        if valid is None:
            return data, None
        if self.are_nulls_refused:
            refuse_nulls(~valid, where)
        if entry.nulls == "nan":
            filled = casts.constant(float("nan"), wanted)
        else:
            filled = casts.constant(entry.fill if entry.fill is not None else 0, wanted)
        return np.where(valid, data, filled), valid

    def numbers(self, array: pa.Array, where: ValueLocation) -> Values:
        """An array's elements as numbers that can be cast to the tensor's type."""
        family = self.sent.family
        if not family:
            return elements(array)
        return self._converted(array, family, where)

    def _converted(self, array: pa.Array, family: str, where: ValueLocation) -> Values:
        """Dates, times and decimals as numbers of the declared unit."""
        wanted, unit = self.spec.type.dtype_name, self.entry.unit
        if family == DECIMAL:
            return self._undecimal(array, wanted, where)
        assert family in TEMPORAL
        assert unit is not None
        values = elements(array)
        of = leaf(array).array.type
        source, target = UNIT_NS[time_unit(of)], UNIT_NS[unit]
        multiply, divide = max(source // target, 1), max(target // source, 1)
        data = casts.rescale(values, multiply, divide, wanted, where)
        return Values(data, values.valid, wanted == BFLOAT16)

    def _undecimal(self, array: pa.Array, wanted: str, where: ValueLocation) -> Values:
        array, shape, valid = leaf(array)
        unscaled, scale = decimals(array)
        is_number = self.entry.conversion == "number"
        multiply, divide = 1, 1
        if is_number:
            multiply, divide = 10 ** max(-scale, 0), 10 ** max(scale, 0)
        is_small = max(multiply, divide) < 1 << 63
        if unscaled is not None and is_small:
            values = _shaped(unscaled, shape, valid)
            data = casts.rescale(values, multiply, divide, wanted, where)
            return Values(data, values.valid, wanted == BFLOAT16)
        if not is_number or not wanted.startswith(("float", "bfloat")):
            raise ContractError(
                f"column `{where.column}` has a value that is no {wanted}: it needs over 64 bits",
                column=where.column,
            )
        data = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
        values = _shaped(data, shape, valid)
        return Values(casts.cast(values, wanted, where), values.valid, wanted == BFLOAT16)


class BuiltTensor:
    """What an entry's columns hold, before rows of it are asked for.

    Attributes:
        lengths: Of each row of lists, as it is kept; None where rows are no lists.
        has_buckets: Its tensors are as long as the bucket of their rows.
    """

    lengths: np.ndarray | None = None
    has_buckets = False

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        """The entry's tensors.

        Args:
            rows: Which rows, in order; None: all.
            length: Elements that each row of lists is to have.
        """
        raise NotImplementedError


class _Numbers(BuiltTensor):
    """Columns of numbers; several are one tensor, side by side."""

    def __init__(self, maker: InputBuilder, arrays: list[pa.Array]) -> None:
        self._maker = maker
        parts = []
        for name, array in zip(maker.names, arrays, strict=True):
            where = ValueLocation(name)
            parts.append(maker.whole(maker.numbers(array, where), where))
        self._data, self._valid = parts[0]
        if maker.entry.columns:
            self._data = np.stack([data for data, _ in parts], axis=1)
            whole = np.ones(len(arrays[0]), np.bool_)
            valid = [whole if valid is None else valid for _, valid in parts]
            self._valid = np.stack(valid, axis=1) if maker.entry.mask else None

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        del length
        data, valid = self._data, self._valid
        if rows is not None:
            data, valid = data[rows], None if valid is None else valid[rows]
        spec = self._maker.spec
        return {spec.tensor: _buffer(data, spec)} | self._maker.others(valid, data.shape)


class _Text(BuiltTensor):
    """Columns of strings; several are one tensor, side by side."""

    def __init__(self, maker: InputBuilder, arrays: list[pa.Array]) -> None:
        self._maker = maker
        self._count = len(arrays[0])
        parts = [
            maker_text(maker, array, ValueLocation(name))
            for name, array in zip(maker.names, arrays, strict=True)
        ]
        self._array, self._valid = parts[0]
        self._size = len(self._array) // self._count if self._count else 1
        if len(parts) > 1:
            whole = pa.concat_arrays([array for array, _ in parts])
            order = np.arange(len(whole)).reshape(len(parts), -1).T.reshape(-1)
            self._array, self._size = whole.take(pa.array(order)), len(parts)
            self._valid = np.stack([valid for _, valid in parts], axis=1)

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        del length
        array, valid = self._array, self._valid
        if rows is not None:
            index = rows[:, None] * self._size + np.arange(self._size)
            array, valid = array.take(pa.array(index.reshape(-1))), valid[rows]
        spec = self._maker.spec
        return {spec.tensor: Buffers(*text_buffers(array))} | self._maker.others(valid, valid.shape)


class _Ragged(BuiltTensor):
    """A column of lists: cut to a length, padded to it."""

    def __init__(self, maker: InputBuilder, array: pa.Array) -> None:
        entry = maker.entry
        self._maker = maker
        self._lists = found = lists(decoded(array))
        if found.valid is not None and maker.are_nulls_refused:
            refuse_nulls(~found.valid, ValueLocation(maker.names[0]))
        most = entry.max_length
        assert most is not None
        too_long = found.lengths > most
        if entry.truncate == "refuse" and too_long.any():
            row = int(np.flatnonzero(too_long)[0])
            raise ContractError(
                f"column `{maker.names[0]}`: row {row} has {found.lengths[row]} elements and may "
                f"have {most} ({int(np.count_nonzero(too_long))} of {len(array)} rows)",
                column=maker.names[0],
            )
        self.lengths = np.minimum(found.lengths, most)
        self.has_buckets = bool(entry.buckets)
        self._starts = found.starts
        if entry.truncate == "tail":
            self._starts = found.starts + found.lengths - self.lengths

    def buffers(self, rows: np.ndarray | None, length: int) -> dict[str, Buffers]:
        maker = self._maker
        lengths, starts = self.lengths, self._starts
        if not maker.entry.buckets:
            length = maker.spec.shape[0]
        assert lengths is not None
        if rows is not None:
            lengths, starts = lengths[rows], starts[rows]
        keep = np.arange(length) < lengths[:, None]
        index = _ranges(starts, lengths)
        numbers = np.arange(len(lengths)) if rows is None else rows
        where = ValueLocation(maker.names[0], np.repeat(numbers, lengths))
        if maker.spec.is_string:
            made, valid = self._text(index, keep, where)
        else:
            made, valid = self._numbers(index, keep, where)
        return {maker.spec.tensor: made} | maker.others(valid, keep.shape) | maker.lengths(lengths)

    def _numbers(
        self, index: np.ndarray, keep: np.ndarray, where: ValueLocation
    ) -> tuple[Buffers, np.ndarray]:
        maker = self._maker
        kept = maker.numbers(taken(self._lists.elements, index), where)
        data, valid = maker.whole(kept, where)
        wanted = maker.spec.type.dtype_name
        padding = maker.entry.padding
        pad = casts.constant(padding if padding is not None else 0, wanted)
        out = np.full((*keep.shape, *data.shape[1:]), pad, data.dtype)
        out[keep] = data
        present = keep
        if valid is not None:
            present = keep.copy()
            present[keep] = valid.reshape(len(valid), -1).all(axis=1)
        return _buffer(out, maker.spec), present

    def _text(
        self, index: np.ndarray, keep: np.ndarray, where: ValueLocation
    ) -> tuple[Buffers, np.ndarray]:
        maker = self._maker
        kept, valid = maker_text(maker, taken(self._lists.elements, index), where)
        padding = maker.entry.padding
        pad = pa.array([str(padding if padding is not None else "").encode()], pa.binary())
        at = np.full(keep.size, len(kept))
        at[keep.reshape(-1)] = np.arange(len(kept))
        present = keep.copy()
        present[keep] = valid
        made = pa.concat_arrays([kept, pad]).take(pa.array(at))
        return Buffers(*text_buffers(made)), present


def maker_text(
    maker: InputBuilder, array: pa.Array, where: ValueLocation
) -> tuple[pa.Array, np.ndarray]:
    """Strings as `binary` without nulls, all of them flat; and which were not null, by row."""
    array = decoded(array)
    shape = [len(array)]
    valid = array.is_valid().to_numpy(zero_copy_only=False)
    while pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        array = array.values.slice(array.offset * size, len(array) * size)
        shape.append(size)
        child = array.is_valid().to_numpy(zero_copy_only=False)
        valid = np.repeat(valid, size) & child
    if not valid.all() and maker.are_nulls_refused:
        refuse_nulls(~valid.reshape(shape), where)
    if array.type != pa.binary():
        is_text = maker.sent.is_text
        array = array.cast(pa.binary()) if is_text else array.cast(pa.utf8()).cast(pa.binary())
    if not valid.all():
        fill = pa.scalar(str(maker.entry.fill or "").encode(), pa.binary())
        array = pc.if_else(pa.array(valid), array, fill)
    return array, valid.reshape(shape)


def bucket_numbers(made: Sequence[BuiltTensor], buckets: tuple[int, ...]) -> np.ndarray:
    """The bucket of each row: the smallest that holds all its lists."""
    lengths = [each.lengths for each in made if each.lengths is not None and each.has_buckets]
    numbers: np.ndarray = np.searchsorted(buckets, np.max(lengths, axis=0))
    return numbers


def assemble(
    contract: Contract, made: Sequence[BuiltTensor], rows: np.ndarray | None, length: int
) -> list[memoryview]:
    """The buffers of a request: of each input in order, then the bytes of each that is strings."""
    tensors: dict[str, Buffers] = {}
    for each in made:
        tensors |= each.buffers(rows, length or 0)
    ordered = [tensors[spec.tensor] for spec in contract.inputs]
    joined = [each.joined for each in ordered if each.joined is not None]
    return [*(each.values for each in ordered), *joined]


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The indices of all elements of lists, one list after the other."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def _buffer(data: np.ndarray, spec: TensorSpec) -> Buffers:
    """Values as an Arrow buffer has them; booleans are bits."""
    name = spec.type.dtype_name
    if name == "bool":
        flat = np.packbits(data.reshape(-1).astype(np.bool_), bitorder="little")
    else:
        dtype = np.dtype(spec.type.dtype.numpy)
        flat = np.ascontiguousarray(data, dtype).reshape(-1).view(np.uint8)
    return Buffers(flat.data)


def _shaped(data: np.ndarray, shape: tuple[int, ...], valid: np.ndarray | None) -> Values:
    return Values(data.reshape(shape), None if valid is None else valid.reshape(shape))
