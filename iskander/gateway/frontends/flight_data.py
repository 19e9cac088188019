"""FlightData, the message that carries batches: read and written field by field, without a copy.

    1     flight_descriptor   FlightDescriptor, on the first message of a stream
    2     data_header         flatbuffer header of an Arrow IPC message
    3     app_metadata        the caller's own
    1000  data_body           the message's body

A protobuf runtime would copy the body. Everything else of the protocol goes through one.

Pure. Source: Arrow Flight RPC, Flight.proto; protobuf encoding.
"""

from __future__ import annotations

from typing import NamedTuple

from iskander.errors import MalformedInput

_DESCRIPTOR, _HEADER, _APP_METADATA, _BODY = 1, 2, 3, 1000
_HEADER_TAG = bytes([_HEADER << 3 | 2])
_APP_METADATA_TAG = bytes([_APP_METADATA << 3 | 2])
_BODY_TAG = b"\xc2\x3e"


class FlightData(NamedTuple):
    """One message; its views are into the bytes that came."""

    descriptor: memoryview | None
    header: memoryview
    app_metadata: bytes
    body: memoryview


def read_flight_data(raw: bytes | memoryview) -> FlightData:
    """Find the fields of a message; unknown ones are passed over, as protobuf asks.

    Raises:
        MalformedInput: The bytes are no protobuf message.
    """
    view = memoryview(raw)
    descriptor: memoryview | None = None
    header = body = view[:0]
    app_metadata = b""
    at, end = 0, len(raw)
    try:
        while at < end:
            tag, at = _varint(raw, at)
            kind, number = tag & 7, tag >> 3
            if kind == 2:
                length, at = _varint(raw, at)
                start, at = at, at + length
                if at > end:
                    raise IndexError
                if number == _BODY:
                    body = view[start:at]
                elif number == _HEADER:
                    header = view[start:at]
                elif number == _APP_METADATA:
                    app_metadata = bytes(view[start:at])
                elif number == _DESCRIPTOR:
                    descriptor = view[start:at]
            elif kind == 0:
                _, at = _varint(raw, at)
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                raise IndexError
        if at > end:
            raise IndexError
    except IndexError:
        raise MalformedInput("the message is not a FlightData message") from None
    return FlightData(descriptor, header, app_metadata, body)


def data_frame(
    header: bytes, app_metadata: bytes, parts: list[bytes | memoryview], body_bytes: int
) -> bytes:
    """A message with this header, and with a body made of these parts in one copy."""
    pieces: list[bytes | memoryview] = [_HEADER_TAG, _to_varint(len(header)), header]
    if app_metadata:
        pieces += (_APP_METADATA_TAG, _to_varint(len(app_metadata)), app_metadata)
    pieces += (_BODY_TAG, _to_varint(body_bytes))
    return b"".join(pieces + parts)


def schema_frame(header: bytes) -> bytes:
    """The message that begins a stream of batches."""
    return b"".join((_HEADER_TAG, _to_varint(len(header)), header))


def _varint(raw: bytes | memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError


def _to_varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
