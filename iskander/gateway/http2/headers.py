"""Header blocks of gRPC: what a request says, and the bytes of responses and trailers.

Requests are read by `hpack`. Responses are written as literals that need no table, so that one
call's bytes do not depend on another's.

Runs on: gateway loop. Source: RFC 7541, section 6.2.2; gRPC over HTTP/2 (Request-Headers, Timeout,
Status-Message, Custom-Metadata).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import hpack

from iskander.clock import NS_PER_S, NS_PER_US
from iskander.gateway.http2 import frames
from iskander.gateway.http2.frames import Code, ConnectionBroken
from iskander.gateway.http2.status import RpcError, Status

Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
"""Names in lower case; values of names that end in `-bin` are bytes."""

HEADER_LIST_BYTES_MAX: Final = 16_384
"""As gRPC counts: names, values and 32 bytes for each."""
EXPANDED_BYTES_MAX: Final = 65_536
BLOCK_BYTES_MAX: Final = 65_536
"""Beyond gRPC's own limit and below this, it is the call that ends and not the connection."""
ACCEPTED_ENCODINGS: Final = "identity,deflate,gzip"
REMEMBERED_MAX: Final = 16
REMEMBERED_BYTES_MAX: Final = 256
"""Blocks kept with their fields: a client's calls mostly begin with the same bytes."""

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])\Z")
_UNIT_NS: Final = {
    "H": 3600 * NS_PER_S,
    "M": 60 * NS_PER_S,
    "S": NS_PER_S,
    "m": 1000 * NS_PER_US,
    "u": NS_PER_US,
    "n": 1,
}
_IS_GRPC: Final = re.compile(r"application/grpc(?:\Z|[+;])").match
_UNSAFE: Final = re.compile(rb"[^\x20-\x24\x26-\x7e]")


class RequestHead:
    """What a call says before its first message.

    Args:
        path: `/SERVICE/METHOD`.
        timeout_ns: Until its deadline; None where it has none.
        encoding: Of its compressed messages.
        metadata: All that is not the transport's own.
    """

    __slots__ = ("encoding", "metadata", "path", "timeout_ns")

    def __init__(
        self, path: str, timeout_ns: int | None, encoding: str, metadata: Metadata
    ) -> None:
        self.path = path
        self.timeout_ns = timeout_ns
        self.encoding = encoding
        self.metadata = metadata


class Fields:
    """What a header block says.

    Attributes:
        pairs: Names and values, in their order.
    """

    __slots__ = ("_request", "pairs")

    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs
        self._request: RequestHead | None = None

    @property
    def path(self) -> str:
        """`/SERVICE/METHOD`; empty where there is none."""
        return dict(self.pairs).get(":path", "")

    def request(self) -> RequestHead:
        """As `read_request`, which reads a block that comes again once."""
        if self._request is None:
            self._request = read_request(self.pairs)
        return self._request


class HeaderBlocks:
    """The header blocks of one connection, put together from their frames and decompressed.

    Attributes:
        is_open: A block has begun and not ended; nothing else may come meanwhile.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=EXPANDED_BYTES_MAX)
        self._known: dict[bytes, Fields] = {}
        self._block = b""
        self._stream_id = 0
        self._is_last = False
        self.is_open = False

    def begin(self, stream_id: int, flags: int, payload: memoryview) -> None:
        """Take a HEADERS frame."""
        self._block = frames.unpadded(payload, flags).tobytes()
        self._stream_id = stream_id
        self._is_last = bool(flags & frames.END_STREAM)
        self.is_open = True

    def go_on(self, stream_id: int, payload: memoryview) -> None:
        """Take a CONTINUATION frame.

        Raises:
            ConnectionBroken: There is nothing to go on with, or no end of it.
        """
        if not self.is_open or stream_id != self._stream_id:
            raise ConnectionBroken(Code.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block += payload
        if len(self._block) > BLOCK_BYTES_MAX:
            raise ConnectionBroken(Code.ENHANCE_YOUR_CALM, "a header block without end")

    def end(self) -> tuple[int, bool, Fields]:
        """The block is complete: its stream, whether that has no input, and its fields.

        Raises:
            ConnectionBroken: It cannot be decompressed, and so none after it can.
        """
        self.is_open = False
        block, self._block = self._block, b""
        fields = self._known.get(block)
        if fields is None:
            fields = self._decode(block)
        return self._stream_id, self._is_last, fields

    def _decode(self, block: bytes) -> Fields:
        """Read a block; remember it until the table that its meaning depends on changes."""
        table = self._decoder.header_table
        entries, size = table.dynamic_entries, table.maxsize
        newest, count = next(iter(entries), None), len(entries)
        try:
            decoded: Any = self._decoder.decode(block, raw=True)
        except hpack.HPACKError as error:
            raise ConnectionBroken(Code.COMPRESSION_ERROR, str(error)) from None
        fields = Fields([(_text(name), _text(value)) for name, value in decoded])
        is_new = next(iter(entries), None) is not newest
        if is_new or len(entries) != count or table.maxsize != size:
            self._known.clear()
        elif len(block) <= REMEMBERED_BYTES_MAX:
            if len(self._known) >= REMEMBERED_MAX:
                self._known.clear()
            self._known[block] = fields
        return fields


def read_request(headers: Iterable[tuple[str, str]]) -> RequestHead:
    """Make sense of a request's headers.

    Raises:
        RpcError: It is no gRPC call, or a header of it is malformed.
    """
    path = encoding = content_type = method = ""
    timeout_ns: int | None = None
    metadata: list[tuple[str, str | bytes]] = []
    size = 0
    for name, value in headers:
        size += len(name) + len(value) + 32
        match name:
            case ":path":
                path = value
            case ":method":
                method = value
            case "content-type":
                content_type = value
            case "grpc-timeout":
                timeout_ns = _timeout_ns(value)
            case "grpc-encoding":
                encoding = value
            case "te" | "grpc-accept-encoding" | "user-agent":
                pass
            case _ if name.endswith("-bin"):
                metadata += ((name, _unbase64(part)) for part in value.split(","))
            case _ if not name.startswith((":", "grpc-")):
                metadata.append((name, value))
    if size > HEADER_LIST_BYTES_MAX:
        raise RpcError(
            Status.RESOURCE_EXHAUSTED,
            f"the call's headers have {size} bytes; {HEADER_LIST_BYTES_MAX} are taken",
        )
    if method != "POST" or not _IS_GRPC(content_type):
        raise RpcError(Status.INTERNAL, "not a gRPC call: POST of application/grpc is wanted")
    return RequestHead(path, timeout_ns, encoding, tuple(metadata))


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


def _text(raw: bytes) -> str:
    """What a header says; no bytes are wrong, since the table and the other calls are as well."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _timeout_ns(value: str) -> int:
    match = _TIMEOUT.match(value)
    if match is None:
        raise RpcError(Status.INTERNAL, f"grpc-timeout `{value[:20]}` is malformed")
    return int(match[1]) * _UNIT_NS[match[2]]


def _unbase64(value: str) -> bytes:
    try:
        return base64.b64decode(value.strip() + "=" * (-len(value.strip()) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise RpcError(Status.INTERNAL, "a binary header is not base64") from None


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
OK: Final[bytes] = trailers(Status.OK, "", ())
"""The one that ends a response as it should."""
TABLE_BYTES_DEFAULT: Final = 4096
"""Of a client's table for our blocks."""
NO_TABLE: Final = b"\x20"
"""Before a block: from here on it has 0 bytes."""
