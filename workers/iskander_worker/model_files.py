"""Which files a model is made of, and whether they are what they should be, before any is opened.

An ONNX file names the files that hold its weights. Those names are read here by walking the
protobuf, since they decide what the runtime will open.

Runs on: worker main, the process that tries a model out, and the operator's tool.

Source: onnx.proto (ModelProto, GraphProto, TensorProto.external_data), protobuf wire format.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from iskander.errors import ManifestError
from iskander.wire.varint import read_varint

DEPTH_MAX = 64
"""Of messages within messages; a model with a loop in a loop in a loop has about twenty."""
FILES_MAX = 4096

_MODEL, _GRAPH, _NODE, _ATTRIBUTE, _TENSOR, _SPARSE, _FUNCTION, _TRAINING, _ENTRY = range(9)
_INNER: dict[int, dict[int, int]] = {
    _MODEL: {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION},
    _GRAPH: {1: _NODE, 5: _TENSOR, 15: _SPARSE},
    _NODE: {5: _ATTRIBUTE},
    _ATTRIBUTE: {
        5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE,
    },
    _TENSOR: {13: _ENTRY},
    _SPARSE: {1: _TENSOR, 2: _TENSOR},
    _FUNCTION: {7: _NODE, 11: _ATTRIBUTE},
    _TRAINING: {1: _GRAPH, 2: _GRAPH},
}  # fmt: skip
"""For each kind of message, the fields that can lead to a tensor, by number."""


class External(NamedTuple):
    """Where a tensor's bytes lie outside of the model file; `length` is 0 for up to its end."""

    location: str
    offset: int
    length: int


class ModelFiles(NamedTuple):
    """What a model is made of.

    Attributes:
        paths: By name relative to the model's folder; the model file first.
        digests: SHA-256 of each, as hexadecimal text.
        weight_bytes: Of the files together: what loading takes at least.
    """

    paths: dict[str, Path]
    digests: dict[str, str]
    weight_bytes: int


def inspect_files(file: Path, bytes_max: int) -> ModelFiles:
    """Find, bound and hash the files of a model.

    Args:
        file: The model file.
        bytes_max: The most bytes of them together, and of all that the tensors say to hold.

    Raises:
        ManifestError: One is missing, cut off, too large, or outside of the model's folder.
    """
    size = _size_of(file)
    _require_bytes(file.name, size, bytes_max)
    externals: list[External] = []
    if file.suffix == ".onnx" and size:
        # Mapped, not read: the weights in it stay where they are.
        raw = np.memmap(file, np.uint8, "r").data
        externals = external_tensors(raw, file.name)
        raw.release()
    paths = {file.name: file}
    total = declared = size
    for external in externals:
        path = paths.get(external.location)
        if path is None:
            path = paths[external.location] = confined(file.parent, external.location)
            _require_bytes(file.name, total := total + _size_of(path), bytes_max)
            if len(paths) > FILES_MAX:
                raise ManifestError(f"`{file.name}` names more than {FILES_MAX} files of weights")
        length = external.length or max(_size_of(path) - external.offset, 0)
        if external.offset + length > _size_of(path):
            raise ManifestError(
                f"`{file.name}` wants {length} bytes at {external.offset} of "
                f"`{external.location}`, which has {_size_of(path)}: it is cut off, or another's"
            )
        _require_bytes(file.name, declared := declared + length, bytes_max)
    digests = {}
    for name, path in paths.items():
        with path.open("rb") as stream:
            digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return ModelFiles(paths, digests, total)


def require_pins(
    folder: Path,
    pins: Mapping[str, str],
    digests: Mapping[str, str],
    wanted: Iterable[str] = (),
) -> None:
    """Hold the files of a model against the hashes that its manifest pins them to.

    Args:
        folder: Of the model.
        pins: SHA-256 by file name; a name may be of any file in the folder, such as labels.
        digests: Those that are known already.
        wanted: Names that have to be pinned, as where the manifest is signed for them.

    Raises:
        ManifestError: Names the file, what was pinned and what was found.
    """
    for name, pin in pins.items():
        found = digests.get(name)
        if found is None:
            with confined(folder, name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        if found != pin.lower():
            raise ManifestError(
                f"`{name}` is not the file that the manifest pins: sha256 wanted {pin.lower()}, "
                f"got {found}"
            )
    missing = [name for name in wanted if name not in pins]
    if missing:
        raise ManifestError(
            f"the manifest is signed and pins no sha256 of `{missing[0]}`: what it does not pin, "
            "its signature does not cover"
        )


def confined(folder: Path, name: str) -> Path:
    """A file in a folder, by a name that somebody else chose.

    Raises:
        ManifestError: It is outside, reached by a link that leads outside, has another name
            elsewhere (a hard link), is not a file, or is not there.
    """
    pure = PurePosixPath(name)
    shown = name[:100]
    if not name or "\0" in name or pure.is_absolute() or ".." in pure.parts:
        raise ManifestError(f"the file name `{shown}` leads out of the model's folder")
    path = folder / pure
    try:
        real, status = path.resolve(strict=True), path.stat()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links go in a circle"
        raise ManifestError(f"`{shown}` beside the model cannot be read: {reason}") from None
    if not real.is_relative_to(folder.resolve()):
        raise ManifestError(f"`{shown}` is a link that leads out of the model's folder")
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"`{shown}` beside the model is not a file")
    if status.st_nlink > 1:
        raise ManifestError(
            f"`{shown}` has {status.st_nlink} names (hard links), so it may be a file of somebody "
            "else's; copy it into the model's folder"
        )
    return path


def external_tensors(raw: memoryview, name: str) -> list[External]:
    """Every reference of an ONNX file to bytes outside of it.

    Raises:
        ManifestError: It is cut off, is no protobuf, or is nested too deeply.
    """
    found: list[External] = []
    open_messages = [(_MODEL, 0, len(raw), 0)]
    while open_messages:
        kind, at, stop, depth = open_messages.pop()
        if depth > DEPTH_MAX:
            raise ManifestError(f"`{name}` nests graphs more than {DEPTH_MAX} messages deep")
        inner = _INNER[kind]
        entries: dict[str, str] = {}
        while at < stop:
            number, begin, at = read_field(raw, at, stop, name)
            below = inner.get(number)
            if below is None or begin < 0:
                continue
            if below == _ENTRY:
                key, value = read_entry(raw, begin, at, name)
                entries[key] = value
            else:
                open_messages.append((below, begin, at, depth + 1))
        if "location" in entries:
            found.append(_external(entries, name))
    return found


def _external(entries: dict[str, str], name: str) -> External:
    numbers = [entries.get(key, "0") for key in ("offset", "length")]
    if not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers):
        raise ManifestError(f"`{name}` has a tensor at {numbers} of a file, which are no numbers")
    return External(entries["location"], *map(int, numbers))


def read_entry(raw: memoryview, at: int, stop: int, name: str) -> tuple[str, str]:
    """Key and value of an entry of a tensor's external data."""
    texts = {1: "", 2: ""}
    while at < stop:
        number, begin, at = read_field(raw, at, stop, name)
        if number in texts and begin >= 0:
            try:
                texts[number] = bytes(raw[begin:at]).decode()
            except UnicodeDecodeError:
                raise ManifestError(f"`{name}` names a file of weights in no UTF-8") from None
    return texts[1], texts[2]


def read_field(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int, int]:
    """A field's number, where its bytes begin (-1 where it has none) and where it ends."""
    tag, at = _varint(raw, at, stop, name)
    number, wire = tag >> 3, tag & 7
    begin = -1
    if wire == 0:
        _, at = _varint(raw, at, stop, name)
    elif wire == 2:
        length, begin = _varint(raw, at, stop, name)
        at = begin + length
    elif wire in (1, 5):
        at += 8 if wire == 1 else 4
    else:
        raise _malformed(name, at)
    if at > stop or not number:
        raise _malformed(name, at)
    return number, begin, at


def _varint(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int]:
    try:
        return read_varint(raw[:stop], at)
    except IndexError:
        raise _malformed(name, at) from None


def _malformed(name: str, at: int) -> ManifestError:
    return ManifestError(f"`{name}` is no ONNX model, or is cut off: byte {at} makes no sense")


def _size_of(path: Path) -> int:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ManifestError(
            f"there is no model file `{path.name}` where the configuration says"
        ) from None
    except OSError as error:
        raise ManifestError(f"`{path.name}` cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ManifestError(f"`{path.name}` is not a file")
    return status.st_size


def _require_bytes(name: str, found: int, bytes_max: int) -> None:
    if found > bytes_max:
        raise ManifestError(
            f"`{name}` and its weights are {found} bytes or more, and loading.model_bytes is "
            f"{bytes_max}"
        )
