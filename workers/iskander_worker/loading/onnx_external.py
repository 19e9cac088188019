"""External tensor data of an ONNX file: walks the protobuf for references to other files.

The references decide which files the runtime opens. They are parsed as the runtime parses them,
and ambiguous encodings are rejected.

    stack frame of an open message:  kind, next offset, end, external data entries

Runs on: worker main, the process of a sandboxed load, and the operator's tool. Source: onnx.proto
(ModelProto, GraphProto, TensorProto.external_data), protobuf wire format.
"""

from __future__ import annotations

from typing import NamedTuple

from iskander.errors import ManifestError
from iskander.foundation.varint import read_varint

DEPTH_MAX = 64
"""Limit of nested messages; a model with a loop in a loop in a loop has about twenty."""
FIELDS_MAX = 1 << 25
"""Limit of the parsed fields; parsing them takes under a minute. A tree ensemble of three million
nodes has that many fields, a neural network some thousands."""
TENSORS_MAX = 1 << 18
"""Limit of the external tensors of one model file."""
ENTRY_FIELDS_MAX = 16
NAME_BYTES_MAX = 1 << 16
TAG_BITS = 32
"""Protobuf truncates a tag to this length; a longer tag could be read as another field."""

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
"""Field numbers that can lead to a tensor, for each kind of message."""
_KEYS = ("location", "offset", "length")


class ExternalTensor(NamedTuple):
    """Location of a tensor's bytes; a `length` of 0 means up to the end of the file."""

    location: str
    offset: int
    length: int


def external_tensors(raw: memoryview, name: str) -> list[ExternalTensor]:
    """Return every reference to another file; raise a `ManifestError` if the file is malformed."""
    found: list[ExternalTensor] = []
    open_messages: list[tuple[int, int, int, dict[str, str]]] = []
    kind, at, stop = _MODEL, 0, len(raw)
    entries: dict[str, str] = {}
    fields = 0
    while True:
        inner = _INNER[kind]
        while at < stop:
            fields += 1
            if fields > FIELDS_MAX:
                raise ManifestError(f"`{name}` has too many fields, limit {FIELDS_MAX}")
            number, begin, at = read_field(raw, at, stop, name)
            inner_kind = inner.get(number)
            if inner_kind is None or begin < 0:
                continue
            if inner_kind == _ENTRY:
                key, value = read_entry(raw, begin, at, name)
                if key in _KEYS:
                    if key in entries:  # The runtime may use either.
                        raise ManifestError(f"`{name}` has a tensor with two entries `{key}`")
                    entries[key] = value
                continue
            open_messages.append((kind, at, stop, entries))
            if len(open_messages) > DEPTH_MAX:
                raise ManifestError(f"`{name}` nests messages too deeply, limit {DEPTH_MAX}")
            kind, at, stop, entries = inner_kind, begin, at, {}
            inner = _INNER[kind]
        if "location" in entries:
            found.append(_external(entries, name))
            if len(found) > TENSORS_MAX:
                raise ManifestError(f"`{name}` has too many external tensors, limit {TENSORS_MAX}")
        if not open_messages:
            return found
        kind, at, stop, entries = open_messages.pop()


def read_entry(raw: memoryview, at: int, stop: int, name: str) -> tuple[str, str]:
    """Return the key and value of an external data entry."""
    texts = {1: "", 2: ""}
    fields = 0
    while at < stop:
        number, begin, at = read_field(raw, at, stop, name)
        fields += 1
        if fields > ENTRY_FIELDS_MAX or (begin >= 0 and at - begin > NAME_BYTES_MAX):
            raise _malformed(name, at)
        if number in texts and begin >= 0:
            try:
                texts[number] = bytes(raw[begin:at]).decode()
            except UnicodeDecodeError:
                raise ManifestError(f"`{name}` has external data that is no UTF-8") from None
    return texts[1], texts[2]


def read_field(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int, int]:
    """Return the number of a field, the start of its bytes (-1 for an integer), and its end."""
    tag = raw[at]
    if tag < 0x80:
        at += 1
    else:
        tag, at = _varint(raw, at, stop, name)
    number, wire = tag >> 3, tag & 7
    begin = -1
    if wire == 0:
        if at < stop and raw[at] < 0x80:
            at += 1
        else:
            _, at = _varint(raw, at, stop, name)
    elif wire == 2:
        if at < stop and raw[at] < 0x80:
            length, begin = raw[at], at + 1
        else:
            length, begin = _varint(raw, at, stop, name)
        at = begin + length
    elif wire == 5:
        at += 4
    elif wire == 1:
        at += 8
    else:
        raise _malformed(name, at)
    if at > stop or not number or tag >> TAG_BITS:
        raise _malformed(name, at)
    return number, begin, at


def _external(entries: dict[str, str], name: str) -> ExternalTensor:
    numbers = [entries.get(key, "0") for key in _KEYS[1:]]
    if not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers):
        shown = [text[:20] for text in numbers]
        raise ManifestError(f"`{name}` has a tensor with invalid offset and length {shown}")
    return ExternalTensor(entries["location"], *map(int, numbers))


def _varint(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int]:
    try:
        return read_varint(raw[:stop], at)
    except IndexError:
        raise _malformed(name, at) from None


def _malformed(name: str, at: int) -> ManifestError:
    return ManifestError(f"`{name}` is no ONNX model, or is truncated: invalid data at byte {at}")
