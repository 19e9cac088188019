"""ZMTP 3 as bytes: the greeting, commands and message frames, found and made.

Pure. Source: RFC 37/ZMTP 3.1 (ZeroMQ); a peer of 3.0 differs in nothing that is used here.

Layout:
    greeting  FF, 8 bytes, 7F | major, minor | mechanism, 20 bytes | is server | 31 bytes
    frame     flags | length, 1 byte or (LONG) 8, big-endian | body
    command   a frame with COMMAND; its body is: length of the name, name, data
    READY     data: for each property: length of the name, name, length of the value (4), value
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

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
"""Sockets that a ROUTER talks with."""
_NULL: Final = b"NULL".ljust(20, b"\0")
GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + bytes((3, 1)) + _NULL + bytes(32)
"""Ours: version 3.1, no security."""


class ProtocolViolation(Exception):
    """The peer speaks something else, or too much of it; the connection ends."""


class Head(NamedTuple):
    """The beginning of a frame.

    Attributes:
        length: Of the body, in bytes.
        end: Where the body begins.
    """

    flags: int
    length: int
    end: int


def check_greeting(raw: bytes | memoryview) -> bool:
    """Look at as much of a greeting as has come; return whether it is of 3.1, which has PING.

    Raises:
        BrokenPeer: It is none, or one of another version or with security.
    """
    if raw[:1] not in (b"", b"\xff") or (len(raw) >= SIGNATURE_BYTES and not raw[9] & 1):
        raise ProtocolViolation("the peer does not speak ZMTP")
    if len(raw) > SIGNATURE_BYTES and raw[SIGNATURE_BYTES] < 3:
        raise ProtocolViolation("the peer speaks a ZMTP before 3.0")
    if len(raw) >= GREETING_BYTES and raw[12:32] != _NULL:
        raise ProtocolViolation("the peer wants security, and there is none here")
    return len(raw) > SIGNATURE_BYTES + 1 and tuple(raw[10:12]) >= (3, 1)


def read_head(view: memoryview, start: int) -> Head | None:
    """The frame that begins at `start`; None while its head has not come.

    Raises:
        BrokenPeer: Flags that there are not.
    """
    left = len(view) - start
    if left < 2:
        return None
    flags = view[start]
    if flags & ~(MORE | LONG | COMMAND) or flags & (MORE | COMMAND) == (MORE | COMMAND):
        raise ProtocolViolation(f"a frame has the flags {flags:#04x}")
    if not flags & LONG:
        return Head(flags, view[start + 1], start + 2)
    if left < HEAD_BYTES_MAX:
        return None
    end = start + HEAD_BYTES_MAX
    return Head(flags, int.from_bytes(view[start + 1 : end], "big"), end)


def head(length: int, flags: int) -> bytes:
    """The beginning of a frame with a body of so many bytes."""
    if length <= SHORT_BYTES_MAX:
        return bytes((flags, length))
    return bytes((flags | LONG,)) + length.to_bytes(8, "big")


def message(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """A message as pieces of bytes: each part behind its head."""
    last = len(parts) - 1
    pieces: list[bytes | memoryview] = []
    for index, part in enumerate(parts):
        pieces += (head(len(part), MORE if index < last else 0), part)
    return pieces


def command(name: bytes, data: bytes) -> bytes:
    """A command as a frame."""
    body = bytes((len(name),)) + name + data
    return head(len(body), COMMAND) + body


def ready(**properties: bytes) -> bytes:
    """READY with metadata; `_` stands for `-` in a property's name."""
    data = b""
    for key, value in properties.items():
        name = key.replace("_", "-").encode()
        data += bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value
    return command(READY, data)


def read_command(body: bytes | memoryview) -> tuple[bytes, bytes]:
    """Name and data of a command.

    Raises:
        BrokenPeer: It is none.
    """
    end = 1 + body[0] if body else 0
    if not 1 < end <= len(body):
        raise ProtocolViolation("a command has no name")
    return bytes(body[1:end]), bytes(body[end:])


def read_identity(data: bytes) -> bytes:
    """The identity in READY; empty where there is none.

    Raises:
        BrokenPeer: A length leads beyond the end, or the socket is of a kind that is not spoken to.
    """
    properties = read_properties(data)
    kind = properties.get("socket-type", b"")
    if kind not in PEERS:
        raise ProtocolViolation(f"a {kind[:20].decode('ascii', 'replace')} socket came")
    return properties.get("identity", b"")


def read_properties(data: bytes) -> dict[str, bytes]:
    """The metadata of READY, names in lower case.

    Raises:
        BrokenPeer: A length leads beyond the end.
    """
    properties, at = {}, 0
    while at < len(data):
        name_end = at + 1 + data[at]
        value_start = name_end + 4
        value_end = value_start + int.from_bytes(data[name_end:value_start], "big")
        if value_end > len(data) or value_start > len(data):
            raise ProtocolViolation("READY is cut off")
        name = data[at + 1 : name_end].decode("ascii", "replace").lower()
        properties[name] = data[value_start:value_end]
        at = value_end
    return properties
