"""ZMQ sockets for work and results: single frames, PUSH to a worker, PULL at the gateway.

    gateway PUSH --connect--> worker PULL (bind)      Execute, Load, Drain
    worker  PUSH --connect--> gateway PULL (bind)     Ready, Loaded, Done, Failed

Both senders connect, so that a message waits in the sender until the peer listens and none is
dropped. High-water marks are off: they are not backpressure (a mark of 5 let 398 messages
through); credits bound what is under way. Nothing else imports zmq for control.

Source: zmq_socket(7), zmq_setsockopt(3), zmq_ipc(7).
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import zmq

_READABLE = int(zmq.POLLIN)

SOCKET_PATH_BYTES_MAX = 107
"""Linux keeps a unix socket's path in 108 bytes with the final zero."""


def open_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One context a process: one I/O thread."""
    return zmq.Context(io_threads=1)


class Receiver:
    """The listening end. Owns: its socket file, removed by `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: str) -> None:
        self._path = path
        self.address = f"ipc://{path}"
        self._socket = context.socket(zmq.PULL)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self.address)

    @property
    def fd(self) -> int:
        """Becomes readable when something may have come; then read until nothing is left."""
        return int(self._socket.get(zmq.FD))

    def receive_waiting(self) -> Iterator[bytes]:
        """Every frame that has come, without waiting."""
        socket, no_wait = self._socket, int(zmq.NOBLOCK)
        # Asked before each read, and in plain integers: an exception at the end of every wake-up,
        # or an enum for every answer, costs more than the read itself.
        while int(socket.get(zmq.EVENTS)) & _READABLE:
            yield socket.recv(no_wait)

    def close(self) -> None:
        """Close at once, dropping what was not read."""
        self._socket.close(0)
        if os.path.exists(self._path):
            os.unlink(self._path)


class Sender:
    """The connecting end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.connect(address)
        self._send = self._socket.send

    def send(self, frame: bytes) -> None:
        """Queue a frame; never waits."""
        self._send(frame, zmq.NOBLOCK)

    def close(self, *, linger_ms: int = 0) -> None:
        """Close, waiting in the background up to `linger_ms` for what is still queued."""
        self._socket.close(linger_ms)


class Waiter:
    """Waits for a receiver or a descriptor, whichever speaks first. Runs on: worker main.

    Over the descriptors themselves, which is a third of the cost of ZMQ's poller. ZMQ's becomes
    readable once for a number of frames: read all that wait before waiting again.
    """

    def __init__(self, receiver: Receiver, fd: int) -> None:
        self._fd = fd
        self._epoll = select.epoll()
        self._epoll.register(receiver.fd, select.EPOLLIN)
        self._epoll.register(fd, select.EPOLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait; True where the descriptor has something to say (for a gateway: its end)."""
        return any(source == self._fd for source, _ in self._epoll.poll(timeout_s))

    def close(self) -> None:
        """Close the descriptor that waits."""
        self._epoll.close()
