"""Rows of the prediction log from a sample: left out, hashed and plain columns.

The files have plain types that every reader of Parquet knows: lists instead of tensors of a fixed
size, which differ between the buckets of a model, and float32 for 16-bit floats.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from iskander.arrow.types import BFloat16
from iskander.config.observation import ModelLogConfig
from iskander.errors import ConfigError
from iskander.sampling.prediction_log.hashing import hash_column
from iskander.sampling.prediction_log.layout import ROW, TIME, TRACE_ID, names_of
from iskander.sampling.sample import Sample

OFFSETS_MAX: Final = (1 << 31) - 1


class Column(NamedTuple):
    """Column of the files: its name, and the position of its tensor in the batch."""

    name: str
    position: int
    is_input: bool
    is_hashed: bool


class Columns:
    """Columns of the files of one model and contract.

    Raises:
        ConfigError: `omit` or `hash` names no column. The sample must not be logged: the setting
            may be the only protection of a column.
    """

    def __init__(self, sample: Sample, settings: ModelLogConfig, key: bytes) -> None:
        names = names_of(sample.inputs.schema.names, sample.outputs.schema.names)
        known = {*names.inputs, *names.outputs}
        for setting, wanted in (("omit", settings.omit), ("hash", settings.hash)):
            if unknown := sorted(set(wanted) - known):
                raise ConfigError(
                    f"models.prediction_log.{setting} of {sample.model}/{sample.version}: there is "
                    f"no column `{unknown[0]}`; the columns are {', '.join(sorted(known))}"
                )
        self._key = key
        sides = ((names.inputs, True), (names.outputs, False))
        self._columns = [
            Column(name, index, is_input, name in settings.hash)
            for side, is_input in sides
            for index, name in enumerate(side)
            if name not in settings.omit
        ]

    def rows_of(self, sample: Sample) -> pa.RecordBatch:
        """Return the rows of a sample."""
        rows = sample.rows
        arrays = [
            pa.repeat(pa.scalar(sample.trace_id), rows),
            pa.repeat(pa.scalar(sample.time_ns // 1000, pa.timestamp("us", "UTC")), rows),
            pa.array(np.arange(rows, dtype=np.uint32)),
        ]
        for column in self._columns:
            batch = sample.inputs if column.is_input else sample.outputs
            array = batch.column(column.position)
            arrays.append(hash_column(array, self._key) if column.is_hashed else plain(array))
        names = [TRACE_ID, TIME, ROW, *(column.name for column in self._columns)]
        return pa.RecordBatch.from_arrays(arrays, names)


def plain(array: pa.Array) -> pa.Array:
    """Convert an array without nulls to a plain type."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        is_bfloat16 = isinstance(kind, BFloat16)
        return _widen(array.storage) if is_bfloat16 else plain(array.storage)
    if pa.types.is_fixed_size_list(kind):
        values = plain(array.flatten())
        ends = np.arange(len(array) + 1, dtype=np.int64) * kind.list_size
        if len(values) > OFFSETS_MAX:
            return pa.LargeListArray.from_arrays(ends, values)
        return pa.ListArray.from_arrays(ends.astype(np.int32), values)
    return array.cast(pa.float32()) if pa.types.is_float16(kind) else array


def _widen(storage: pa.Array) -> pa.Array:
    """Convert the bits of bfloat16, the upper half of a float32."""
    bits = storage.to_numpy(zero_copy_only=True).astype(np.uint32) << 16
    return pa.array(bits.view(np.float32))
