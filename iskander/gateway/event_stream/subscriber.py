"""Subscriber of an event stream, for commands and tests.

Other programs need only a ZeroMQ and a msgpack library: the documentation has an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from iskander.errors import ProtocolError
from iskander.gateway.event_stream.losses import Losses
from iskander.gateway.event_stream.messages import ENCODING, HEARTBEAT, Heartbeat, Message, decode

QUEUED_MESSAGES_MAX = 10_000


class Subscriber:
    """A connected SUB socket.

    Attributes:
        losses: Count of the lost events.

    Args:
        address: `events.address` of the server.
        topics: Begins of topics; none: all.
    """

    def __init__(self, address: str, topics: Sequence[str] = ()) -> None:
        topics = tuple(topics) or ("",)
        self.losses = Losses(topics)
        self._context: Any = zmq.Context(io_threads=1)
        self._socket: Any = self._context.socket(zmq.SUB)
        self._socket.linger, self._socket.rcvhwm = 0, QUEUED_MESSAGES_MAX
        self._socket.ipv6 = "[" in address
        for topic in {*topics, HEARTBEAT}:
            self._socket.subscribe(topic)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise ProtocolError(
                f"{address} is not an address of an event stream: {error}"
            ) from None

    def receive(self, timeout_s: float) -> tuple[str, Message, int] | None:
        """Return the next message: topic, content, events lost before it; None after a timeout.

        Raises:
            ProtocolError: It is no message of an event stream.
        """
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        frames = self._socket.recv_multipart()
        try:
            topic, body = frames
            message = decode(body)
            title = topic.decode(ENCODING)
        except (ValueError, msgspec.DecodeError) as error:
            raise ProtocolError(f"this is no message of an event stream: {error}") from None
        if isinstance(message, Heartbeat):
            return title, message, self.losses.on_heartbeat(message)
        return title, message, self.losses.on_batch(title, message)

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
