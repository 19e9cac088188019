"""Open Inference Protocol messages as bytes: request scanner and response framing.

A protobuf runtime would copy every tensor. The scanner removes the large and changing fields from
a request; the rest is small, often identical between requests, and parsed as a whole. A response is
a head, followed by the results without a copy.

Pure. Source: Open Inference Protocol v2, `ModelInferRequest` and `ModelInferResponse`; protobuf
encoding.
"""

from __future__ import annotations

from builtins import memoryview  # mypyc resolves the types of fields here.
from typing import Final, TypeAlias

from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.foundation.varint import encode_varint, read_varint
from iskander.gateway.transport.http2.call import Message

VARINT: Final = 0
I64: Final = 1
LEN: Final = 2
I32: Final = 5
FIXED_BYTES: Final = {I64: 8, I32: 4}
_REQUEST_ID: Final = 3 << 3 | LEN
_INPUT: Final = 5 << 3 | LEN
_INPUT_KEY: Final = bytes((_INPUT,))
_CONTENTS: Final = 5 << 3 | LEN
_RAW_INPUT: Final = 7 << 3 | LEN
_RESPONSE_ID: Final = b"\x1a"
_RAW_OUTPUT: Final = b"\x32"
_INFER_RESPONSE: Final = b"\x12"
_KEY_BYTES_MAX: Final = 5
_KEY_MIN: Final = 1 << 3
_KEY_MAX: Final = (1 << 32) - 1
_MALFORMED: Final = "the message is not a ModelInferRequest"

HEAD_BYTES_MAX: Final = 1 << 20
"""Limit of `Scanned.head`."""
_REPEATED_FIELDS: Final = 4
"""Inputs, outputs, parameters, raw contents: `limits.columns` of each."""
_SINGLE_FIELDS: Final = 16
_INPUT_FIELDS_FACTOR: Final = 4
"""Limit of fields within inputs per field of a request; only for typed contents."""

_Cut: TypeAlias = tuple[int, int, bytes]
"""Begin and end of a removed range, and its replacement."""


class Scanned:
    """A request, split into id, tensor contents and the rest.

    Args:
        head: The rest; a valid ModelInferRequest.
        id: In UTF-8.
        raw: Raw contents in the order of the inputs; empty if the contents are typed.
        typed: Typed contents by input index, each an InferTensorContents. If there are raw
            contents too, it is empty and `head` keeps the typed ones.
    """

    __slots__ = ("head", "id", "raw", "typed")

    def __init__(
        self, head: bytes, id: bytes, raw: list[memoryview], typed: dict[int, memoryview]
    ) -> None:
        self.head = head
        self.id = id
        self.raw = raw
        self.typed = typed


def scan(message: Message, limits: LimitsConfig) -> Scanned:
    """Split a ModelInferRequest without a copy of its tensors."""
    view = memoryview(message)
    position, end = 0, len(view)
    left = fields_max = _REPEATED_FIELDS * limits.columns + _SINGLE_FIELDS
    inputs: list[tuple[int, int, int]] = []
    cuts: list[_Cut] = []
    raw: list[memoryview] = []
    typed: dict[int, memoryview] = {}
    request_id = b""
    try:
        while position < end:
            start = position
            key, begin, position = read_field(message, position, end)
            left -= 1
            if left < 0:
                raise LimitExceeded(f"request has over {fields_max} fields (`limits.columns`)")
            if key == _INPUT:
                inputs.append((start, begin, position))
            elif key == _RAW_INPUT:
                raw.append(view[begin:position])
                cuts.append((start, position, b""))
            elif key == _REQUEST_ID:
                request_id = view[begin:position].tobytes()
                request_id.decode()
                cuts.append((start, position, b""))
        if not raw:
            typed = _cut_contents(view, inputs, _INPUT_FIELDS_FACTOR * fields_max, cuts)
    except (IndexError, UnicodeDecodeError):
        raise MalformedInput(_MALFORMED) from None
    return Scanned(_apply_cuts(message, cuts), request_id, raw, typed)


def read_field(message: Message, position: int, end: int) -> tuple[int, int, int]:
    """Return the key, and the begin and end of the value, of the field at `position`.

    Raises:
        MalformedInput: The field exceeds the message's end, or has an invalid key or wire type.
        IndexError: A varint is incomplete or too long.
    """
    key, begin = read_varint(message, position)
    if begin - position > _KEY_BYTES_MAX or not _KEY_MIN <= key <= _KEY_MAX:
        raise MalformedInput(_MALFORMED)
    kind = key & 7
    if kind == LEN:
        length, begin = read_varint(message, begin)
        position = begin + length
    elif kind == VARINT:
        _, position = read_varint(message, begin)
    elif kind in FIXED_BYTES:
        position = begin + FIXED_BYTES[kind]
    else:
        raise MalformedInput(_MALFORMED)
    if position > end:
        raise MalformedInput(_MALFORMED)
    return key, begin, position


def _cut_contents(
    view: memoryview, inputs: list[tuple[int, int, int]], fields_max: int, cuts: list[_Cut]
) -> dict[int, memoryview]:
    """Return the typed contents by input index, and add their cuts in order.

    Each of `inputs` is the start of the field, the start of the value, and the end.
    """
    typed: dict[int, memoryview] = {}
    left = fields_max
    for number, (start, begin, end) in enumerate(inputs):
        position = begin
        while position < end:
            key_at = position
            key, value_at, position = read_field(view, position, end)
            left -= 1
            if left < 0:
                raise LimitExceeded(f"inputs have over {fields_max} fields (`limits.columns`)")
            if key != _CONTENTS:
                continue
            if number in typed:
                raise MalformedInput("an input has its contents twice")
            typed[number] = view[value_at:position]
            cuts += (
                (start, begin, _INPUT_KEY + encode_varint(end - begin - (position - key_at))),
                (key_at, position, b""),
            )
    cuts.sort()
    return typed


def _apply_cuts(message: Message, cuts: list[_Cut]) -> bytes:
    """Return the request with all cuts applied."""
    size = len(message)
    for begin, end, replacement in cuts:
        size += len(replacement) - (end - begin)
    if size > HEAD_BYTES_MAX:
        raise LimitExceeded(f"request has {size} bytes beside its tensors, limit {HEAD_BYTES_MAX}")
    pieces: list[Message] = []
    position = 0
    for begin, end, replacement in cuts:
        if position < begin:
            pieces.append(message[position:begin])
        if replacement:
            pieces.append(replacement)
        position = end
    if position < len(message):
        pieces.append(message[position:])
    return b"".join(pieces)


def with_id(head: bytes, request_id: bytes) -> bytes:
    """Append a request's id to the head of a ModelInferResponse."""
    if not request_id:
        return head
    return b"".join((head, _RESPONSE_ID, encode_varint(len(request_id)), request_id))


def raw_head(length: int) -> bytes:
    """Return key and length of a raw output field; these fields follow the head."""
    return _RAW_OUTPUT + encode_varint(length)


def in_stream(parts: list[Message]) -> list[Message]:
    """Wrap a ModelInferResponse in a ModelStreamInferResponse."""
    return [_INFER_RESPONSE + encode_varint(sum(map(len, parts))), *parts]
