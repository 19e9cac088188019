"""ZeroMQ channel between a gateway and a worker: PUSH and PULL over ipc sockets.

    gateway  PUSH --- work ----------> PULL  worker      PREFIX.work, bound by the worker
    gateway  PULL <-- completions ---- PUSH  worker      PREFIX.done, bound by the gateway
    gateway  <------- end of file ---------> worker      unix socket of the handshake

The receiver binds, so that a PUSH socket queues frames before its peer is there. When a process
exits, the kernel closes its unix socket and its ZeroMQ connections together, but ZeroMQ's I/O
thread may deliver the last frames after the end of file. The channel therefore ends when ZeroMQ has
reported the disconnection, or after `DISCONNECT_NS`.

Source: zmq_socket(3), zmq_getsockopt(3) (ZMQ_FD, ZMQ_LINGER), zmq_socket_monitor(3).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.interprocess.control.channel import FRAME_BYTES_MAX, Channel, require_length, too_long

QUEUED_FRAMES_MAX: Final = 256
"""High-water mark of each socket; credits keep far fewer frames in transit."""
RECEIVED_BYTES_MAX: Final = 4 * FRAME_BYTES_MAX
"""Longest frame that ZeroMQ receives; a longer one costs its sender the connection. From
`FRAME_BYTES_MAX` up to here, `receive` raises the error."""
DISCONNECT_NS: Final = 200 * NS_PER_MS
"""Longest wait for the disconnection after the end of file. A forked child of a worker keeps the
connection open."""
FLUSH_MS: Final = 1000
"""Longest wait of a worker that closes, until its last frames are sent."""
RECONNECT_MS: Final = 2
"""Interval of a PUSH socket's attempts to connect while the peer has not bound its socket."""


class ZmqChannel(Channel):
    """One end of a ZeroMQ channel. Owns: the unix socket, two ZeroMQ sockets, their context.

    Args:
        connection: Unix socket of the handshake.
        prefix: Path of the ipc sockets without the suffix; the folder has mode 0700.
        is_gateway: Whether this is the gateway's end.
        wait_s: Time that `receive` waits for a first frame; None: `receive` does not block.

    Raises:
        OSError: The ipc socket cannot be bound.
    """

    def __init__(
        self, connection: socket.socket, prefix: str, is_gateway: bool, wait_s: float | None = None
    ) -> None:
        super().__init__()
        connection.setblocking(False)
        self._socket = connection
        self._wait_s = wait_s or 0.0
        self._pid = os.getpid()
        self._is_gateway = is_gateway
        self._ends_ns = 0
        self._is_disconnected = False
        self._paths = (f"{prefix}.done", f"{prefix}.work")
        own_path, peer_path = self._paths if is_gateway else self._paths[::-1]
        self._epoll = select.epoll()
        self._context: Any = zmq.Context(io_threads=1)
        self._pull: Any = self._context.socket(zmq.PULL)
        self._push: Any = self._context.socket(zmq.PUSH)
        self._monitor: Any = self._pull.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.linger = self._pull.linger = self._push.linger = 0
        self._pull.rcvhwm = self._push.sndhwm = QUEUED_FRAMES_MAX
        self._push.reconnect_ivl = RECONNECT_MS
        self._pull.maxmsgsize = RECEIVED_BYTES_MAX
        try:
            self._pull.bind(f"ipc://{own_path}")
            self._push.connect(f"ipc://{peer_path}")
        except zmq.ZMQError as error:
            self._close_zmq(0)
            raise OSError(error.errno, str(error), own_path) from None
        self._receive: Any = self._pull.recv
        self._socket_fd, self._monitor_fd = connection.fileno(), int(self._monitor.fd)
        for fd in (self._socket_fd, self._monitor_fd, int(self._pull.fd)):
            self._epoll.register(fd, select.EPOLLIN)
        # ZeroMQ signals the arrival of an event only to a reader that has found nothing before.
        self._read_events()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def receive(self) -> Iterator[memoryview]:
        """See `Channel`."""
        ready = [fd for fd, _ in self._epoll.poll(self._wait_s)]
        # Events come before frames: frames that arrived before the disconnection are in the queue.
        if self._monitor_fd in ready:
            self._read_events()
        if not self._ends_ns and self._socket_fd in ready and self._is_hung_up():
            self._ends_ns = now_ns() + DISCONNECT_NS
        is_last = self._is_disconnected or now_ns() > self._ends_ns
        while True:
            try:
                frame = self._receive(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frame) > FRAME_BYTES_MAX:
                raise too_long(len(frame))
            yield memoryview(frame)
        self.has_ended = self._ends_ns > 0 and is_last

    def send(self, frame: bytes) -> None:
        """See `Channel`."""
        require_length(frame)
        if self._ends_ns:
            return
        try:
            self._push.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            text = f"{QUEUED_FRAMES_MAX} frames queued: the peer does not read"
            raise BlockingIOError(errno.EAGAIN, text) from None

    def close(self) -> None:
        """See `Channel`."""
        self._close_zmq(0 if self._is_gateway or self._ends_ns else FLUSH_MS)
        self._socket.close()
        # A peer that was killed has not removed its own socket file.
        if self._is_gateway and self._pid == os.getpid():
            for path in self._paths:
                Path(path).unlink(missing_ok=True)

    def leave_open(self) -> None:
        """See `Channel`."""
        self._close_zmq(FLUSH_MS)
        self._socket.detach()

    def _is_hung_up(self) -> bool:
        """Return whether the peer has closed its unix socket, on which it sends nothing."""
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def _read_events(self) -> None:
        """Note the disconnection, after which ZeroMQ receives nothing more from the peer."""
        with contextlib.suppress(zmq.Again):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._is_disconnected = True

    def _close_zmq(self, flush_ms: int) -> None:
        """Close the ZeroMQ sockets, which block until frames are sent or the time is over.

        In a forked child this does nothing: the threads of the context are not there.
        """
        if self._pid != os.getpid():
            return
        with contextlib.suppress(zmq.ZMQError):
            self._pull.disable_monitor()
        self._monitor.close(0)
        self._pull.close(0)
        self._push.close(flush_ms)
        self._context.term()
        self._epoll.close()
