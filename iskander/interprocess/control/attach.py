"""Handshake on the attach socket, by which a worker registers at a gateway.

A worker connects and sends `Hello`. The gateway checks the peer's user and answers `Welcome` with
descriptors, or `Refused`. The same socket then is the channel for work (`channel`).

Does not import NumPy: a worker runs this before it is pinned to its cores.

Source: unix(7) (SO_PEERCRED, SCM_RIGHTS), flock(2).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from iskander.errors import ProtocolError
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.interprocess.control.channel import FRAME_BYTES_MAX, Channel, SeqpacketChannel
from iskander.interprocess.control.messages import (
    Hello,
    Refused,
    Welcome,
    decode_hello,
    decode_welcome,
    encode,
)

DESCRIPTORS = 4
"""Input arena, output arena, heartbeat segment, and the pipe of batch cancellations."""

SOCKET_PATH_BYTES_MAX = 107
"""Linux keeps a unix socket's path in 108 bytes, of which the last is zero."""


def listen(path: str, *, mode: int = 0o600) -> socket.socket:
    """Listen for workers; the caller holds the runtime directory's lock."""
    Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(path)
    os.chmod(path, mode)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def connect(path: str, timeout_s: float) -> socket.socket:
    """Connect to a gateway."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and uid of the peer as reported by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


def require_same_user(connection: socket.socket) -> None:
    """Raise a `ProtocolError` unless the peer belongs to this process's user or root."""
    _, uid = peer_of(connection)
    if uid not in (os.getuid(), 0):
        raise ProtocolError(f"peer process belongs to user {uid}, expected {os.getuid()} or root")


def send_hello(connection: socket.socket, hello: Hello) -> None:
    """Request registration. Runs on: worker main."""
    connection.sendall(encode(hello))


def read_hello(frame: bytes) -> Hello:
    """Decode a `Hello` or raise a `ProtocolError`. Runs on: gateway loop."""
    try:
        return decode_hello(frame)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"malformed Hello from a worker: {error}") from None


def send_answer(
    connection: socket.socket, answer: Welcome | Refused, descriptors: tuple[int, ...] = ()
) -> None:
    """Answer a worker, with descriptors for a welcome. Runs on: gateway loop."""
    socket.send_fds(connection, [encode(answer)], list(descriptors))


def receive_answer(connection: socket.socket) -> tuple[Welcome | Refused, list[int]]:
    """Receive the gateway's answer; the caller owns the descriptors. Runs on: worker main.

    Raises:
        ProtocolError: The gateway closed the connection or sent another message.
        TimeoutError: No answer arrived in time.
    """
    frame, descriptors, _, _ = socket.recv_fds(
        connection, FRAME_BYTES_MAX, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    try:
        answer = decode_welcome(frame)
        if isinstance(answer, Welcome) and len(descriptors) != DESCRIPTORS:
            raise ProtocolError(f"{len(descriptors)} descriptors received, expected {DESCRIPTORS}")
    except (ValueError, ProtocolError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        reason = str(error) if frame else "the connection was closed"
        raise ProtocolError(f"the gateway's answer is invalid: {reason}") from None
    return answer, descriptors


def open_channel(
    connection: socket.socket, prefix: str, *, is_gateway: bool, wait_s: float | None = None
) -> Channel:
    """Open the channel that the `Welcome` message names.

    Args:
        connection: Unix socket of the handshake.
        prefix: Path of the ipc sockets of a ZeroMQ channel; empty for a seqpacket channel.
        is_gateway: Whether this is the gateway's end.
        wait_s: Time that `receive` waits for a first frame; None: `receive` does not block.
    """
    if not prefix:
        return SeqpacketChannel(connection, wait_s)
    from iskander.interprocess.control.zmq_channel import ZmqChannel

    return ZmqChannel(connection, prefix, is_gateway, wait_s)


class LockFile:
    """A lock held for the life of its process; the kernel releases it with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Acquire the lock unless this process holds it already.

        Returns False if another process holds the lock, or if its folder is gone: a gateway removes
        the folder when it stops.
        """
        if self._fd is not None:
            return True
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Release the lock; the file stays, since removal would race with the next holder."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
