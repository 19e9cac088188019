"""Input of a subscriber: ZMTP handshake, subscriptions, pings.

Pure. Source: RFC 37/ZMTP 3.1, RFC 29/PUBSUB; in ZMTP 3.0, subscriptions are messages.
"""

from __future__ import annotations

from typing import Final

from iskander.gateway.transport.zmtp import frames
from iskander.gateway.transport.zmtp.frames import ProtocolViolation

SUBSCRIPTIONS_MAX: Final = 256
FRAME_BYTES_MAX: Final = 1024
MATCHES_MAX: Final = 1024
"""Cached results of `select`; more topics replace all of them."""
PEERS: Final = (b"SUB", b"XSUB")
_ADD: Final = (b"SUBSCRIBE", b"\x01")
_REMOVE: Final = (b"CANCEL", b"\x00")


class Subscriptions:
    """Begins of the topics that a subscriber has selected.

    Attributes:
        is_ready: The handshake is complete.
    """

    def __init__(self) -> None:
        self.is_ready = False
        self._is_greeted = False
        self._rest = b""
        self._begins: set[bytes] = set()
        self._matches: dict[bytes, bool] = {}  # By topic, since the last change of `_begins`.

    def select(self, topic: bytes) -> bool:
        """Return whether the subscriber receives a topic."""
        is_selected = self._matches.get(topic)
        if is_selected is None:
            if len(self._matches) >= MATCHES_MAX:
                self._matches.clear()
            is_selected = self._matches[topic] = topic.startswith(tuple(self._begins))
        return is_selected

    def feed(self, data: bytes) -> bytes:
        """Process received bytes; return the bytes to answer.

        Raises:
            ProtocolViolation: They are invalid, or exceed a limit.
        """
        data, answer = self._rest + data, b""
        at = 0
        if not self._is_greeted:
            frames.check_greeting(data)
            if len(data) < frames.GREETING_BYTES:
                self._rest = data
                return b""
            self._is_greeted, at = True, frames.GREETING_BYTES
            answer = frames.ready(Socket_Type=b"PUB")
        view = memoryview(data)
        while (head := frames.read_head(view, at)) is not None:
            if head.length > FRAME_BYTES_MAX:
                raise ProtocolViolation(f"frame of more than {FRAME_BYTES_MAX} bytes")
            end = head.end + head.length
            if end > len(data):
                break
            answer += self._on_frame(head.flags, data[head.end : end])
            at = end
        self._rest = data[at:]
        return answer

    def _on_frame(self, flags: int, body: bytes) -> bytes:
        is_command = flags & frames.COMMAND
        name, data = frames.read_command(body) if is_command else (body[:1], body[1:])
        if not self.is_ready:
            self._on_ready(name, data)
        elif name in _ADD:
            self._begins.add(data)
            self._matches.clear()
            if len(self._begins) > SUBSCRIPTIONS_MAX:
                raise ProtocolViolation(f"more than {SUBSCRIPTIONS_MAX} subscriptions")
        elif name in _REMOVE:
            self._begins.discard(data)
            self._matches.clear()
        elif name == frames.PING:
            context = data[2 : 2 + frames.PING_CONTEXT_BYTES_MAX]
            return frames.command(frames.PONG, context)
        elif name != frames.PONG:
            raise ProtocolViolation("unexpected command or message")
        return b""

    def _on_ready(self, name: bytes, data: bytes) -> None:
        kind = frames.read_properties(data).get("socket-type") if name == frames.READY else None
        if kind not in PEERS:
            raise ProtocolViolation("expected READY of a SUB or XSUB socket")
        self.is_ready = True
