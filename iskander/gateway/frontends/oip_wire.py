"""Open Inference Protocol messages as bytes: tensors are slices of what came, or parts to send.

A protobuf runtime would copy every tensor. The top level of a request is walked instead: what is
large or different each time is taken out, and what is left is small, the same from request to
request, and parsed as a whole. A response is a head, and the results behind it as they are.

Pure. Source: Open Inference Protocol v2, `ModelInferRequest` and `ModelInferResponse`; protobuf
encoding.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import Final

import msgspec

from iskander.errors import MalformedInput
from iskander.gateway.http2.call import Message
from iskander.wire.varint import read_varint, varint

_VARINT: Final = 0
_I64: Final = 1
_LEN: Final = 2
_I32: Final = 5
_FIXED_BYTES: Final = {_I64: 8, _I32: 4}
_REQUEST_ID: Final = 3 << 3 | _LEN
_RAW_INPUT: Final = 7 << 3 | _LEN
_RESPONSE_ID: Final = b"\x1a"
_RAW_OUTPUT: Final = b"\x32"
_INFER_RESPONSE: Final = b"\x12"
_BROKEN: Final = "the message is not a ModelInferRequest"


class Scanned(msgspec.Struct, frozen=True):
    """A request, taken apart.

    Attributes:
        head: What is neither the id nor a tensor's bytes; still a ModelInferRequest.
        id: As it came, in UTF-8.
        raw: The tensors' bytes, in the order of the inputs; empty where they are in `head`.
    """

    head: bytes
    id: bytes
    raw: list[memoryview]


def scan(message: Message) -> Scanned:
    """Take a ModelInferRequest apart, without a copy of its tensors.

    Raises:
        MalformedInput: It is none.
    """
    view = memoryview(message)
    position, end, kept = 0, len(view), 0
    pieces: list[memoryview] = []
    raw: list[memoryview] = []
    request_id = b""
    try:
        while position < end:
            start = position
            key, position = read_varint(view, position)
            begin, position = _value(view, position, key & 7)
            if position > end:
                raise MalformedInput(_BROKEN)
            if key in (_RAW_INPUT, _REQUEST_ID):
                if key == _RAW_INPUT:
                    raw.append(view[begin:position])
                else:
                    request_id = bytes(view[begin:position])
                if kept < start:
                    pieces.append(view[kept:start])
                kept = position
        request_id.decode()
    except (IndexError, UnicodeDecodeError):
        raise MalformedInput(_BROKEN) from None
    if kept < end:
        pieces.append(view[kept:])
    return Scanned(b"".join(pieces), request_id, raw)


def response(head: bytes, request_id: bytes, tensors: list[memoryview]) -> list[Message]:
    """A ModelInferResponse in parts: everything else serialized, the id, each tensor's bytes."""
    if request_id:
        head = b"".join((head, _RESPONSE_ID, varint(len(request_id)), request_id))
    parts: list[Message] = [head]
    for tensor in tensors:
        parts += (_RAW_OUTPUT + varint(len(tensor)), tensor)
    return parts


def in_stream(parts: list[Message]) -> list[Message]:
    """A ModelInferResponse as a ModelStreamInferResponse."""
    return [_INFER_RESPONSE + varint(sum(map(len, parts))), *parts]


def _value(view: memoryview, position: int, kind: int) -> tuple[int, int]:
    """Where a field's value begins and where it ends, which may be behind the message."""
    if kind == _LEN:
        length, position = read_varint(view, position)
        return position, position + length
    if kind == _VARINT:
        return position, read_varint(view, position)[1]
    if kind in _FIXED_BYTES:
        return position, position + _FIXED_BYTES[kind]
    raise MalformedInput(_BROKEN)
