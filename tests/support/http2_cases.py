"""Cases of conformance to RFC 9113 and RFC 7541: the frames of a client, and the outcome.

The names are those of h2spec 2.0 (`test_h2spec.py`), whose sections are those of RFC 7540. The
cases are written from the specifications, so that they run without that tool.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

from support.grpc_listener import CALLS_MAX
from support.http2 import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_MAX,
    WINDOW_UPDATE,
    Fields,
    Wire,
    block,
    data,
    frame,
    headers,
    message,
    ping,
    request_fields,
    rst_stream,
    settings,
    window_update,
)

FRAME_BYTES: Final = 1 << 14
"""Least maximum of a frame's payload."""
ENDED: Final = END_HEADERS | END_STREAM
UNKNOWN_KIND, UNKNOWN_CODE, UNKNOWN_SETTING, UNDEFINED_FLAGS = 0x16, 0xFF, 0xFF, 0xC2
RESERVED_BIT: Final = 1 << 31

Part: TypeAlias = bytes | Callable[[Wire], object]
"""Bytes to send, or something to wait for."""


class Closed(NamedTuple):
    """The connection ends with a GOAWAY of this code."""

    code: int


class Reset(NamedTuple):
    """The stream ends with a RST_STREAM of this code, and the connection stays open."""

    code: int
    stream_id: int = 1


class Served(NamedTuple):
    """The call gets its message and the status OK."""

    stream_id: int = 1


class Answered(NamedTuple):
    """The call ends with this gRPC status, or without a message by HTTP."""

    stream_id: int = 1


class Open(NamedTuple):
    """The connection stays open: a PING is acknowledged."""


Outcome: TypeAlias = Closed | Reset | Served | Answered | Open


class Case(NamedTuple):
    """A case.

    Attributes:
        name: Name in h2spec.
        section: Section of RFC 9113; of RFC 7541 for the names `hpack` and `generic/5`.
        title: What the client sends.
        parts: The parts after preface and SETTINGS.
        outcome: What has to follow.
        first: The first bytes of the connection.
    """

    name: str
    section: str
    title: str
    parts: tuple[Part, ...]
    outcome: Outcome
    first: bytes = PREFACE + settings()


def response(stream_id: int = 1) -> Callable[[Wire], object]:
    """Wait for the end of a response."""
    return lambda wire: wire.answer(stream_id)


def response_head(wire: Wire) -> object:
    """Wait for the HEADERS of a response."""
    return wire.until(lambda: wire.frames_of(HEADERS))


def data_bytes(size: int) -> Callable[[Wire], object]:
    """Wait for exactly this number of bytes of a response, which its window permits."""

    def wait(wire: Wire) -> None:
        wire.until(lambda: sum(len(each.payload) for each in wire.frames_of(DATA)) >= size)
        wire.feed(ping(b"no more."))
        wire.until(lambda: is_acknowledged(wire, b"no more."))
        assert sum(len(each.payload) for each in wire.frames_of(DATA)) == size

    return wait


def is_acknowledged(wire: Wire, payload: bytes = b"") -> bool:
    """Whether there is an ACK: of a PING with this payload, or of SETTINGS."""
    kind = PING if payload else SETTINGS
    return any(each.flags & ACK and each.payload == payload for each in wire.frames_of(kind))


def setting(number: int, value: int) -> bytes:
    return frame(SETTINGS, 0, struct.pack("!HI", number, value))


def priority(stream_id: int, depends_on: int = 0, weight: int = 16, *, exclusive: int = 0) -> bytes:
    payload = struct.pack("!IB", depends_on | exclusive << 31, weight - 1)
    return frame(PRIORITY, stream_id, payload)


def continuation(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
    return frame(CONTINUATION, stream_id, payload, flags)


def prioritized(stream_id: int, depends_on: int, flags: int) -> bytes:
    payload = struct.pack("!IB", depends_on, 15) + BLOCK
    return frame(HEADERS, stream_id, payload, flags | HAS_PRIORITY)


def call(*, extra: Fields = (), without: tuple[str, ...] = (), stream_id: int = 1) -> bytes:
    """HEADERS of a call without messages."""
    return headers(stream_id, request_fields(extra=extra, without=without), ENDED)


def coded(*pieces: bytes) -> bytes:
    """HEADERS of a call with further representations."""
    return frame(HEADERS, 1, BLOCK + b"".join(pieces), ENDED)


def requested(method: str) -> bytes:
    return headers(1, request_fields(extra=[(":method", method)], without=[":method"]), ENDED)


BLOCK: Final = block(request_fields())
FIELDS: Final = BLOCK.removeprefix(b"\x20")
"""Without the encoder's own size of the table, which is 0."""
HALF: Final = len(BLOCK) // 2
OPEN_CALL: Final = headers(1)
CALL: Final = headers(1, flags=ENDED)
MESSAGE: Final = message(b"request")
ABOVE_EACH_LIMIT: Final = b"\xff\xff\xff"
"""Length of a frame; the server rejects it before its payload."""
HUFFMAN: Final = {"a": b"\x1f", "padding": b"\x1f\xff", "zero": b"\x18", "eos": b"\xff\xff\xff\xff"}
"""`a` with valid padding, with a byte too many of it, with padding by zeros; the end symbol."""
NAME: Final = b"\x05x-any"
TWICE: Final = ((":method", "POST"), (":scheme", "http"), (":path", "/t/M"))
BAD_HUFFMAN: Final = (
    ("padding", "more than 7 bits of padding"), ("zero", "padding by zeros"),
    ("eos", "the end symbol"),
)  # fmt: skip
INDEXED_NAME: Final = b"\x0f\x04"
"""Index 19 with a prefix of 4 bits; 16 bits more than its first nibble holds."""


def literal(first: bytes, name: bytes, value: bytes, *, is_huffman: bool = False) -> bytes:
    return first + name + bytes(((0x80 if is_huffman else 0) | len(value),)) + value


GENERIC: Final = (
    Case("generic/1/1", "3.4", "preface and SETTINGS", (), Open()),
    Case("generic/2/1", "5.1", "PRIORITY on an idle stream", (priority(1), CALL), Served()),
    Case("generic/2/2", "5.1", "WINDOW_UPDATE on a half-closed stream",
         (CALL, window_update(1, 100)), Served()),
    Case("generic/2/3", "5.1", "PRIORITY on a half-closed stream", (CALL, priority(1)), Served()),
    Case("generic/2/4", "5.1", "RST_STREAM on a half-closed stream", (CALL, rst_stream(1)), Open()),
    Case("generic/2/5", "5.1", "PRIORITY on a closed stream",
         (CALL, response(), priority(1)), Open()),
    Case("generic/3.1/1", "6.1", "DATA", (OPEN_CALL, data(1, MESSAGE, END_STREAM)), Served()),
    Case("generic/3.1/2", "6.1", "several DATA",
         (OPEN_CALL, data(1, MESSAGE[:3]), data(1, MESSAGE[3:], END_STREAM)), Served()),
    Case("generic/3.1/3", "6.1", "DATA with padding",
         (OPEN_CALL, data(1, MESSAGE, END_STREAM, 5)), Served()),
    Case("generic/3.2/1", "6.2", "HEADERS", (CALL,), Served()),
    Case("generic/3.2/2", "6.2", "HEADERS with padding",
         (frame(HEADERS, 1, b"\5" + BLOCK + bytes(5), ENDED | PADDED),), Served()),
    Case("generic/3.2/3", "6.2", "HEADERS with priority", (prioritized(1, 0, ENDED),), Served()),
    Case("generic/3.3/1", "6.3", "PRIORITY of weight 1",
         (priority(1, weight=1), CALL), Served()),
    Case("generic/3.3/2", "6.3", "PRIORITY of weight 256",
         (priority(1, weight=256), CALL), Served()),
    Case("generic/3.3/3", "6.3", "PRIORITY with a dependency", (priority(1, 3), CALL), Served()),
    Case("generic/3.3/4", "6.3", "PRIORITY, exclusive",
         (priority(1, 3, exclusive=1), CALL), Served()),
    Case("generic/3.3/5", "6.3", "PRIORITY on an idle stream, then a lower stream",
         (priority(5), headers(3, flags=ENDED)), Served(3)),
    Case("generic/3.4/1", "6.4", "RST_STREAM", (OPEN_CALL, rst_stream(1)), Open()),
    Case("generic/3.5/1", "6.5", "SETTINGS", (setting(4, 1 << 20), CALL), Served()),
    Case("generic/3.7/1", "6.7", "PING", (), Open()),
    Case("generic/3.8/1", "6.8", "GOAWAY", (frame(GOAWAY, 0, bytes(8)),), Open()),
    Case("generic/3.9/1", "6.9", "WINDOW_UPDATE of the connection",
         (window_update(0, 1), CALL), Served()),
    Case("generic/3.9/2", "6.9", "WINDOW_UPDATE of a stream",
         (OPEN_CALL, window_update(1, 1), data(1, b"", END_STREAM)), Served()),
    Case("generic/3.10/1", "6.10", "one CONTINUATION",
         (frame(HEADERS, 1, BLOCK[:HALF], END_STREAM), continuation(1, BLOCK[HALF:], END_HEADERS)),
         Served()),
    Case("generic/3.10/2", "6.10", "several CONTINUATION",
         (frame(HEADERS, 1, BLOCK[:5], END_STREAM), continuation(1, BLOCK[5:HALF]),
          continuation(1, BLOCK[HALF:], END_HEADERS)), Served()),
    Case("generic/4/1", "8.3.1", "method GET", (requested("GET"),), Answered()),
    Case("generic/4/2", "8.3.1", "method HEAD", (requested("HEAD"),), Answered()),
    Case("generic/4/3", "8.3.1", "method POST", (CALL,), Served()),
    Case("generic/4/4", "8.1", "trailers of a request",
         (OPEN_CALL, data(1, MESSAGE), headers(1, [("x-any", "a")], ENDED)), Served()),
    Case("generic/5/1", "6.1", "indexed field", (coded(b"\x90"),), Served()),
    Case("generic/5/2", "6.2.1", "literal, added to the table, indexed name",
         (coded(literal(b"", b"\x53", b"a")),), Served()),
    Case("generic/5/3", "6.2.1", "literal, added, indexed name, Huffman",
         (coded(literal(b"", b"\x53", HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/4", "6.2.1", "literal, added, new name",
         (coded(literal(b"\x40", NAME, b"a")),), Served()),
    Case("generic/5/5", "6.2.1", "literal, added, new name, Huffman",
         (coded(literal(b"\x40", NAME, HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/6", "6.2.2", "literal, not added, indexed name",
         (coded(literal(b"", INDEXED_NAME, b"a")),), Served()),
    Case("generic/5/7", "6.2.2", "literal, not added, indexed name, Huffman",
         (coded(literal(b"", INDEXED_NAME, HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/8", "6.2.2", "literal, not added, new name",
         (coded(literal(b"\x00", NAME, b"a")),), Served()),
    Case("generic/5/9", "6.2.2", "literal, not added, new name, Huffman",
         (coded(literal(b"\x00", NAME, HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/10", "6.2.3", "literal, never indexed, indexed name",
         (coded(literal(b"", b"\x1f\x04", b"a")),), Served()),
    Case("generic/5/11", "6.2.3", "literal, never indexed, indexed name, Huffman",
         (coded(literal(b"", b"\x1f\x04", HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/12", "6.2.3", "literal, never indexed, new name",
         (coded(literal(b"\x10", NAME, b"a")),), Served()),
    Case("generic/5/13", "6.2.3", "literal, never indexed, new name, Huffman",
         (coded(literal(b"\x10", NAME, HUFFMAN["a"], is_huffman=True)),), Served()),
    Case("generic/5/14", "6.3", "size of the table",
         (frame(HEADERS, 1, b"\x3f\x61" + FIELDS, ENDED),), Served()),
    Case("generic/5/15", "6.3", "two sizes of the table",
         (frame(HEADERS, 1, b"\x20\x3f\x61" + FIELDS, ENDED),), Served()),
)  # fmt: skip
FRAMES: Final = (
    Case("http2/3.5/1", "3.4", "preface", (CALL,), Served()),
    Case("http2/3.5/2", "3.4", "another preface", (), Closed(PROTOCOL_ERROR),
         b"INVALID CONNECTION PREFACE\r\n\r\n"),
    Case("http2/4.1/1", "4.1", "frame of an unknown type",
         (frame(UNKNOWN_KIND, 0, bytes(8)), CALL), Served()),
    Case("http2/4.1/2", "4.1", "frame with undefined flags",
         (ping(flags=UNDEFINED_FLAGS), CALL), Served()),
    Case("http2/4.1/3", "4.1", "frame with the reserved bit",
         (frame(PING, RESERVED_BIT, bytes(8)), CALL), Served()),
    Case("http2/4.2/1", "4.2", "DATA of 2^14 bytes",
         (OPEN_CALL, data(1, message(bytes(FRAME_BYTES - 5)), END_STREAM)), Served()),
    Case("http2/4.2/2", "4.2", "DATA above SETTINGS_MAX_FRAME_SIZE",
         (OPEN_CALL, ABOVE_EACH_LIMIT + data(1)[3:]), Closed(FRAME_SIZE_ERROR)),
    Case("http2/4.2/3", "4.2", "HEADERS above SETTINGS_MAX_FRAME_SIZE",
         (ABOVE_EACH_LIMIT + CALL[3:],), Closed(FRAME_SIZE_ERROR)),
    Case("http2/4.3/1", "4.3", "invalid header block",
         (frame(HEADERS, 1, b"\x40", ENDED),), Closed(COMPRESSION_ERROR)),
    Case("http2/4.3/2", "4.3", "PRIORITY within a header block",
         (frame(HEADERS, 1, BLOCK[:HALF]), priority(1)), Closed(PROTOCOL_ERROR)),
    Case("http2/4.3/3", "4.3", "HEADERS of another stream within a header block",
         (frame(HEADERS, 1, BLOCK[:HALF]), headers(3)), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/1", "5.1", "idle: DATA", (data(1, MESSAGE),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/2", "5.1", "idle: RST_STREAM", (rst_stream(1),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/3", "5.1", "idle: WINDOW_UPDATE",
         (window_update(1, 1),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/4", "5.1", "idle: CONTINUATION",
         (continuation(1, BLOCK, END_HEADERS),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/5", "5.1", "half-closed: DATA",
         (CALL, data(1, MESSAGE)), Closed(STREAM_CLOSED)),
    Case("http2/5.1/6", "5.1", "half-closed: HEADERS", (CALL, CALL), Reset(STREAM_CLOSED)),
    Case("http2/5.1/7", "5.1", "half-closed: CONTINUATION",
         (CALL, continuation(1, BLOCK, END_HEADERS)), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/8", "5.1", "closed by RST_STREAM: DATA",
         (OPEN_CALL, rst_stream(1), data(1, MESSAGE)), Closed(STREAM_CLOSED)),
    Case("http2/5.1/9", "5.1", "closed by RST_STREAM: HEADERS",
         (OPEN_CALL, rst_stream(1), CALL), Closed(STREAM_CLOSED)),
    Case("http2/5.1/10", "5.1", "closed by RST_STREAM: CONTINUATION",
         (OPEN_CALL, rst_stream(1), continuation(1, BLOCK, END_HEADERS)), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1/11", "5.1", "closed by END_STREAM: DATA",
         (CALL, response(), data(1, MESSAGE)), Closed(STREAM_CLOSED)),
    Case("http2/5.1/12", "5.1", "closed by END_STREAM: HEADERS",
         (CALL, response(), CALL), Closed(STREAM_CLOSED)),
    Case("http2/5.1/13", "5.1", "closed by END_STREAM: CONTINUATION",
         (CALL, response(), continuation(1, BLOCK, END_HEADERS)), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1.1/1", "5.1.1", "even identifier of a stream",
         (call(stream_id=2),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.1.1/2", "5.1.1", "lower identifier of a stream",
         (headers(5, flags=ENDED), headers(3, flags=ENDED)), Closed(STREAM_CLOSED)),
    Case("http2/5.1.2/1", "5.1.2", "more streams than the announced maximum",
         tuple(headers(2 * index + 1) for index in range(CALLS_MAX + 1)),
         Reset(REFUSED_STREAM, 2 * CALLS_MAX + 1)),
    Case("http2/5.3.1/1", "5.3.1", "HEADERS that depends on itself",
         (prioritized(1, 1, ENDED),), Closed(PROTOCOL_ERROR)),
    Case("http2/5.3.1/2", "5.3.1", "PRIORITY that depends on itself",
         (OPEN_CALL, priority(1, 1)), Closed(PROTOCOL_ERROR)),
    Case("http2/5.4.1/1", "5.4.1", "invalid PING; the connection is closed",
         (frame(PING, 0, bytes(4)),), Closed(FRAME_SIZE_ERROR)),
    Case("http2/5.4.1/2", "5.4.1", "invalid PING; GOAWAY comes first",
         (CALL, response(), frame(PING, 0, bytes(4))), Closed(FRAME_SIZE_ERROR)),
    Case("http2/5.5/1", "5.5", "frame of an extension",
         (frame(UNKNOWN_KIND, 0, bytes(8)),), Open()),
    Case("http2/5.5/2", "5.5", "frame of an extension within a header block",
         (frame(HEADERS, 1, BLOCK[:HALF]), frame(UNKNOWN_KIND, 1, bytes(8))),
         Closed(PROTOCOL_ERROR)),
    Case("http2/6.1/1", "6.1", "DATA without a stream",
         (data(0, MESSAGE),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.1/2", "6.1", "DATA on a stream that is not open",
         (CALL, data(1, MESSAGE)), Closed(STREAM_CLOSED)),
    Case("http2/6.1/3", "6.1", "DATA with more padding than payload",
         (OPEN_CALL, frame(DATA, 1, b"\6" + bytes(5), PADDED)), Closed(PROTOCOL_ERROR)),
    Case("http2/6.2/1", "6.2", "PRIORITY after HEADERS without END_HEADERS",
         (frame(HEADERS, 1, BLOCK[:HALF]), priority(1)), Closed(PROTOCOL_ERROR)),
    Case("http2/6.2/2", "6.2", "HEADERS of another stream after HEADERS without END_HEADERS",
         (frame(HEADERS, 1, BLOCK[:HALF]), headers(3)), Closed(PROTOCOL_ERROR)),
    Case("http2/6.2/3", "6.2", "HEADERS without a stream",
         (call(stream_id=0),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.2/4", "6.2", "HEADERS with more padding than payload",
         (frame(HEADERS, 1, b"\xff" + BLOCK, ENDED | PADDED),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.3/1", "6.3", "PRIORITY without a stream",
         (priority(0, 3),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.3/2", "6.3", "PRIORITY of 4 bytes",
         (OPEN_CALL, frame(PRIORITY, 1, bytes(4))), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.4/1", "6.4", "RST_STREAM without a stream",
         (rst_stream(0),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.4/2", "6.4", "RST_STREAM on an idle stream",
         (rst_stream(1),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.4/3", "6.4", "RST_STREAM of 3 bytes",
         (OPEN_CALL, frame(RST_STREAM, 1, bytes(3))), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.5/1", "6.5", "SETTINGS with ACK and a payload",
         (frame(SETTINGS, 0, bytes(6), ACK),), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.5/2", "6.5", "SETTINGS on a stream",
         (frame(SETTINGS, 1),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.5/3", "6.5", "SETTINGS of 3 bytes",
         (frame(SETTINGS, 0, bytes(3)),), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.5.2/1", "6.5.2", "SETTINGS_ENABLE_PUSH of 2",
         (setting(2, 2),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.5.2/2", "6.5.2", "SETTINGS_INITIAL_WINDOW_SIZE of 2^31",
         (setting(4, 1 << 31),), Closed(FLOW_CONTROL_ERROR)),
    Case("http2/6.5.2/3", "6.5.2", "SETTINGS_MAX_FRAME_SIZE of 2^14 - 1",
         (setting(5, FRAME_BYTES - 1),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.5.2/4", "6.5.2", "SETTINGS_MAX_FRAME_SIZE of 2^24",
         (setting(5, 1 << 24),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.5.2/5", "6.5.2", "SETTINGS with an unknown identifier",
         (setting(UNKNOWN_SETTING, 1), CALL), Served()),
    Case("http2/6.5.3/1", "6.5.3", "two values of SETTINGS_INITIAL_WINDOW_SIZE",
         (frame(SETTINGS, 0, struct.pack("!HIHI", 4, 100, 4, 1)), CALL, data_bytes(1),
          window_update(1, 100)), Served()),
    Case("http2/6.5.3/2", "6.5.3", "SETTINGS is acknowledged",
         (lambda wire: wire.until(lambda: is_acknowledged(wire)),), Open()),
    Case("http2/6.7/1", "6.7", "PING", (ping(b"any data"),), Open()),
    Case("http2/6.7/2", "6.7", "PING with ACK", (ping(b"unasked.", ACK), CALL), Served()),
    Case("http2/6.7/3", "6.7", "PING on a stream",
         (frame(PING, 1, bytes(8)),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.7/4", "6.7", "PING of 6 bytes",
         (frame(PING, 0, bytes(6)),), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.8/1", "6.8", "GOAWAY on a stream",
         (frame(GOAWAY, 1, bytes(8)),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.9/1", "6.9", "WINDOW_UPDATE of 0 for the connection",
         (window_update(0, 0),), Closed(PROTOCOL_ERROR)),
    Case("http2/6.9/2", "6.9", "WINDOW_UPDATE of 0 for a stream",
         (OPEN_CALL, window_update(1, 0)), Reset(PROTOCOL_ERROR)),
    Case("http2/6.9/3", "6.9", "WINDOW_UPDATE of 3 bytes",
         (frame(WINDOW_UPDATE, 0, bytes(3)),), Closed(FRAME_SIZE_ERROR)),
    Case("http2/6.9.1/1", "6.9.1", "a window of one byte",
         (settings(window=1), CALL, data_bytes(1), window_update(1, 100)), Served()),
    Case("http2/6.9.1/2", "6.9.1", "window of the connection above 2^31 - 1",
         (window_update(0, WINDOW_MAX), window_update(0, WINDOW_MAX)), Closed(FLOW_CONTROL_ERROR)),
    Case("http2/6.9.1/3", "6.9.1", "window of a stream above 2^31 - 1",
         (OPEN_CALL, window_update(1, WINDOW_MAX), window_update(1, WINDOW_MAX)),
         Reset(FLOW_CONTROL_ERROR)),
    Case("http2/6.9.2/1", "6.9.2", "SETTINGS_INITIAL_WINDOW_SIZE changes an open stream",
         (settings(window=0), CALL, response_head, settings(window=1), data_bytes(1),
          settings(window=100)), Served()),
    Case("http2/6.9.2/2", "6.9.2", "SETTINGS_INITIAL_WINDOW_SIZE makes a window negative",
         (settings(window=3), CALL, data_bytes(3), settings(window=2), window_update(1, 2),
          data_bytes(4), window_update(1, 100)), Served()),
    Case("http2/6.9.2/3", "6.9.2", "SETTINGS_INITIAL_WINDOW_SIZE above 2^31 - 1",
         (setting(4, 1 << 31),), Closed(FLOW_CONTROL_ERROR)),
    Case("http2/6.10/1", "6.10", "several CONTINUATION",
         (frame(HEADERS, 1, BLOCK[:5], END_STREAM), continuation(1, BLOCK[5:HALF]),
          continuation(1, BLOCK[HALF:], END_HEADERS)), Served()),
    Case("http2/6.10/2", "6.10", "DATA after CONTINUATION without END_HEADERS",
         (frame(HEADERS, 1, BLOCK[:5]), continuation(1, BLOCK[5:HALF]), data(1, MESSAGE)),
         Closed(PROTOCOL_ERROR)),
    Case("http2/6.10/3", "6.10", "CONTINUATION without a stream",
         (frame(HEADERS, 1, BLOCK[:HALF]), continuation(0, BLOCK[HALF:], END_HEADERS)),
         Closed(PROTOCOL_ERROR)),
    Case("http2/6.10/4", "6.10", "CONTINUATION after HEADERS with END_HEADERS",
         (OPEN_CALL, continuation(1, BLOCK, END_HEADERS)), Closed(PROTOCOL_ERROR)),
    Case("http2/6.10/5", "6.10", "CONTINUATION after CONTINUATION with END_HEADERS",
         (frame(HEADERS, 1, BLOCK[:HALF]), continuation(1, BLOCK[HALF:], END_HEADERS),
          continuation(1, BLOCK, END_HEADERS)), Closed(PROTOCOL_ERROR)),
    Case("http2/6.10/6", "6.10", "CONTINUATION after DATA",
         (OPEN_CALL, data(1, MESSAGE), continuation(1, BLOCK, END_HEADERS)),
         Closed(PROTOCOL_ERROR)),
    Case("http2/7/1", "7", "GOAWAY with an unknown code",
         (frame(GOAWAY, 0, struct.pack("!II", 0, UNKNOWN_CODE)),), Open()),
    Case("http2/7/2", "7", "RST_STREAM with an unknown code",
         (OPEN_CALL, rst_stream(1, UNKNOWN_CODE)), Open()),
    Case("http2/8.1/1", "8.1", "second HEADERS without END_STREAM",
         (OPEN_CALL, data(1, MESSAGE), headers(1, [("x-any", "a")])), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2/1", "8.2", "name of a field in capitals",
         (call(extra=[("X-ANY", "a")]),), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.1/1", "8.3", "unknown pseudo-header field",
         (call(extra=[(":any", "a")]),), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.1/2", "8.3", "pseudo-header field of a response",
         (call(extra=[(":status", "200")]),), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.1/3", "8.3", "pseudo-header field in trailers",
         (OPEN_CALL, headers(1, [(":method", "GET")], ENDED)), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.1/4", "8.3", "pseudo-header field after another field",
         (frame(HEADERS, 1, block([("x-any", "a"), *request_fields()]), ENDED),),
         Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.2/1", "8.2.2", "field of the connection",
         (call(extra=[("connection", "keep-alive")]),), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.2/2", "8.2.2", "`te` other than `trailers`",
         (call(extra=[("te", "trailers, deflate")], without=("te",)),), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.3/1", "8.3.1", "empty `:path`",
         (call(extra=[(":path", "")], without=(":path",)),), Reset(PROTOCOL_ERROR)),
    *(Case(f"http2/8.1.2.3/{number}", "8.3.1", f"no `{name}`",
           (call(without=(name,)),), Reset(PROTOCOL_ERROR))
      for number, name in enumerate((":method", ":scheme", ":path"), start=2)),
    *(Case(f"http2/8.1.2.3/{number}", "8.3.1", f"two `{name}`",
           (call(extra=[(name, value)]),), Reset(PROTOCOL_ERROR))
      for number, (name, value) in enumerate(TWICE, start=5)),
    Case("http2/8.1.2.6/1", "8.1.1", "`content-length` other than the length of DATA",
         (headers(1, request_fields(extra=[("content-length", "1")])),
          data(1, MESSAGE, END_STREAM)), Reset(PROTOCOL_ERROR)),
    Case("http2/8.1.2.6/2", "8.1.1", "`content-length` other than the lengths of several DATA",
         (headers(1, request_fields(extra=[("content-length", "1")])), data(1, MESSAGE[:3]),
          data(1, MESSAGE[3:], END_STREAM)), Reset(PROTOCOL_ERROR)),
    Case("http2/8.2/1", "8.4", "PUSH_PROMISE of a client",
         (OPEN_CALL, frame(PUSH_PROMISE, 1, struct.pack("!I", 3) + BLOCK, END_HEADERS)),
         Closed(PROTOCOL_ERROR)),
)  # fmt: skip
HPACK: Final = (
    Case("hpack/2.3.3/1", "2.3.3", "index above both tables",
         (coded(b"\xff\x50"),), Closed(COMPRESSION_ERROR)),
    Case("hpack/2.3.3/2", "2.3.3", "literal with a name above both tables",
         (coded(literal(b"", b"\x7f\x50", b"a")),), Closed(COMPRESSION_ERROR)),
    Case("hpack/4.2/1", "4.2", "size of the table after a field",
         (coded(b"\x20"),), Closed(COMPRESSION_ERROR)),
    *(Case(f"hpack/5.2/{number}", "5.2", f"Huffman code with {title}",
           (coded(literal(b"\x40", NAME, HUFFMAN[code], is_huffman=True)),),
           Closed(COMPRESSION_ERROR))
      for number, (code, title) in enumerate(BAD_HUFFMAN, start=1)),
    Case("hpack/6.1/1", "6.1", "index 0", (coded(b"\x80"),), Closed(COMPRESSION_ERROR)),
    Case("hpack/6.3/1", "6.3", "size of the table above SETTINGS_HEADER_TABLE_SIZE",
         (frame(HEADERS, 1, b"\x3f\xe2\x1f" + FIELDS, ENDED),), Closed(COMPRESSION_ERROR)),
)  # fmt: skip
CASES: Final = {each.name: each for each in (*GENERIC, *FRAMES, *HPACK)}
