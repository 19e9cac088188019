"""Memory seen as tensors, and the runtime's errors in plain words.

Runs on: worker main.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np

TEXT_MAX = 4000
"""Characters of an error that are looked at; the pattern's time grows with their square."""
_SOURCE_PATH = re.compile(r"/\S*\.(?:cc|cpp|cu|h|so|onnx|py)\S*")


def memory(address: int, length_bytes: int) -> np.ndarray:
    """The bytes at an address; the caller keeps them alive."""
    if not length_bytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def packed(tensor: np.ndarray) -> np.ndarray:
    """A tensor of booleans as Arrow's bits."""
    return np.packbits(tensor.view(np.uint8).reshape(-1), bitorder="little")


def plain(error: BaseException) -> str:
    """The runtime's words without its source paths and stack."""
    try:
        text = str(error)[:TEXT_MAX]
    except Exception:
        text = ""  # A library's own error, whose words cannot be had.
    text = text.split("\n", 1)[0].strip() or type(error).__name__
    return _SOURCE_PATH.sub("<source>", text)
