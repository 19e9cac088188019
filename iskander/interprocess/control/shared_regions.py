"""Shared memory between a gateway and a local client: handshake and batch locations.

    unix socket   client -> gateway  RegionRequest   minimum length in bytes
                  gateway -> client  RegionGrant     with a descriptor, while the connection is open
    DoExchange    header `iskander-region`           the region for the stream's batches
                  a message without a header         its `app_metadata` is a BodyLocation

All three are msgpack maps. The descriptor is a memfd that the gateway created and sealed; the
gateway opens no name that a client sends. The header of a batch travels in the stream, and only its
body is in the region, so the client cannot change anything that the gateway relies on.

Runs on: gateway loop and clients. Source: unix(7) (SCM_RIGHTS), Arrow IPC's encapsulated messages.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from iskander.errors import IskanderError, MalformedInput, ProtocolError
from iskander.foundation.clock import NS_PER_S, now_ns, pause_s
from iskander.foundation.decoders import DECODE_ERRORS, thread_safe

MessageT = TypeVar("MessageT")

REGION_HEADER = "iskander-region"
FRAME_BYTES_MAX = 4096
CONNECT_POLL_S = 0.005


@thread_safe
class RegionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Request of a region with at least `bytes` bytes."""

    bytes: int


@thread_safe
class RegionGrant(msgspec.Struct, frozen=True):
    """Answer to a `RegionRequest`: name and length of the region, or `IskanderError.to_wire`."""

    region: str = ""
    bytes: int = 0
    error: dict[str, Any] | None = None


@thread_safe
class BodyLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Location of a batch whose body is in the stream's region.

    Attributes:
        header: Flatbuffer header of its Arrow IPC message.
        body: Offset and length in bytes of its body in the region.
        app_metadata: Metadata that the client sends with the batch.
    """

    header: bytes
    body: tuple[int, int]
    app_metadata: bytes = b""


encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(RegionRequest).decode
_decode_grant = msgspec.msgpack.Decoder(RegionGrant).decode
_decode_location = msgspec.msgpack.Decoder(BodyLocation).decode


def read_region_request(frame: bytes) -> RegionRequest:
    """Decode a client's request, or raise a `MalformedInput`."""
    return _decode(_decode_request, frame, "region request")


def read_body_location(app_metadata: bytes) -> BodyLocation:
    """Decode the location of a batch, or raise a `MalformedInput`."""
    return _decode(_decode_location, app_metadata, "body location")


def _decode(decode: Callable[[bytes], MessageT], frame: bytes, kind: str) -> MessageT:
    try:
        return decode(frame)
    except DECODE_ERRORS as error:
        raise MalformedInput(f"malformed {kind}: {error}") from None


def send_region(connection: socket.socket, grant: RegionGrant, fd: int | None = None) -> None:
    """Answer a client, with a descriptor on success. Runs on: gateway loop."""
    socket.send_fds(connection, [encode(grant)], [] if fd is None else [fd])


def _connect(connection: socket.socket, path: Path, timeout_s: float) -> None:
    """Connect to the gateway's socket, and wait while the listener's backlog is full.

    connect(2) of a unix socket with a timeout fails with EAGAIN at once.
    """
    deadline_ns = now_ns() + int(timeout_s * NS_PER_S)
    while True:
        try:
            return connection.connect(str(path))
        except BlockingIOError:
            if now_ns() >= deadline_ns:
                raise
            pause_s(CONNECT_POLL_S)


def request_region(
    path: Path, length_bytes: int, timeout_s: float
) -> tuple[socket.socket, RegionGrant, int]:
    """Request a region; the caller owns the connection and the descriptor. Runs on: a client.

    Raises:
        OSError: The gateway does not answer at the path.
        IskanderError: The gateway rejected the request.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        _connect(connection, path, timeout_s)
        connection.sendall(encode(RegionRequest(length_bytes)))
        frame, descriptors, _, _ = socket.recv_fds(
            connection, FRAME_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not frame:
            raise ConnectionResetError("the gateway closed the connection")
        grant = _decode_grant(frame)
        if grant.error is not None:
            raise IskanderError.from_wire(grant.error)
        if len(descriptors) != 1:
            raise ProtocolError("the gateway's answer has no descriptor")
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, DECODE_ERRORS):
            raise ProtocolError(f"the gateway's answer is invalid: {error}") from None
        raise
    return connection, grant, descriptors[0]
