"""Memory that a gateway lends to a client of its machine: how it is had, and what lies where in it.

    unix socket   client -> gateway  Borrow    a region of so many bytes
                  gateway -> client  Lent      with its descriptor, while the connection is open
    DoExchange    header `iskander-region`     the region in which the stream's batches may be
                  a message without a header   its `app_metadata` is Located: where a batch is

All three are msgpack maps. The descriptor is a memfd that the gateway made and sealed; nothing is
opened by a name that a client gave. What is said of a batch comes over the stream, and only its
body is in the region, so nothing that the gateway relies on can change under it.

Runs on: gateway loop and clients. Source: unix(7) (SCM_RIGHTS), Arrow IPC's encapsulated messages.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from iskander.decoders import thread_safe
from iskander.errors import IskanderError, MalformedInput, ProtocolError

SaidT = TypeVar("SaidT")

REGION_HEADER = "iskander-region"
FRAME_BYTES_MAX = 4096


@thread_safe
class RegionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client asks for."""

    bytes: int


@thread_safe
class RegionGrant(msgspec.Struct, frozen=True):
    """What it gets.

    Attributes:
        region: The name by which its streams say where their batches are.
        bytes: Its length; no less than was asked for.
        error: Instead of both, as `IskanderError.to_wire` tells it.
    """

    region: str = ""
    bytes: int = 0
    error: dict[str, Any] | None = None


@thread_safe
class BodyLocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A batch whose body is in the stream's region.

    Attributes:
        header: Flatbuffer header of its Arrow IPC message.
        body: Where its body begins in the region, and its length in bytes.
        app_metadata: The batch's own.
    """

    header: bytes
    body: tuple[int, int]
    app_metadata: bytes = b""


encode = msgspec.msgpack.Encoder().encode
_read_borrow = msgspec.msgpack.Decoder(RegionRequest).decode
_read_lent = msgspec.msgpack.Decoder(RegionGrant).decode
_read_located = msgspec.msgpack.Decoder(BodyLocation).decode


def read_region_request(frame: bytes) -> RegionRequest:
    """What a client asks for.

    Raises:
        MalformedInput: It is no `RegionRequest`.
    """
    return _read(_read_borrow, frame, "what was asked for")


def read_body_location(app_metadata: bytes) -> BodyLocation:
    """Where a batch is.

    Raises:
        MalformedInput: It is no `BodyLocation`.
    """
    return _read(_read_located, app_metadata, "where the batch is")


def _read(decode: Callable[[bytes], SaidT], said: bytes, what: str) -> SaidT:
    try:
        return decode(said)
    except ValueError as error:
        raise MalformedInput(f"{what} was not understood: {error}") from None


def send_region(connection: socket.socket, lent: RegionGrant, fd: int | None = None) -> None:
    """Answer a client, with a descriptor where it gets memory. Runs on: gateway loop."""
    socket.send_fds(connection, [encode(lent)], [] if fd is None else [fd])


def request_region(
    path: Path, length_bytes: int, timeout_s: float
) -> tuple[socket.socket, RegionGrant, int]:
    """Ask for memory; the caller owns the connection and the descriptor. Runs on: a client.

    Raises:
        OSError: Nobody answers at the path.
        IskanderError: Why there is none.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    descriptors: list[int] = []
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(encode(RegionRequest(length_bytes)))
        frame, descriptors, _, _ = socket.recv_fds(
            connection, FRAME_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
        )
        if not frame:
            raise ConnectionResetError("it hung up")
        lent = _read_lent(frame)
        if lent.error is not None:
            raise IskanderError.from_wire(lent.error)
        if len(descriptors) != 1:
            raise ProtocolError("no memory came with the gateway's answer")
    except BaseException as error:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, msgspec.DecodeError):
            raise ProtocolError(f"the gateway's answer was not understood: {error}") from None
        raise
    return connection, lent, descriptors[0]
