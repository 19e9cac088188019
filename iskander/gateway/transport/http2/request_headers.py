"""Request headers of a gRPC call: validation, path, timeout, encoding and metadata.

A malformed HTTP request resets its stream. A valid HTTP request that is not a valid gRPC call ends
with a gRPC status.

Pure. Source: RFC 9113, sections 8.2 and 8.3; gRPC over HTTP/2 (Request-Headers, Timeout,
Custom-Metadata).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Final

from iskander.foundation.clock import NS_PER_S, NS_PER_US
from iskander.gateway.transport.http2.frames import ErrorCode, StreamError
from iskander.gateway.transport.http2.response_headers import Metadata
from iskander.gateway.transport.http2.status import RpcError, Status

HEADER_LIST_BYTES_MAX: Final = 16_384
"""As gRPC counts: names, values and 32 bytes for each field."""
BINARY_PARTS_MAX: Final = 128
"""Values of `-bin` headers in one request; a header may contain several, separated by commas."""

_TIMEOUT: Final = re.compile(r"([0-9]{1,8})([HMSmun])\Z")
_UNIT_NS: Final = {
    "H": 3600 * NS_PER_S, "M": 60 * NS_PER_S, "S": NS_PER_S,
    "m": 1000 * NS_PER_US, "u": NS_PER_US, "n": 1,
}  # fmt: skip
_LENGTH_DIGITS_MAX: Final = 18
_IS_GRPC: Final = re.compile(r"application/grpc(?:\Z|[+;])").match
_BASE64: Final = re.compile(r"([A-Za-z0-9+/]*+)(={0,2})\Z")
"""`b64decode` accepts padding of any length, also inside a value."""
_IS_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+\Z").match
_IS_BROKEN_VALUE: Final = re.compile(r"[\0\r\n]").search
"""White space around a value is accepted: gRPC clients may send it in metadata."""
_PSEUDO: Final = frozenset((":method", ":scheme", ":path", ":authority"))
_CONNECTION_SPECIFIC: Final = frozenset(
    ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
)


class NotGrpc(RpcError):
    """A valid HTTP request that is not a gRPC call."""


class RequestHeaders:
    """Request headers of a call; metadata are the fields that the transport does not use."""

    def __init__(
        self,
        path: str,
        timeout_ns: int | None,
        encoding: str,
        metadata: Metadata,
        content_bytes: int,
    ) -> None:
        self.path = path
        self.timeout_ns = timeout_ns
        self.encoding = encoding
        self.metadata = metadata
        self.content_bytes = content_bytes  # `content-length`; -1 without one.


def read_request(fields: Sequence[tuple[str, str]]) -> RequestHeaders:
    """Validate and read the header fields of a request; sizes are checked before values.

    Raises `StreamError` for malformed HTTP, `NotGrpc` for another request, `RpcError` for headers
    that are too large or malformed.
    """
    _require_limits(fields)
    pseudo = check_fields(fields)
    for name in (":method", ":scheme", ":path"):
        if not pseudo.get(name):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, f"missing pseudo-header `{name}`")
    encoding = content_type = ""
    timeout_ns: int | None = None
    content_bytes = -1
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in fields:
        match name:
            case "content-type":
                content_type = value
            case "grpc-timeout":
                timeout_ns = _timeout_ns(value)
            case "grpc-encoding":
                encoding = value
            case "content-length":
                content_bytes = _content_bytes(value)
            case "te" | "grpc-accept-encoding" | "user-agent":
                pass
            case _ if name.endswith("-bin"):
                metadata += ((name, _unbase64(part)) for part in value.split(","))
            case _ if not name.startswith((":", "grpc-")):
                metadata.append((name, value))
    if pseudo[":method"] != "POST" or not _IS_GRPC(content_type):
        raise NotGrpc(Status.INTERNAL, "not a gRPC call: expected POST of application/grpc")
    return RequestHeaders(pseudo[":path"], timeout_ns, encoding, tuple(metadata), content_bytes)


def _require_limits(fields: Sequence[tuple[str, str]]) -> None:
    size = parts = 0
    for name, value in fields:
        size += len(name) + len(value) + 32
        if name.endswith("-bin"):
            parts += 1 + value.count(",")
    if size > HEADER_LIST_BYTES_MAX:
        message = f"request headers too large: {size:,} bytes, limit {HEADER_LIST_BYTES_MAX:,}"
        raise RpcError(Status.RESOURCE_EXHAUSTED, message)
    if parts > BINARY_PARTS_MAX:
        message = f"too many binary header values: {parts:,}, limit {BINARY_PARTS_MAX:,}"
        raise RpcError(Status.RESOURCE_EXHAUSTED, message)


def check_fields(fields: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Check the fields of a block; return its pseudo-header fields, or raise `StreamError`."""
    pseudo: dict[str, str] = {}
    is_regular = False
    for name, value in fields:
        if name[:1] == ":":
            if is_regular or name not in _PSEUDO or name in pseudo:
                message = f"unknown, repeated or misplaced pseudo-header `{name[:40]}`"
                raise StreamError(ErrorCode.PROTOCOL_ERROR, message)
            pseudo[name] = value
        else:
            is_regular = True
            if not _IS_NAME(name):
                raise StreamError(ErrorCode.PROTOCOL_ERROR, "invalid header name")
            if name in _CONNECTION_SPECIFIC or (name == "te" and value != "trailers"):
                message = f"header `{name}` not allowed in HTTP/2"
                raise StreamError(ErrorCode.PROTOCOL_ERROR, message)
        if _IS_BROKEN_VALUE(value):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, f"invalid value of header `{name[:40]}`")
    return pseudo


def _content_bytes(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= _LENGTH_DIGITS_MAX):
        raise StreamError(ErrorCode.PROTOCOL_ERROR, "invalid content-length")
    return int(value)


def _timeout_ns(value: str) -> int:
    match = _TIMEOUT.match(value)
    if match is None:
        raise RpcError(Status.INTERNAL, f"malformed grpc-timeout `{value[:20]}`")
    return int(match[1]) * _UNIT_NS[match[2]]


def _unbase64(value: str) -> bytes:
    """Decode base64 with or without padding."""
    match = _BASE64.match(value.strip())
    digits, padding = (len(match[1]), len(match[2])) if match is not None else (1, 0)
    if digits % 4 == 1 or (padding and (digits + padding) % 4):
        raise RpcError(Status.INTERNAL, "binary header value is not base64")
    return base64.b64decode(value.strip() + "=" * (-(digits + padding) % 4))
