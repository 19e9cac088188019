"""ZMTP 3 codec: greeting, commands and message frames.

Functions that read input raise `ProtocolViolation` if it is invalid.

Pure. Source: RFC 37/ZMTP 3.1 (ZeroMQ); 3.0 does not differ in the parts used here.

Layout:
    greeting  FF, 8 bytes, 7F | major, minor | mechanism, 20 bytes | is server | 31 bytes
    frame     flags | length, 1 byte or (LONG) 8, big-endian | body
    command   a frame with COMMAND; body: length of the name, name, data
    READY     data: per property: length of the name, name, length of the value (4), value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
GREETING_BYTES: Final = 64
SIGNATURE_BYTES: Final = 10
SHORT_BYTES_MAX: Final = 255
HEAD_BYTES_MAX: Final = 9
READY: Final = b"READY"
ERROR: Final = b"ERROR"
PING: Final = b"PING"
PONG: Final = b"PONG"
PING_CONTEXT_BYTES_MAX: Final = 16
PEERS: Final = (b"DEALER", b"REQ", b"ROUTER")
"""Socket types compatible with a ROUTER."""
_NULL: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 1)) + _NULL + bytes(32)
"""Of this server: version 3.1, no security."""

Part: TypeAlias = bytes | memoryview


class ProtocolViolation(Exception):
    """Invalid or oversized input of a peer; the connection ends."""


class Head(NamedTuple):
    """Frame header; `length` is the size of the body, `end` the offset of the body."""

    flags: int
    length: int
    end: int


def check_greeting(raw: Part) -> bool:
    """Check a greeting, complete or not; return whether its version has PING (3.1 or later)."""
    if raw[:1] not in (b"", b"\xff") or (len(raw) >= SIGNATURE_BYTES and not raw[9] & 1):
        raise ProtocolViolation("not a ZMTP greeting")
    if len(raw) > SIGNATURE_BYTES and raw[SIGNATURE_BYTES] < 3:
        raise ProtocolViolation("unsupported ZMTP version: expected 3.0 or later")
    if len(raw) >= GREETING_BYTES and raw[12:32] != _NULL:
        raise ProtocolViolation("unsupported security mechanism: expected NULL")
    return len(raw) > SIGNATURE_BYTES + 1 and tuple(raw[10:12]) >= (3, 1)


def read_head(view: memoryview, start: int) -> Head | None:
    """Read the frame header at `start`; None while it is incomplete."""
    left = len(view) - start
    if left < 2:
        return None
    flags = view[start]
    if flags & ~(MORE | LONG | COMMAND) or flags & (MORE | COMMAND) == (MORE | COMMAND):
        raise ProtocolViolation(f"invalid frame flags {flags:#04x}")
    if not flags & LONG:
        return Head(flags, view[start + 1], start + 2)
    if left < HEAD_BYTES_MAX:
        return None
    end = start + HEAD_BYTES_MAX
    return Head(flags, int.from_bytes(view[start + 1 : end], "big"), end)


def head(length: int, flags: int) -> bytes:
    """Encode a frame header."""
    if length <= SHORT_BYTES_MAX:
        return bytes((flags, length))
    return bytes((flags | LONG,)) + length.to_bytes(8, "big")


def message(parts: Sequence[Part]) -> list[Part]:
    """Encode a message: each part preceded by its header."""
    last = len(parts) - 1
    pieces: list[Part] = []
    for index, part in enumerate(parts):
        pieces += (head(len(part), MORE if index < last else 0), part)
    return pieces


def command(name: bytes, data: bytes) -> bytes:
    """Encode a command frame."""
    body = bytes((len(name),)) + name + data
    return head(len(body), COMMAND) + body


def ready(**properties: bytes) -> bytes:
    """Encode READY; `_` in a property name becomes `-`."""
    data = b""
    for key, value in properties.items():
        name = key.replace("_", "-").encode()
        data += bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return command(READY, data)


def read_command(body: Part) -> tuple[bytes, bytes]:
    """Decode a command to its name and data."""
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ProtocolViolation("command without a name")
    return bytes(body[1:end]), bytes(body[end:])


def read_identity(data: bytes) -> bytes:
    """Check the socket type in the data of READY; return the identity, empty if absent."""
    properties = read_properties(data)
    kind = properties.get("socket-type", b"")
    if kind not in PEERS:
        name = kind[:20].decode("ascii", "replace")
        raise ProtocolViolation(f"unsupported socket type `{name}`: expected DEALER, REQ or ROUTER")
    return properties.get("identity", b"")


def read_properties(data: bytes) -> dict[str, bytes]:
    """Decode the properties of READY, names in lower case."""
    properties, at = {}, 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        if value_end > len(data) or value_start > len(data):
            raise ProtocolViolation("truncated READY")
        name = data[at + 1 : name_end].decode("ascii", "replace").lower()
        properties[name] = data[value_start:value_end]
        at = value_end
    return properties
