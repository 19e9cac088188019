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

from iskander.config import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.gateway.http2.call import Message
from iskander.wire.varint import read_varint, varint

_VARINT: Final = 0
_I64: Final = 1
_LEN: Final = 2
_I32: Final = 5
_FIXED_BYTES: Final = {_I64: 8, _I32: 4}
_REQUEST_ID: Final = 3 << 3 | _LEN
_RAW_INPUT: Final = 7 << 3 | _LEN
_INPUT: Final = 5 << 3 | _LEN
_CONTENTS: Final = 5 << 3 | _LEN
_RESPONSE_ID: Final = b"\x1a"
_RAW_OUTPUT: Final = b"\x32"
_INFER_RESPONSE: Final = b"\x12"
_BROKEN: Final = "the message is not a ModelInferRequest"

HEAD_BYTES_MAX: Final = 1 << 20
"""Of a request, without its id and what its tensors hold."""
_FIELDS_EACH: Final = 4
"""Inputs, outputs, parameters and raw contents: as many of each as a batch has columns."""
_FIELDS_ONCE: Final = 16
_INPUT_FIELDS: Final = 4
"""Fields of inputs for each field of a request, in a head that is looked into."""


class Scanned:
    """A request, taken apart.

    Args:
        head: What is neither the id nor a tensor's bytes; still a ModelInferRequest.
        id: As it came, in UTF-8.
        raw: The tensors' bytes, in the order of the inputs; empty where they are in `head`.
    """

    __slots__ = ("head", "id", "raw")

    def __init__(self, head: bytes, id: bytes, raw: list[memoryview]) -> None:
        self.head = head
        self.id = id
        self.raw = raw


def scan(message: Message, limits: LimitsConfig) -> Scanned:
    """Take a ModelInferRequest apart, without a copy of its tensors.

    Args:
        message: As it came.
        limits: Of the server: as many inputs, outputs, parameters and raw contents as columns, and
            as many strings in typed contents as rows.

    Raises:
        MalformedInput: It is none.
        LimitExceeded: It has more fields than one with so many can have, or a head that is larger
            than it need be.
    """
    view = memoryview(message)
    position, end, kept = 0, len(view), 0
    left = fields_max = _FIELDS_EACH * limits.columns + _FIELDS_ONCE
    pieces: list[Message] = []
    raw: list[memoryview] = []
    request_id = b""
    try:
        while position < end:
            start = position
            key, position = read_varint(message, position)
            begin, position = _value(message, position, key & 7)
            if position > end:
                raise MalformedInput(_BROKEN)
            left -= 1
            if left < 0:
                raise LimitExceeded(f"a request may have {fields_max} fields, this one has more")
            if key in (_RAW_INPUT, _REQUEST_ID):
                if key == _RAW_INPUT:
                    raw.append(view[begin:position])
                else:
                    request_id = view[begin:position].tobytes()
                if kept < start:
                    pieces.append(message[kept:start])
                kept = position
        request_id.decode()
    except (IndexError, UnicodeDecodeError):
        raise MalformedInput(_BROKEN) from None
    if kept < end:
        pieces.append(message[kept:])
    head = b"".join(pieces)
    if len(head) > HEAD_BYTES_MAX:
        _require_head(head, _INPUT_FIELDS * fields_max, limits.rows)
    return Scanned(head, request_id, raw)


def with_id(head: bytes, request_id: bytes) -> bytes:
    """A ModelInferResponse, still without its tensors' bytes, and the id of its request."""
    if not request_id:
        return head
    return b"".join((head, _RESPONSE_ID, varint(len(request_id)), request_id))


def raw_head(length: int) -> bytes:
    """What is before the bytes of each tensor of a ModelInferResponse, behind all else of it."""
    return _RAW_OUTPUT + varint(length)


def in_stream(parts: list[Message]) -> list[Message]:
    """A ModelInferResponse as a ModelStreamInferResponse."""
    return [_INFER_RESPONSE + varint(sum(map(len, parts))), *parts]


def _require_head(head: bytes, fields_max: int, elements_max: int) -> None:
    """Refuse a head that is large by something else than the typed contents of its inputs.

    Of these, elements in fields of their own are counted: each takes a runtime longer and more
    memory than the two bytes that it may be here.
    """
    view = memoryview(head)
    position, fields, elements = 0, 0, 0
    bare = len(head)
    try:
        while position < len(head):
            key, position = read_varint(view, position)
            at, position = _value(view, position, key & 7)
            if key != _INPUT:
                continue
            while at < position:
                key, at = read_varint(view, at)
                begin, at = _value(view, at, key & 7)
                fields += 1
                if key == _CONTENTS:
                    bare -= at - begin
                    elements += _count(view, begin, at, elements_max)
                if fields > fields_max or elements > elements_max:
                    raise LimitExceeded(
                        f"a request's inputs may have {fields_max} fields, and in their typed "
                        f"contents {elements_max} strings; send raw bytes"
                    )
    except IndexError:
        raise MalformedInput(_BROKEN) from None
    if bare > HEAD_BYTES_MAX:
        raise LimitExceeded(
            f"a request may have {HEAD_BYTES_MAX} bytes beside its tensors, got {bare}"
        )


def _count(view: memoryview, position: int, end: int, most: int) -> int:
    """How many fields there are, or that there are more than these."""
    count = 0
    while position < end and count <= most:
        key, position = read_varint(view, position)
        _, position = _value(view, position, key & 7)
        count += 1
    return count


def _value(message: Message, position: int, kind: int) -> tuple[int, int]:
    """Where a field's value begins and where it ends, which may be behind the message."""
    if kind == _LEN:
        length, position = read_varint(message, position)
        return position, position + length
    if kind == _VARINT:
        return position, read_varint(message, position)[1]
    if kind in _FIXED_BYTES:
        return position, position + _FIXED_BYTES[kind]
    raise MalformedInput(_BROKEN)
