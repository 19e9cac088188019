"""HTTP/2 frames: types, flags, errors, encoding and parsing.

Parsing raises `ConnectionBroken` on invalid input.

Pure. Source: RFC 9113, sections 4, 6 and 7; gRPC over HTTP/2 (Length-Prefixed-Message).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
PREFIX_BYTES: Final = 5
"""Size of the prefix of each gRPC message."""
WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_DEFAULT: Final = 65_535
FRAME_BYTES_DEFAULT: Final = 16_384
FRAME_BYTES_MAX: Final = (1 << 24) - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9
GOAWAY_BYTES: Final = 8
"""Without debug data."""
PRIORITY_BYTES: Final = 5

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

_HEAD: Final = struct.Struct("!BHBBI")
read_head: Final = _HEAD.unpack_from
"""High byte and low bytes of the length, type, flags, stream."""
_PREFIX: Final = struct.Struct("!BI")
_SETTING: Final = struct.Struct("!HI")


class ErrorCode(IntEnum):
    """HTTP/2 error codes."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionBroken(Exception):
    """Connection error: closes the connection with GOAWAY. `reason` is the metric label."""

    def __init__(self, code: ErrorCode, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason or code.name.lower()


class StreamError(Exception):
    """Stream error: resets the stream with a code; the message is not sent."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Encode the nine-byte header of a frame."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def prefix(length: int) -> bytes:
    """Encode the prefix of an uncompressed message."""
    return _PREFIX.pack(0, length)


def read_prefix(raw: bytes | memoryview) -> tuple[int, int]:
    """Read a message prefix: the compressed flag and the length."""
    fields: tuple[int, int] = _PREFIX.unpack_from(raw)
    return fields


def settings(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def header_block(stream_id: int, flags: int, block: bytes, frame_bytes: int) -> bytes:
    """Encode a header block as one HEADERS frame and as many CONTINUATION frames as needed."""
    first, rest = block[:frame_bytes], block[frame_bytes:]
    if not rest:
        return frame(HEADERS, flags | END_HEADERS, stream_id, first)
    parts = [frame(HEADERS, flags, stream_id, first)]
    while rest:
        piece, rest = rest[:frame_bytes], rest[frame_bytes:]
        parts.append(frame(CONTINUATION, 0 if rest else END_HEADERS, stream_id, piece))
    return b"".join(parts)


def window_update(stream_id: int, increment: int) -> bytes:
    """Encode a WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream(stream_id: int, code: ErrorCode) -> bytes:
    """Encode a RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def goaway(last_stream_id: int, code: ErrorCode, message: str = "") -> bytes:
    """Encode a GOAWAY frame."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + message.encode())


def read_settings(payload: memoryview) -> list[tuple[int, int]]:
    """Read the identifiers and values of a SETTINGS frame."""
    if len(payload) % _SETTING.size:
        message = f"SETTINGS of {len(payload)} bytes, not a multiple of {_SETTING.size}"
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, message)
    pairs: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in pairs:
        if name == INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
            raise ConnectionBroken(ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}")
        if name == MAX_FRAME_SIZE and not FRAME_BYTES_DEFAULT <= value <= FRAME_BYTES_MAX:
            raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
    return pairs


def read_number(payload: memoryview, length: int = 4) -> int:
    """Read the leading 31-bit number of a payload of `length` bytes; GOAWAY may be longer."""
    if len(payload) != length and (length != GOAWAY_BYTES or len(payload) < length):
        message = f"frame payload of {len(payload)} bytes, expected {length}"
        raise ConnectionBroken(ErrorCode.FRAME_SIZE_ERROR, message)
    return int.from_bytes(payload[:4]) & WINDOW_MAX


def padding_bytes(view: memoryview, at: int, length: int) -> int:
    """Return the padding of a DATA frame of `length` bytes, including the pad length at `at`."""
    padding = 1 + view[at] if length else 1
    if padding > length:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "padding longer than the payload")
    return padding


def unpadded(payload: memoryview, flags: int) -> memoryview:
    """Return a HEADERS payload without padding and priority."""
    if not flags & (PADDED | HAS_PRIORITY):
        return payload
    start, end = 0, len(payload)
    if flags & PADDED:
        start = 1
        end -= payload[0] if payload else 1
    if flags & HAS_PRIORITY:
        start += PRIORITY_BYTES
    if start > end:
        raise ConnectionBroken(ErrorCode.PROTOCOL_ERROR, "padding longer than the payload")
    return payload[start:end]


def dependency(payload: memoryview, flags: int) -> int:
    """Return the stream dependency of a HEADERS frame with priority; 0 if truncated."""
    at = 1 if flags & PADDED else 0
    if len(payload) < at + PRIORITY_BYTES:
        return 0
    return int.from_bytes(payload[at : at + 4]) & WINDOW_MAX
