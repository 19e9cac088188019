"""Connection to one observer process: frames, and the arenas and models that it knows.

Nothing waits: while the socket is full, `send` and `introduce` return False.

Runs on: gateway loop. Source: unix(7) (SCM_RIGHTS).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from typing import Final

from iskander.errors import ProtocolError
from iskander.foundation.decoders import DECODE_ERRORS
from iskander.foundation.logs import observation as log
from iskander.gateway.observation.messages import (
    Arena,
    ArenaClosed,
    Copied,
    Model,
    ModelsForgotten,
    Report,
    ToObserver,
    decode_to_gateway,
    encode,
)
from iskander.interprocess.control.channel import SeqpacketChannel
from iskander.interprocess.memory.segment import Segment

MODELS_MAX: Final = 4096
"""Models that a process keeps; with one more, it forgets all."""


class Link:
    """Gateway's end of the socket, which its owner closes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._channel = SeqpacketChannel(connection)
        self._arenas: set[int] = set()
        self._models: set[tuple[int, int]] = set()
        self._unsent: list[ToObserver] = []

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    @property
    def has_ended(self) -> bool:
        """Whether the process has closed its end."""
        return self._channel.has_ended

    def send(self, message: ToObserver) -> bool:
        """Send a message; False if the socket is full or earlier messages wait."""
        if not self.send_unsent():
            return False
        return self._try_send(message)

    def send_unsent(self) -> bool:
        """Send the messages that had no space; False if one still has none."""
        while self._unsent:
            if not self._try_send(self._unsent[0]):
                return False
            del self._unsent[0]
        return True

    def introduce_arena(self, number: int, segment: Segment) -> bool:
        """Pass an arena once, with a descriptor that cannot write."""
        if number in self._arenas:
            return True
        if not self.send_unsent():
            return False
        message = encode(Arena(number, len(segment)))
        try:
            descriptor = os.open(f"/proc/self/fd/{segment.fd}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                socket.send_fds(self._socket, [message], [descriptor])
            finally:
                os.close(descriptor)
        except OSError:
            return False  # The socket is full, or there are too many open files.
        self._arenas.add(number)
        return True

    def introduce_model(self, key: int, bucket: int, make: Callable[[], Model]) -> bool:
        """Describe a model once."""
        if (key, bucket) in self._models:
            return True
        if len(self._models) >= MODELS_MAX:
            if not self.send(ModelsForgotten()):
                return False
            self._models.clear()
        if not self.send(make()):
            return False
        self._models.add((key, bucket))
        return True

    def close_arena(self, number: int) -> None:
        """Announce that an arena is not used any more; at the latest before the next message."""
        if number in self._arenas:
            self._arenas.remove(number)
            self._unsent.append(ArenaClosed(number))
            self.send_unsent()

    def receive(self) -> Iterator[Copied | Report]:
        """Yield the messages that have arrived; an invalid one ends the connection."""
        try:
            for frame in self._channel.receive():
                yield decode_to_gateway(frame)
        except (*DECODE_ERRORS, ProtocolError) as error:
            log.observer_message_invalid(reason=str(error))
            self._socket.shutdown(socket.SHUT_RDWR)  # The process exits, and is started again.

    def _try_send(self, message: ToObserver) -> bool:
        try:
            self._channel.send(encode(message))
        except OSError:
            return False  # Full; the exit of the process is seen by its pidfd.
        return True
