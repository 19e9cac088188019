"""Recorded samples of a model: arrays by name in an `.npz` file beside it.

Runs on: the worker that loads the model, and the observer process. Source: NumPy's `.npz`, read
without pickle.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from iskander.contract.paths import path_inside
from iskander.errors import ManifestError

SAMPLE_BYTES_MAX: Final = 1 << 28
_READ_ERRORS: Final = (
    OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, MemoryError,
)  # fmt: skip


def read_arrays(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of an `.npz` file in a model's folder, by name.

    Raises:
        ManifestError: The file cannot be read, or unpacks to more than `SAMPLE_BYTES_MAX`.
    """
    path = path_inside(folder, name)
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(member.file_size for member in archive.infolist())
        if total > SAMPLE_BYTES_MAX:
            raise ManifestError(f"`{name}` unpacks to {total} bytes, limit {SAMPLE_BYTES_MAX}")
        with np.load(path, allow_pickle=False) as archive:
            return {key: archive[key] for key in archive.files}
    except _READ_ERRORS as error:
        raise ManifestError(f"`{name}` is no `.npz` file of plain arrays: {error}") from None
