"""Alignment of prepacked weights in a saved model.

ONNX Runtime writes prepacked weights at any offset, and its kernels read them with instructions
that crash the process unless the address is a multiple of 64. Misaligned weights are copied to an
aligned offset at the end of the file, and the model is updated.

Runs on: the process of a sandboxed load.

Source: onnx.proto, and the `prepacked_N` entries that ONNX Runtime 1.31 writes to a tensor's
external data: `KERNEL|OFFSET;LENGTH;HASH`, with one `|OFFSET;LENGTH;HASH` for each blob.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import BinaryIO

from iskander.errors import ManifestError
from iskander.foundation.varint import encode_varint
from iskander_worker.loading.onnx_external import read_entry, read_field

ALIGNMENT = 64
_ENTRY_PATH = (7, 5, 13)
"""Fields from a model to an external data entry: graph, initialiser, external data."""
_BLOB = re.compile(r"(\d+);(\d+);(\d+)")
_KEY_FIELD, _VALUE_FIELD = b"\x0a", b"\x12"


def align_weights(model: Path, weights: Path) -> None:
    """Align the prepacked weights of a saved model to 64 bytes."""
    if not weights.exists():
        return  # All tensors are small enough to be stored in the model file.
    raw = memoryview(model.read_bytes())
    with weights.open("r+b") as stream:
        aligned = _align_message(raw, 0, len(raw), _ENTRY_PATH, stream)
    model.write_bytes(aligned)


def _align_message(
    raw: memoryview, at: int, stop: int, path: tuple[int, ...], stream: BinaryIO
) -> bytes:
    """Return a message in which the entries at a field path have aligned weights."""
    parts: list[bytes | memoryview] = []
    while at < stop:
        start = at
        number, begin, at = read_field(raw, at, stop, "the saved model")
        if number != path[0] or begin < 0:
            parts.append(raw[start:at])
            continue
        if len(path) > 1:
            inner = _align_message(raw, begin, at, path[1:], stream)
        else:
            inner = _align_entry(raw, begin, at, stream)
        parts += [encode_varint(number << 3 | 2), encode_varint(len(inner)), inner]
    return b"".join(parts)


def _align_entry(raw: memoryview, begin: int, end: int, stream: BinaryIO) -> bytes:
    key, value = read_entry(raw, begin, end, "the saved model")
    if not key.startswith("prepacked"):
        return bytes(raw[begin:end])
    kernel, *blobs = value.split("|")
    found = [_BLOB.fullmatch(blob) for blob in blobs]
    if not blobs or not all(found):
        raise ManifestError(f"prepacked weights have an unknown format: `{value[:100]}`")
    text = "|".join([kernel, *(_align_blob(match, stream) for match in found if match is not None)])
    return b"".join(
        part
        for tag, body in ((_KEY_FIELD, key.encode()), (_VALUE_FIELD, text.encode()))
        for part in (tag, encode_varint(len(body)), body)
    )


def _align_blob(match: re.Match[str], stream: BinaryIO) -> str:
    offset, length = int(match[1]), int(match[2])
    if offset % ALIGNMENT:
        stream.seek(offset)
        blob = stream.read(length)
        end = stream.seek(0, 2)
        offset = end + -end % ALIGNMENT
        stream.write(bytes(offset - end) + blob)
    return f"{offset};{length};{match[3]}"
