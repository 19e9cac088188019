"""Packed weights in a saved model, moved to where a kernel can read them.

ONNX Runtime writes packed weights right behind the plain ones, wherever those end. Its kernels read
them with instructions that end the process at an address that is no multiple of 64. So those that
lie elsewhere are written once more at the end of the file, and the model told where.

Runs on: the process that tries a model out.

Source: onnx.proto, and what ONNX Runtime 1.31 writes as the `prepacked_N` entries of a tensor's
external data: `KERNEL|OFFSET;LENGTH;HASH`, with more of the latter where a kernel has several.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

from iskander.errors import ManifestError
from iskander.varint import varint
from iskander_worker.loading.onnx_external import read_entry, read_field

ALIGNMENT = 64
_PATH = (7, 5, 13)
"""From a model to an entry: its graph, the graph's initialisers, their external data."""
_BLOB = re.compile(r"(\d+);(\d+);(\d+)")
_KEY_FIELD, _VALUE_FIELD = b"\x0a", b"\x12"


def align_weights(model: Path, weights: Path) -> None:
    """Move every packed weight of a saved model to a multiple of 64 bytes.

    Raises:
        ManifestError: The runtime has written something else than is known here.
    """
    if not weights.exists():
        return  # No tensor is large enough to lie outside of the model.
    raw = memoryview(model.read_bytes())
    with weights.open("r+b") as stream:
        changed = _rebuilt(raw, 0, len(raw), _PATH, stream)
    model.write_bytes(changed)


def _rebuilt(raw: memoryview, at: int, stop: int, path: tuple[int, ...], stream: BinaryIO) -> bytes:
    """A message with the entries at a path replaced."""
    parts: list[bytes | memoryview] = []
    while at < stop:
        start = at
        number, begin, at = read_field(raw, at, stop, "the saved model")
        if number != path[0] or begin < 0:
            parts.append(raw[start:at])
            continue
        if len(path) > 1:
            inner = _rebuilt(raw, begin, at, path[1:], stream)
        else:
            inner = _moved(raw, begin, at, stream)
        parts += [varint(number << 3 | 2), varint(len(inner)), inner]
    return b"".join(parts)


def _moved(raw: memoryview, begin: int, end: int, stream: BinaryIO) -> bytes:
    key, value = read_entry(raw, begin, end, "the saved model")
    if not key.startswith("prepacked"):
        return bytes(raw[begin:end])
    kernel, *blobs = value.split("|")
    found = [_BLOB.fullmatch(blob) for blob in blobs]
    if not blobs or not all(found):
        raise ManifestError(f"packed weights are noted as `{value[:100]}`, which is not known")
    text = "|".join([kernel, *(_place(match, stream) for match in found if match is not None)])
    return b"".join(
        part
        for tag, body in ((_KEY_FIELD, key.encode()), (_VALUE_FIELD, text.encode()))
        for part in (tag, varint(len(body)), body)
    )


def _place(match: re.Match[str], stream: BinaryIO) -> str:
    offset, length = int(match[1]), int(match[2])
    if offset % ALIGNMENT:
        stream.seek(offset)
        blob = stream.read(length)
        end = stream.seek(0, 2)
        offset = end + -end % ALIGNMENT
        stream.write(bytes(offset - end) + blob)
    return f"{offset};{length};{match[3]}"
