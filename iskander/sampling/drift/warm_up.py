"""Profile of the batches that a model's manifest records for its warm-up.

Runs on: the observer process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from iskander.contract.formats.samples import read_arrays
from iskander.contract.manifest import Manifest
from iskander.sampling.drift.columns import columns_of
from iskander.sampling.drift.profile import ColumnKey, Profile
from iskander.sampling.drift.reference import InvalidReference


def read_warm_up(folder: Path, manifest: Manifest, columns_max: int) -> Profile | None:
    """Summarize the recorded inputs, and the results if they are recorded; None without any.

    Raises:
        InvalidReference: A file cannot be read.
    """
    if not manifest.warm_up.samples:
        return None
    names = packed_names(manifest)
    profile = Profile(columns_max)
    try:
        for side, batch in _batches(folder, manifest):
            columns = [(ColumnKey(side, name), each) for name, each in columns_of(batch, names)]
            profile.add(batch.num_rows if side == "input" else 0, columns)
    except Exception as error:  # Those of NumPy and pyarrow differ, such as for other lengths.
        raise InvalidReference(f"the warm-up samples cannot be read: {error}") from None
    return profile


def packed_names(manifest: Manifest) -> dict[str, tuple[str, ...]]:
    """Return the columns of each tensor that several columns are packed into."""
    return {each.tensor: each.columns for each in manifest.inputs if each.columns}


def _batches(folder: Path, manifest: Manifest) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Return the recorded inputs and results as batches with the columns of samples."""
    inputs = {each.tensor: each.column or each.tensor for each in manifest.inputs}
    yield "input", _read(folder, manifest.warm_up.samples, inputs)
    if manifest.warm_up.results:
        outputs = {each.tensor: each.column for each in manifest.outputs}
        yield "output", _read(folder, manifest.warm_up.results, outputs)


def _read(folder: Path, name: str, columns: Mapping[str, str]) -> pa.RecordBatch:
    arrays = read_arrays(folder, name)
    return pa.record_batch(
        {columns.get(key, key): _to_arrow(array) for key, array in arrays.items()}
    )


def _to_arrow(array: np.ndarray) -> pa.Array:
    flat = array.reshape(-1)
    values = pa.array(flat.tolist() if array.dtype.kind in "SU" else flat)
    for size in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return values
