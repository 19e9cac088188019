"""Which bytes outside of an ONNX file its tensors are, read by walking the protobuf.

Those names decide what the runtime will open, so they are read as it reads them, and what it may
read otherwise is refused.

    one frame for each open message:  kind, where to go on, where it ends, what it says of a file

Runs on: worker main, the process that tries a model out, and the operator's tool.

Source: onnx.proto (ModelProto, GraphProto, TensorProto.external_data), protobuf wire format.
"""

from __future__ import annotations

from typing import NamedTuple

from iskander.errors import ManifestError
from iskander.varint import read_varint

DEPTH_MAX = 64
"""Of messages within messages; a model with a loop in a loop in a loop has about twenty."""
FIELDS_MAX = 1 << 25
"""Under a minute; a forest of three million nodes has so many, a network some thousands."""
TENSORS_MAX = 1 << 18
"""Outside of one model file."""
ENTRY_FIELDS_MAX = 16
NAME_BYTES_MAX = 1 << 16
TAG_BITS = 32
"""Protobuf cuts a tag to so many, and would read another field than one that does not."""

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
_KEYS = ("location", "offset", "length")


class ExternalTensor(NamedTuple):
    """Where a tensor's bytes lie outside of the model file; `length` is 0 for up to its end."""

    location: str
    offset: int
    length: int


def external_tensors(raw: memoryview, name: str) -> list[ExternalTensor]:
    """Every reference of an ONNX file to bytes outside of it.

    Raises:
        ManifestError: It is cut off, is no protobuf, is nested too deeply, or has too many fields
            or tensors outside.
    """
    found: list[ExternalTensor] = []
    above: list[tuple[int, int, int, dict[str, str]]] = []
    kind, at, stop = _MODEL, 0, len(raw)
    entries: dict[str, str] = {}
    fields = 0
    while True:
        inner = _INNER[kind]
        while at < stop:
            fields += 1
            if fields > FIELDS_MAX:
                raise ManifestError(f"`{name}` has more than {FIELDS_MAX} fields")
            number, begin, at = read_field(raw, at, stop, name)
            below = inner.get(number)
            if below is None or begin < 0:
                continue
            if below == _ENTRY:
                _note(entries, *read_entry(raw, begin, at, name), name)
                continue
            above.append((kind, at, stop, entries))
            if len(above) > DEPTH_MAX:
                raise ManifestError(f"`{name}` nests graphs more than {DEPTH_MAX} messages deep")
            kind, at, stop, entries = below, begin, at, {}
            inner = _INNER[kind]
        if "location" in entries:
            found.append(_external(entries, name))
            if len(found) > TENSORS_MAX:
                raise ManifestError(f"`{name}` has more than {TENSORS_MAX} tensors outside of it")
        if not above:
            return found
        kind, at, stop, entries = above.pop()


def read_entry(raw: memoryview, at: int, stop: int, name: str) -> tuple[str, str]:
    """Key and value of an entry of a tensor's external data."""
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
                raise ManifestError(f"`{name}` names a file of weights in no UTF-8") from None
    return texts[1], texts[2]


def read_field(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int, int]:
    """A field's number, where its bytes begin (-1 where it has none) and where it ends."""
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


def _note(entries: dict[str, str], key: str, value: str, name: str) -> None:
    """Keep what an entry says of where a tensor lies; of two the runtime might believe either."""
    if key not in _KEYS:
        return
    if key in entries:
        raise ManifestError(f"`{name}` has a tensor that says its {key} twice")
    entries[key] = value


def _external(entries: dict[str, str], name: str) -> ExternalTensor:
    numbers = [entries.get(key, "0") for key in _KEYS[1:]]
    if not all(text.isascii() and text.isdecimal() and len(text) < 20 for text in numbers):
        shown = [text[:20] for text in numbers]
        raise ManifestError(f"`{name}` has a tensor at {shown} of a file, which are no numbers")
    return ExternalTensor(entries["location"], *map(int, numbers))


def _varint(raw: memoryview, at: int, stop: int, name: str) -> tuple[int, int]:
    try:
        return read_varint(raw[:stop], at)
    except IndexError:
        raise _malformed(name, at) from None


def _malformed(name: str, at: int) -> ManifestError:
    return ManifestError(f"`{name}` is no ONNX model, or is cut off: byte {at} makes no sense")
