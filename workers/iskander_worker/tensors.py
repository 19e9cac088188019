"""Memory seen as tensors, and the runtime's errors in plain words.

Runs on: worker main.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np

_SOURCE_PATH = re.compile(r"/\S*\.(?:cc|cpp|cu|h|so|onnx|py)\S*")


def memory(address: int, length_bytes: int) -> np.ndarray:
    """The bytes at an address; the caller keeps them alive."""
    if not length_bytes:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * length_bytes).from_address(address))


def packed(tensor: np.ndarray) -> np.ndarray:
    """A tensor of booleans as Arrow's bits."""
    return np.packbits(tensor.view(np.uint8).reshape(-1), bitorder="little")


def plain(error: Exception) -> str:
    """The runtime's words without its source paths and stack."""
    text = str(error).split("\n", 1)[0].strip() or type(error).__name__
    return _SOURCE_PATH.sub("<source>", text)
