"""Open Inference Protocol messages as bytes: tensors are slices of what came, or parts to send.

A protobuf runtime would copy every tensor. A request is walked instead: what is large or different
each time is taken out, and what is left is small, the same from request to request, and parsed as a
whole. A response is a head, and the results behind it as they are.

Pure. Source: Open Inference Protocol v2, `ModelInferRequest` and `ModelInferResponse`; protobuf
encoding.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import Final, TypeAlias

from iskander.config.schema import LimitsConfig
from iskander.errors import LimitExceeded, MalformedInput
from iskander.transport.http2.call import Message
from iskander.varint import read_varint, varint

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
_BROKEN: Final = "the message is not a ModelInferRequest"

HEAD_BYTES_MAX: Final = 1 << 20
"""Of a request, without its id and what is in its tensors."""
_FIELDS_EACH: Final = 4
"""Inputs, outputs, parameters and raw contents: as many of each as a batch has columns."""
_FIELDS_ONCE: Final = 16
_INPUT_FIELDS: Final = 4
"""Fields of inputs for each field of a request, where inputs are looked into."""

_Cut: TypeAlias = tuple[int, int, bytes]
"""Where something begins and ends that is taken out, and what takes its place."""


class Scanned:
    """A request, taken apart.

    Args:
        head: What is neither the id nor in a tensor; still a ModelInferRequest.
        id: As it came, in UTF-8.
        raw: The tensors' bytes, in the order of the inputs; empty where they are typed.
        typed: The typed contents of each input that has any, by its number, in the form of an
            InferTensorContents; empty where there are raw ones: then they are still in `head`.
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
    """Take a ModelInferRequest apart, without a copy of its tensors.

    Args:
        message: As it came.
        limits: Of the server: as many inputs, outputs, parameters and raw contents as columns.

    Raises:
        MalformedInput: It is none.
        LimitExceeded: It has more fields than one with so many can have, or a head that is larger
            than it need be.
    """
    view = memoryview(message)
    position, end = 0, len(view)
    left = fields_max = _FIELDS_EACH * limits.columns + _FIELDS_ONCE
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
                raise LimitExceeded(f"a request may have {fields_max} fields, this one has more")
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
            typed = _cut_contents(view, inputs, _INPUT_FIELDS * fields_max, cuts)
    except (IndexError, UnicodeDecodeError):
        raise MalformedInput(_BROKEN) from None
    return Scanned(_without(message, cuts), request_id, raw, typed)


def read_field(message: Message, position: int, end: int) -> tuple[int, int, int]:
    """A field's key, and where its value begins and ends.

    Args:
        message: That it is in.
        position: Where it begins.
        end: Where the message ends.

    Raises:
        MalformedInput: It ends behind the message, or is of no kind that a message may have.
        IndexError: The same.
    """
    key, begin = read_varint(message, position)
    if begin - position > _KEY_BYTES_MAX or not _KEY_MIN <= key <= _KEY_MAX:
        raise MalformedInput(_BROKEN)
    kind = key & 7
    if kind == LEN:
        length, begin = read_varint(message, begin)
        position = begin + length
    elif kind == VARINT:
        _, position = read_varint(message, begin)
    elif kind in FIXED_BYTES:
        position = begin + FIXED_BYTES[kind]
    else:
        raise MalformedInput(_BROKEN)
    if position > end:
        raise MalformedInput(_BROKEN)
    return key, begin, position


def _cut_contents(
    view: memoryview, inputs: list[tuple[int, int, int]], fields_max: int, cuts: list[_Cut]
) -> dict[int, memoryview]:
    """Take the typed contents out of the inputs.

    Args:
        view: The request.
        inputs: Where each begins, where its value does, and where both end.
        fields_max: Of all inputs.
        cuts: An input that has contents has another length without them.

    Returns:
        Those of each input that has any, by its number.
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
                raise LimitExceeded(f"a request's inputs may have {fields_max} fields")
            if key != _CONTENTS:
                continue
            if number in typed:
                raise MalformedInput("an input has its contents twice")
            typed[number] = view[value_at:position]
            cuts += (
                (start, begin, _INPUT_KEY + varint(end - begin - (position - key_at))),
                (key_at, position, b""),
            )
    cuts.sort()
    return typed


def _without(message: Message, cuts: list[_Cut]) -> bytes:
    """What is left of a message.

    Raises:
        LimitExceeded: It is more than need be.
    """
    size = len(message)
    for begin, end, instead in cuts:
        size += len(instead) - (end - begin)
    if size > HEAD_BYTES_MAX:
        raise LimitExceeded(
            f"a request may have {HEAD_BYTES_MAX} bytes beside its tensors, got {size}"
        )
    pieces: list[Message] = []
    kept = 0
    for begin, end, instead in cuts:
        if kept < begin:
            pieces.append(message[kept:begin])
        if instead:
            pieces.append(instead)
        kept = end
    if kept < len(message):
        pieces.append(message[kept:])
    return b"".join(pieces)


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
