"""Birth: the unix socket on which a worker is taken on.

A worker connects and says `Hello`; the gateway checks who it is by the kernel's word (not by the
worker's) and answers `Welcome` with descriptors, or `Refused`. From there on the same socket is the
channel for work (`channel`).

Does not import NumPy: a worker runs this before it is placed on its cores.

Source: unix(7) (SO_PEERCRED, SCM_RIGHTS), flock(2).
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from iskander.control.channel import FRAME_BYTES_MAX
from iskander.control.messages import Hello, Refused, Welcome, decode_hello, decode_welcome, encode
from iskander.errors import ProtocolError

DESCRIPTORS = 4
"""Input arena, output arena, beat segment, and the pipe that names batches to give up."""

SOCKET_PATH_BYTES_MAX = 107
"""Linux keeps a unix socket's path in 108 bytes with the final zero."""


class Peer(NamedTuple):
    """Who is at the other end, by the kernel's word."""

    pid: int
    uid: int
    gid: int


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
    """Connect to a gateway.

    Raises:
        OSError: Nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> Peer:
    """The process at the other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", raw))


def require_peer(connection: socket.socket) -> None:
    """Refuse a peer of another user than this process's or root.

    Raises:
        ProtocolError: Says whose it is.
    """
    uid = peer_of(connection).uid
    if uid not in (os.getuid(), 0):
        raise ProtocolError(f"the process at the other end belongs to user {uid}")


def send_hello(connection: socket.socket, hello: Hello) -> None:
    """Ask to be taken on. Runs on: worker main."""
    connection.sendall(encode(hello))


def read_hello(frame: bytes) -> Hello:
    """What a worker asks. Runs on: gateway loop.

    Raises:
        ProtocolError: It is no `Hello`.
    """
    try:
        return decode_hello(frame)
    except ValueError as error:
        raise ProtocolError(f"a worker's first message was not understood: {error}") from None


def send_answer(
    connection: socket.socket, answer: Welcome | Refused, descriptors: tuple[int, ...] = ()
) -> None:
    """Answer a worker, with descriptors for a welcome. Runs on: gateway loop."""
    socket.send_fds(connection, [encode(answer)], list(descriptors))


def receive_answer(connection: socket.socket) -> tuple[Welcome | Refused, list[int]]:
    """Read the gateway's answer; the caller owns the descriptors. Runs on: worker main.

    Raises:
        ProtocolError: The gateway hung up, or said something else.
        TimeoutError: It said nothing within the connection's timeout.
    """
    frame, descriptors, _, _ = socket.recv_fds(
        connection, FRAME_BYTES_MAX, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
    )
    try:
        answer = decode_welcome(frame)
        if isinstance(answer, Welcome) and len(descriptors) != DESCRIPTORS:
            raise ProtocolError(f"{len(descriptors)} descriptors came instead of {DESCRIPTORS}")
    except (ValueError, ProtocolError) as error:
        for descriptor in descriptors:
            os.close(descriptor)
        reason = "it hung up" if not frame else str(error)
        raise ProtocolError(f"the gateway's answer was not understood: {reason}") from None
    return answer, descriptors


class LockFile:
    """A file whose lock says that its holder lives; the kernel gives it up with the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def take(self) -> bool:
        """Take the lock, if it is not held already; False where another process holds it."""
        if self._fd is not None:
            return True
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the lock up; the file stays, since removing it would race with the next holder."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
