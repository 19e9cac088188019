"""Header blocks of gRPC responses: response headers and trailers.

Every field is a literal without indexing, so the encoder keeps no state.

Runs on: gateway loop. Source: RFC 7541, section 6.2.2; gRPC over HTTP/2 (Status-Message,
Custom-Metadata).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from iskander.gateway.transport.http2.status import Status

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
"""Lower-case names; values of names that end in `-bin` are bytes."""

ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"

_UNSAFE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")


def block(fields: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Encode a header block."""
    return b"".join(
        b"\0" + _literal(name.encode()) + _literal(_encode(name, value)) for name, value in fields
    )


def trailers(status: Status, message: str, metadata: Sequence[tuple[str, str | bytes]]) -> bytes:
    """Encode the trailers of a call."""
    fields: list[tuple[str, str | bytes]] = [("grpc-status", str(int(status)))]
    if message:
        escaped = _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], message.encode())
        fields.append(("grpc-message", escaped.decode()))
    return block([*fields, *metadata])


def _encode(name: str, value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return base64.b64encode(raw).rstrip(b"=") if name.endswith("-bin") else raw


def _literal(raw: bytes) -> bytes:
    """Encode a string without Huffman coding: length with a 7-bit prefix, then bytes."""
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
"""Start of every response header block; 0x88 is `:status: 200`."""
NOT_GRPC: Final[bytes] = block([(":status", "415"), ("content-type", "text/plain")])
"""Response headers for a request that is not gRPC."""
OK: Final[bytes] = trailers(Status.OK, "", ())
TABLE_BYTES_DEFAULT: Final = 4096
"""Initial size of the client's dynamic table."""
NO_TABLE: Final = b"\x20"
"""Dynamic table size update to 0 bytes, at the start of a block."""
