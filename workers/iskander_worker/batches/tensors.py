"""Memory as tensors, and error texts of libraries without source paths.

Runs on: worker main.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence

import numpy as np

from iskander.errors import ExecutionFailed

TEXT_MAX = 4000
"""Limit of the characters of an error: the time of the pattern grows with their square."""
_SOURCE_PATH = re.compile(r"/\S*\.(?:cc|cpp|cu|h|so|onnx|py)\S*")
_PROFILES = "Following input(s) has no associated shape profiles provided"


def memory_at(address: int, length_bytes: int) -> np.ndarray:
    """Return the bytes at an address as an array; the caller keeps them allocated."""
    if not length_bytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def pack_booleans(tensor: np.ndarray) -> np.ndarray:
    """Return a boolean tensor as Arrow bits."""
    return np.packbits(tensor.view(np.uint8).reshape(-1), bitorder="little")


def fits_rows(found: Sequence[int], rows: int, shape: Sequence[int]) -> bool:
    """Whether a tensor has `rows` rows of `shape`, without regard to axes of one element.

    Some exporters declare `[n]` and return `[n, 1]`.
    """
    has_rows = len(found) > 0 and found[0] == rows
    return has_rows and [n for n in found[1:] if n != 1] == [n for n in shape if n != 1]


def shape_error(
    tensor: str, found: Sequence[int], expected: Sequence[int | str]
) -> ExecutionFailed:
    """Return the error of a result whose shape differs from the contract."""
    error = ExecutionFailed(
        f"output `{tensor}` has shape {list(found)} for this batch, expected {list(expected)} by "
        "the contract"
    )
    error.is_shape = True
    return error


def error_text(error: BaseException) -> str:
    """Return the first line of a library's error, without source paths.

    TensorRT's list of inputs without a profile is kept too: an operator needs their names.
    """
    try:
        text = str(error)[:TEXT_MAX]
    except Exception:
        text = ""  # The `__str__` of a library's own error can raise.
    first, *others = text.split("\n")
    first = _SOURCE_PATH.sub("<source>", first.strip() or type(error).__name__)
    return " ".join((first, *(line.strip() for line in others if line.startswith(_PROFILES))))
