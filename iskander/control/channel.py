"""The one socket between a gateway and a worker: whole frames both ways, and an end that is news.

    worker  --- Hello -->  gateway          birth (`attach`)
    worker  <-- Welcome + descriptors ---   gateway
    worker  <-- Execute, Load, Drain ---    gateway          work
    worker  --- Loaded, Done, Failed -->    gateway
    worker  ---- end of file ---- gateway                    death of either

A SOCK_SEQPACKET unix socket keeps frames whole and in order, has no name once it is connected, and
tells of the other side's end after the last frame that it sent. Nothing is queued in this process:
what is under way is bounded by credits, and is far less than the kernel's buffer.

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
"""Frames are far smaller; the largest tells of a contract with a thousand columns. Both buffers
are asked to hold one, which the system's usual ceiling (net.core.wmem_max) allows."""

_WHOLE: Final = int(socket.MSG_TRUNC)
"""Of a frame that is cut off, its whole length is told."""
_NO_WAIT: Final = int(socket.MSG_DONTWAIT | socket.MSG_TRUNC)


class Channel:
    """One end of the socket, after birth. Owns: the socket.

    Args:
        connection: Connected, of type SOCK_SEQPACKET.
        wait_s: How long `receive` waits for a first frame; None: not at all, and `send` never
            waits either.

    Attributes:
        has_ended: The other side is gone, and everything it sent has been received.
    """

    def __init__(self, connection: socket.socket, wait_s: float | None = None) -> None:
        self._socket = connection
        self._first_flags = _NO_WAIT
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FRAME_BYTES_MAX)
        connection.setblocking(wait_s is not None)
        if wait_s is not None:
            # The kernel's own timeout: one call waits and reads, where a poll would be another.
            timeval = struct.pack("@ll", int(wait_s), int(wait_s % 1 * 1_000_000))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._first_flags = _WHOLE
        self._buffer = memoryview(bytearray(FRAME_BYTES_MAX))
        # Says that nothing more has come without an exception, which takes as long as a message.
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        self._more = poll.poll
        self._receive_into = connection.recv_into
        self._send = connection.send
        self.has_ended = False

    def fileno(self) -> int:
        """Becomes readable when a frame, or the end, has come."""
        return self._socket.fileno()

    def receive(self) -> Iterator[memoryview]:
        """Every frame that has come, each valid until the next one is asked for.

        To be read to its end: libuv tells only once of a socket that was reset.

        Raises:
            ProtocolError: A frame was longer than there may be, and is lost.
        """
        flags = self._first_flags
        while not self.has_ended:
            try:
                length = self._receive_into(self._buffer, 0, flags)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # It ended with frames unread. Said once; what it sent before is still there.
                continue
            if not length:
                self.has_ended = True
                return
            if length > FRAME_BYTES_MAX:
                raise ProtocolError(
                    f"a frame has {length} bytes, and may have {FRAME_BYTES_MAX}: it is lost"
                )
            yield self._buffer[:length]
            if not self._more(0):
                return
            flags = _NO_WAIT

    def send(self, frame: bytes) -> None:
        """Send a frame; to one who is gone, nothing happens: `receive` tells.

        Raises:
            OSError: The frame is too long.
        """
        if len(frame) > FRAME_BYTES_MAX:
            raise OSError(errno.EMSGSIZE, f"a frame of {len(frame)} bytes")
        try:
            self._send(frame)
        except (BrokenPipeError, ConnectionResetError):
            return

    def close(self) -> None:
        """Close; the other side is told."""
        self._socket.close()

    def leave_open(self) -> None:
        """Leave the socket to the end of the process, so that its end-of-file means just that."""
        self._socket.detach()
