"""HTTP/2 frames: kinds, flags, errors, and the bytes of those that a server sends.

Pure. Source: RFC 9113, sections 4, 6 and 7; gRPC over HTTP/2 (Length-Prefixed-Message).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
PREFIX_BYTES: Final = 5
"""Before each message of a call, in its DATA."""
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

read_head: Final = struct.Struct("!BHBBI").unpack_from
"""Length's high byte and low bytes, kind, flags, stream."""
_HEAD: Final = struct.Struct("!BHBBI")
_PREFIX: Final = struct.Struct("!BI")
_NUMBER: Final = struct.Struct("!I")
_SETTING: Final = struct.Struct("!HI")


class Code(IntEnum):
    """Why a stream or a connection ended."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ConnectionBroken(Exception):
    """The peer broke the protocol, or went over a limit: the connection ends.

    Args:
        code: Of the GOAWAY frame.
        message: Its debug data.
        reason: Label of the metric; by default the code.
    """

    def __init__(self, code: Code, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason or code.name.lower()


class StreamError(Exception):
    """The peer broke the protocol on one stream: the stream is reset.

    Args:
        code: Of the RST_STREAM frame.
        message: For the log.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """The nine bytes before a frame's payload."""
    return _HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """A whole frame."""
    return head(len(payload), kind, flags, stream_id) + payload


def prefix(length: int) -> bytes:
    """The bytes before a message that is not compressed."""
    return _PREFIX.pack(0, length)


def read_prefix(raw: bytes | memoryview) -> tuple[int, int]:
    """Whether the message behind it is compressed, and its length."""
    said: tuple[int, int] = _PREFIX.unpack_from(raw)
    return said


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def header_block(stream_id: int, flags: int, block: bytes, frame_bytes: int) -> bytes:
    """A whole header block: HEADERS, and CONTINUATION where it does not fit."""
    first, rest = block[:frame_bytes], block[frame_bytes:]
    if not rest:
        return frame(HEADERS, flags | END_HEADERS, stream_id, first)
    parts = [frame(HEADERS, flags, stream_id, first)]
    while rest:
        piece, rest = rest[:frame_bytes], rest[frame_bytes:]
        parts.append(frame(CONTINUATION, 0 if rest else END_HEADERS, stream_id, piece))
    return b"".join(parts)


def window_update(stream_id: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4))


def rst_stream(stream_id: int, code: Code) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4))


def goaway(last_stream_id: int, code: Code, message: str = "") -> bytes:
    """A GOAWAY frame."""
    return frame(GOAWAY, 0, 0, last_stream_id.to_bytes(4) + code.to_bytes(4) + message.encode())


def read_settings(payload: memoryview) -> list[tuple[int, int]]:
    """Identifiers and values.

    Raises:
        ConnectionBroken: The length is wrong, or a value is out of its bounds.
    """
    if len(payload) % _SETTING.size:
        raise ConnectionBroken(Code.FRAME_SIZE_ERROR, "SETTINGS of a broken length")
    pairs: list[tuple[int, int]] = list(_SETTING.iter_unpack(payload))
    for name, value in pairs:
        if name == INITIAL_WINDOW_SIZE and value > WINDOW_MAX:
            raise ConnectionBroken(Code.FLOW_CONTROL_ERROR, f"an initial window of {value}")
        if name == ENABLE_PUSH and value > 1:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH of {value}")
        if name == MAX_FRAME_SIZE and not FRAME_BYTES_DEFAULT <= value <= FRAME_BYTES_MAX:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, f"frames of {value} bytes")
    return pairs


def read_number(payload: memoryview, length: int = 4) -> int:
    """The 31 bits that a payload begins with.

    Args:
        payload: Of WINDOW_UPDATE, RST_STREAM, GOAWAY or PRIORITY.
        length: That the payload must have; for GOAWAY, at least.

    Raises:
        ConnectionBroken: The payload has another length.
    """
    if len(payload) != length and (length != GOAWAY_BYTES or len(payload) < length):
        raise ConnectionBroken(Code.FRAME_SIZE_ERROR, f"a frame of {len(payload)} bytes")
    number: tuple[int] = _NUMBER.unpack_from(payload)
    return number[0] & WINDOW_MAX


def padding_bytes(view: memoryview, at: int, length: int) -> int:
    """The padding of a DATA frame of `length` bytes, with the byte at `at` that gives its length.

    Raises:
        ConnectionBroken: There is more padding than payload.
    """
    padding = 1 + view[at] if length else 1
    if padding > length:
        raise ConnectionBroken(Code.PROTOCOL_ERROR, "more padding than payload")
    return padding


def unpadded(payload: memoryview, flags: int) -> memoryview:
    """What is left of DATA or HEADERS without padding and priority.

    Raises:
        ConnectionBroken: There is more padding than payload.
    """
    if not flags & (PADDED | HAS_PRIORITY):
        return payload
    start, end = 0, len(payload)
    if flags & PADDED:
        start = 1
        end -= payload[0] if payload else 1
    if flags & HAS_PRIORITY:
        start += 5
    if start > end:
        raise ConnectionBroken(Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[start:end]


def dependency(payload: memoryview, flags: int) -> int:
    """The stream on which the stream of a HEADERS frame with priority depends; 0 without one."""
    at = 1 if flags & PADDED else 0
    if len(payload) < at + PRIORITY_BYTES:
        return 0
    number: tuple[int] = _NUMBER.unpack_from(payload, at)
    return number[0] & WINDOW_MAX
