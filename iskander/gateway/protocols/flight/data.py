"""Zero-copy reader and writer of FlightData messages.

    1     flight_descriptor   FlightDescriptor, on the first message of a stream
    2     data_header         flatbuffer header of an Arrow IPC message
    3     app_metadata        defined by the caller
    1000  data_body           the message's body

A protobuf runtime copies the body, and is used for all other messages.

Pure. Source: Arrow Flight RPC, Flight.proto; protobuf encoding.
"""

from __future__ import annotations

from builtins import memoryview  # Where mypyc looks for the types of fields.
from typing import Final, NamedTuple, TypeAlias

from iskander.errors import MalformedInput
from iskander.foundation.varint import encode_varint, read_varint

_DESCRIPTOR: Final = 1
_HEADER: Final = 2
_APP_METADATA: Final = 3
_BODY: Final = 1000
_TAG_BYTES_MAX: Final = 5
_TAG_MIN: Final = 1 << 3
_TAG_MAX: Final = (1 << 32) - 1
_FIXED_BYTES: Final = {1: 8, 5: 4}
"""Length of a field by its wire type."""
_HEADER_TAG: Final = bytes([_HEADER << 3 | 2])
_APP_METADATA_TAG: Final = bytes([_APP_METADATA << 3 | 2])
_BODY_TAG: Final = b"\xc2\x3e"

Parts: TypeAlias = tuple[bytes | memoryview, ...]
"""Consecutive pieces of a message."""


class FlightData(NamedTuple):
    """Views of one message. `head_bytes` is the start of the body if it is last; else 0."""

    descriptor: memoryview | None
    header: memoryview
    app_metadata: memoryview
    body: memoryview
    head_bytes: int = 0


def read_flight_data(raw: bytes | memoryview) -> FlightData:
    """Find the fields of a message; unknown fields are skipped."""
    view = memoryview(raw)
    descriptor: memoryview | None = None
    header = body = app_metadata = view[:0]
    at, end, start = 0, len(raw), 0
    try:
        while at < end:
            tag, behind = read_varint(raw, at)
            if behind - at > _TAG_BYTES_MAX or not _TAG_MIN <= tag <= _TAG_MAX:
                raise IndexError
            at, kind, number = behind, tag & 7, tag >> 3
            if kind == 2:
                length, at = read_varint(raw, at)
                first, at = at, at + length
                if at > end:
                    raise IndexError
                if number == _BODY:
                    body, start = view[first:at], first
                elif number == _HEADER:
                    header = view[first:at]
                elif number == _APP_METADATA:
                    app_metadata = view[first:at]
                elif number == _DESCRIPTOR:
                    descriptor = view[first:at]
            elif kind == 0:
                _, at = read_varint(raw, at)
            else:
                at += _FIXED_BYTES[kind]
        if at > end:
            raise IndexError
    except LookupError:
        raise MalformedInput("the message is not a FlightData message") from None
    is_last = start > 0 and start + len(body) == end
    return FlightData(descriptor, header, app_metadata, body, start if is_last else 0)


def data_head(header: bytes, app_metadata: bytes, body_bytes: int) -> bytes:
    """Encode a message up to its body."""
    pieces = [_HEADER_TAG, encode_varint(len(header)), header]
    if app_metadata:
        pieces += (_APP_METADATA_TAG, encode_varint(len(app_metadata)), app_metadata)
    return b"".join((*pieces, _BODY_TAG, encode_varint(body_bytes)))


def schema_frame(header: bytes) -> bytes:
    """Encode the first message of a stream of batches."""
    return b"".join((_HEADER_TAG, encode_varint(len(header)), header))
