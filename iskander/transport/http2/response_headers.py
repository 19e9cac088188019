"""Header blocks that a gRPC server sends: response headers and trailers.

Every field is a literal without indexing, so the bytes of one call do not depend on another's and
no encoder state is kept.

Runs on: gateway loop. Source: RFC 7541, section 6.2.2; gRPC over HTTP/2 (Status-Message,
Custom-Metadata).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from iskander.transport.http2.status import Status

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
"""Names in lower case; values of names that end in `-bin` are bytes."""

ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"

_UNSAFE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")


def block(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """A header block of literals, none of them for a table."""
    return b"".join(
        b"\0" + _string(name.encode()) + _string(_value(name, value)) for name, value in fields
    )


def trailers(status: Status, message: str, metadata: Sequence[tuple[str, str | bytes]]) -> bytes:
    """The header block that ends a call."""
    fields: list[tuple[str, str | bytes]] = [("grpc-status", str(int(status)))]
    if message:
        fields.append(("grpc-message", _percent(message)))
    return block([*fields, *metadata])


def _value(name: str, value: str | bytes) -> bytes:
    if name.endswith("-bin"):
        raw = value if isinstance(value, bytes) else value.encode()
        return base64.b64encode(raw).rstrip(b"=")
    return value if isinstance(value, bytes) else value.encode()


def _percent(message: str) -> str:
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], message.encode()).decode()


def _string(raw: bytes) -> bytes:
    """A string literal without Huffman coding: its length as a 7-bit prefix integer, its bytes."""
    length = len(raw)
    if length < 0x7F:
        return bytes((length,)) + raw
    encoded = bytearray((0x7F,))
    length -= 0x7F
    while length >= 0x80:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + raw


RESPONSE: Final[bytes] = b"\x88" + block(
    [("content-type", "application/grpc"), ("grpc-accept-encoding", ACCEPTED_ENCODINGS)]
)
"""The header block that begins every response; 0x88 is `:status: 200`."""
NOT_GRPC: Final[bytes] = block([(":status", "415"), ("content-type", "text/plain")])
"""The one that begins the response to a request that is no gRPC call."""
OK: Final[bytes] = trailers(Status.OK, "", ())
"""The one that ends a response as it should."""
TABLE_BYTES_DEFAULT: Final = 4096
"""Of a client's table for our blocks."""
NO_TABLE: Final = b"\x20"
"""Before a block: from here on it has 0 bytes."""
