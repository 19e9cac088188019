"""Channel between a gateway and a worker: whole frames both ways, and the end of its peer.

Two implementations: `SeqpacketChannel`, the default, and `zmq_channel.ZmqChannel`.

    worker  --- Hello -->  gateway          handshake (`attach`)
    worker  <-- Welcome + descriptors ---   gateway
    worker  <-- Execute, Load, Drain ---    gateway          work
    worker  --- Loaded, Done, Failed -->    gateway
    worker  ---- end of file ---- gateway                    exit of either

The SOCK_SEQPACKET unix socket of the handshake keeps frames whole and in order, has no name once it
is connected, and signals the end of the peer after its last frame. This process queues nothing:
credits bound the data in transit, which is far less than the kernel's buffer.

Source: unix(7), socket(7) (SO_RCVTIMEO), recv(2) (MSG_TRUNC).
"""

from __future__ import annotations

import errno
import select
import socket
import struct
from collections.abc import Iterator
from typing import Final

from iskander.errors import ProtocolError

FRAME_BYTES_MAX: Final = 1 << 18
"""Maximum bytes of a frame. Usual frames are far smaller; the largest describes a contract with a
thousand columns. The send and receive buffers are set to hold one frame of this size, which the
system's usual ceiling (net.core.wmem_max) allows."""

_WHOLE: Final = int(socket.MSG_TRUNC)
"""Flag with which `recv` returns the whole length of a truncated frame."""
_NO_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)


class Channel:
    """One end of a connection between a gateway and a worker, after the handshake.

    Attributes:
        has_ended: Whether the peer has closed its end, and all its frames have been received.
    """

    def __init__(self) -> None:
        self.has_ended = False

    def fileno(self) -> int:
        """Return a descriptor that is readable when a frame or the end arrives."""
        raise NotImplementedError

    def receive(self) -> Iterator[memoryview]:
        """Yield every frame that has arrived, each valid until the next one.

        Raises:
            ProtocolError: A frame was longer than `FRAME_BYTES_MAX`; it is dropped.
        """
        raise NotImplementedError

    def send(self, frame: bytes) -> None:
        """Send a frame; to a closed peer, do nothing: `receive` reports the end.

        Raises:
            OSError: The frame is too long, or the peer does not read.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the channel; the peer receives the end of file."""
        raise NotImplementedError

    def leave_open(self) -> None:
        """Leave the socket open until this process exits, so that end of file means the exit."""
        raise NotImplementedError


class SeqpacketChannel(Channel):
    """One end of a seqpacket channel, after the handshake. Owns: the socket.

    Args:
        connection: Connected socket of type SOCK_SEQPACKET.
        wait_s: Time that `receive` waits for a first frame; None: `receive` and `send` never block.
    """

    def __init__(self, connection: socket.socket, wait_s: float | None = None) -> None:
        super().__init__()
        self._socket = connection
        self._first_flags = _NO_WAIT
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAME_BYTES_MAX)
        connection.setblocking(wait_s is not None)
        if wait_s is not None:
            # The kernel's own timeout: one call waits and reads, without a separate poll.
            timeval = struct.pack("@ll", int(wait_s), int(wait_s % 1 * 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._first_flags = _WHOLE
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX))
        # Detects an empty socket without an exception, which costs as much as a message.
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._poll = poll.poll
        self._receive_into = connection.recv_into
        self._send = connection.send

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Iterator[memoryview]:
        """See `Channel`."""
        # A caller that stops before the last frame calls again: libuv signals a reset socket once.
        flags = self._first_flags
        while not self.has_ended:
            try:
                length = self._receive_into(self._buffer, 0, flags)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed with frames unread; the error comes once, before its frames.
                continue
            if not length:
                self.has_ended = True
                return
            if length > FRAME_BYTES_MAX:
                raise too_long(length)
            yield self._buffer[:length]
            if not self._poll(0):
                return
            flags = _NO_WAIT

    def send(self, frame: bytes) -> None:
        """See `Channel`."""
        require_length(frame)
        try:
            self._send(frame)
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        self._socket.close()

    def leave_open(self) -> None:
        self._socket.detach()


def require_length(frame: bytes) -> None:
    """Raise an `OSError` if a frame is too long to be sent."""
    if len(frame) > FRAME_BYTES_MAX:
        raise OSError(errno.EMSGSIZE, _frame_too_long(len(frame)))


def too_long(length: int) -> ProtocolError:
    """Return the error for a received frame that is too long."""
    return ProtocolError(f"{_frame_too_long(length)}; it was dropped")


def _frame_too_long(length: int) -> str:
    return f"frame has {length} bytes, limit {FRAME_BYTES_MAX}"
