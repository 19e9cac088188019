"""Event streams of several gateway processes, for the subscribers of their parent.

Runs on: gateway loop (`ForwardedPublications`), and the parent's loop (`Forwarder`).

Source: zmq_socket(3) (ZMQ_PUB, ZMQ_SUB), zmq_getsockopt(3) (ZMQ_FD).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import zmq

from iskander.config.schema import Config
from iskander.gateway.event_stream.broadcaster import Broadcaster

SOCKET: Final = "events.sock"
"""In the parent's runtime directory."""
LINGER_MS: Final = 500
"""Longest wait at the end until the parent has the last events."""
MESSAGES_PER_TURN: Final = 64


class ForwardedPublications:
    """Connection of a gateway process to the forwarder.

    Attributes:
        address: Address for subscribers.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.address = config.events.address
        self._context: Any = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.PUB)
        self._socket.sndhwm, self._socket.linger = config.events.subscriber_messages, LINGER_MS
        self._socket.connect(f"ipc://{folder / SOCKET}")

    def publish(self, topic: bytes, body: bytes) -> None:
        """Send a message; never blocks, and drops what the parent does not read."""
        if not self._socket.closed:
            self._socket.send_multipart((topic, body), zmq.DONTWAIT)

    async def stop(self) -> None:
        """Send what waits, within `LINGER_MS`, and close. Idempotent."""
        self._socket.close()
        self._context.term()


class Forwarder:
    """Receives the messages of all processes, and broadcasts them."""

    def __init__(self, broadcaster: Broadcaster, config: Config, folder: Path) -> None:
        self._broadcaster = broadcaster
        self._loop = asyncio.get_running_loop()
        self._context: Any = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.SUB)
        self._messages_max = config.events.subscriber_messages
        self._socket.rcvhwm, self._socket.linger = self._messages_max, 0
        self._socket.subscribe(b"")
        self._socket.bind(f"ipc://{folder / SOCKET}")
        self._fd = int(self._socket.fd)
        self._loop.add_reader(self._fd, self._forward)
        self._forward()

    def stop(self) -> None:
        """Forward what has arrived, and close."""
        self._loop.remove_reader(self._fd)
        for _ in range(self._messages_max):
            if not self._forward_next():
                break
        self._socket.close()
        self._context.term()

    def _forward(self) -> None:
        # ZeroMQ signals an arrival only to a reader that has found nothing before.
        if self._socket.closed:
            return
        for _ in range(MESSAGES_PER_TURN):
            if not self._forward_next():
                return
        self._loop.call_soon(self._forward)

    def _forward_next(self) -> bool:
        try:
            topic, body = self._socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return False
        self._broadcaster.publish(topic, body)
        return True
