"""Weights in safetensors files, which contain no code.

Runs on: worker main. Source: the safetensors format (header length, JSON header, one block of
data).
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from iskander.errors import ManifestError
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe

HEADER_BYTES_MAX = 16 << 20
RANK_MAX = 16
SAFETENSORS = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "uint16",
    "F32": "float32", "F64": "float64",
}  # fmt: skip
"""Element types by their safetensors names; NumPy has no bfloat16, so its bits are uint16."""

Length = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


@thread_safe
class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor in a file; `data_offsets` are its start and end, from the end of the header."""

    dtype: str
    shape: tuple[Length, ...]
    data_offsets: tuple[Length, Length]


def inspect_safetensors(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """Return the tensors of a file by name, and the offset of its data block.

    A `ManifestError` is raised if a tensor exceeds the file or overlaps another.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        begin = 8 + length
        end = path.stat().st_size - begin
        if length > HEADER_BYTES_MAX or end < 0:
            raise ManifestError(f"`{path.name}` is no safetensors file: header length {length}")
        raw = file.read(length)
    try:
        entries = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        tensors = {
            name: msgspec.json.decode(raw, type=StoredTensor) for name, raw in entries.items()
        }
    except DECODE_ERRORS as error:
        raise ManifestError(f"`{path.name}` is no safetensors file: {error}") from None
    at = 0
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, last = stored.data_offsets
        is_known = stored.dtype in SAFETENSORS and len(stored.shape) <= RANK_MAX
        length = prod(stored.shape) * np.dtype(SAFETENSORS.get(stored.dtype, "uint8")).itemsize
        if not is_known or first < at or last > end or last - first != length:
            raise ManifestError(
                f"`{path.name}`: tensor `{name[:100]}` of {stored.dtype[:20]} "
                f"{list(stored.shape)[:RANK_MAX]} has invalid offsets {first} to {last}"
            )
        at = last
    return tensors, begin


def load_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as read-only arrays, mapped and not copied."""
    tensors, begin = inspect_safetensors(path)
    mapped = np.memmap(path, np.uint8, mode="r")
    return {
        name: np.frombuffer(
            mapped[begin + stored.data_offsets[0] : begin + stored.data_offsets[1]],
            SAFETENSORS[stored.dtype],
        ).reshape(stored.shape)
        for name, stored in tensors.items()
    }
