"""Last events of a stream, and the positions of its readers.

A subscriber has a position and no copies. The oldest events are removed when the buffer is full; a
reader that has not reached them has lost them, and its next text says how many.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from iskander.gateway.event_stream.messages import (
    LOST,
    Lost,
    encode,
    format_event,
    format_position,
    parse_position,
)

EVENT_BYTES: Final = 256
"""Charged for an event in addition to its text: its entry and its topic."""
EVICTED_SHARE: Final = 64
"""A full buffer frees 1/64, so that readers are compared once for many events."""
SCANNED_MAX: Final = 256
"""Events that one `take` looks at: 0.1 ms."""

Includes = Callable[[str], bool]


class EventBuffer:
    """The last events, numbered from 0.

    Args:
        stream: Identifier of the numbers, 16 hexadecimal digits.
        process: Gateway process, of several, which the losses of its readers name.

    Attributes:
        next: Number of the next event.
    """

    def __init__(self, stream: str, bytes_max: int, process: int | None = None) -> None:
        self.next = 0
        self._stream = stream
        self._process = process
        self._first = 0
        self._events: dict[int, tuple[str, bytes]] = {}
        self._bytes, self._bytes_max = 0, bytes_max
        self._readers: set[Reader] = set()

    def add(self, topic: str, name: str, data: bytes) -> None:
        """Add an event, whose text is made once for all readers."""
        text = format_event(self.position(self.next + 1), name, data)
        self._events[self.next] = topic, text
        self.next += 1
        self._bytes += len(text) + EVENT_BYTES
        if self._bytes > self._bytes_max:
            self._evict()

    def open(self, includes: Includes, last_position: str = "") -> Reader:
        """Return a reader of the events that follow, or of those after a position.

        Args:
            includes: Whether the reader gets the events of a topic.
            last_position: `id` of the last event that a client has received.
        """
        reader = Reader(self, includes, self.next)
        self._readers.add(reader)
        if last_position:
            found = parse_position(last_position)
            if found is None or found[0] != self._stream or found[1] > self.next:
                reader.skip(self.next, None, "restarted")
            elif found[1] < self._first:
                reader.skip(self._first, self._first - found[1], "expired")
            else:
                reader.at = found[1]
        return reader

    def close(self, reader: Reader) -> None:
        """Forget a reader."""
        self._readers.discard(reader)

    def event(self, number: int) -> tuple[str, bytes]:
        """Return the topic and the text of a kept event."""
        return self._events[number]

    def position(self, number: int) -> bytes:
        """Return the value of `id` before the event of this number."""
        return format_position(self._stream, number)

    def lost(
        self, at: int, count: int | None, reason: Literal["slow", "expired", "restarted"]
    ) -> bytes:
        """Return the text about lost events before a number."""
        data = encode(Lost(process=self._process, lost=count, reason=reason))
        return format_event(self.position(at), LOST, data)

    def _evict(self) -> None:
        left, first = self._bytes_max - self._bytes_max // EVICTED_SHARE, self._first
        while self._bytes > left and first < self.next:
            self._bytes -= len(self._events[first][1]) + EVENT_BYTES
            first += 1
        for reader in self._readers:
            if reader.at < first:
                missed = range(reader.at, first)
                count = sum(reader.includes(self._events[number][0]) for number in missed)
                reader.skip(first, count, "slow")
        for number in range(self._first, first):
            del self._events[number]
        self._first = first


class Reader:
    """Position of a subscriber.

    Attributes:
        at: Number of its next event.
        includes: Whether it gets the events of a topic.
    """

    def __init__(self, buffer: EventBuffer, includes: Includes, at: int) -> None:
        self.at = at
        self.includes = includes
        self._buffer = buffer
        self._slow = 0
        self._gap = b""

    @property
    def is_behind(self) -> bool:
        """Whether `take` has not reached the last event."""
        return self.at < self._buffer.next

    @property
    def position(self) -> bytes:
        """Value of `id` after the last text."""
        return self._buffer.position(self.at)

    def skip(
        self, to: int, count: int | None, reason: Literal["slow", "expired", "restarted"]
    ) -> None:
        """Go to a later event; the next text says what is missing."""
        self.at = to
        if reason == "slow":
            self._slow += count or 0
        else:
            self._gap = self._buffer.lost(to, count, reason)

    def take(self, bytes_max: int) -> bytes:
        """Return the next events, and before them what is missing; empty if there are none.

        The text has at most `bytes_max` bytes and one event, and looks at `SCANNED_MAX` events.
        """
        parts = [self._gap]
        if self._slow:
            parts.append(self._buffer.lost(self.at, self._slow, "slow"))
        self._gap, self._slow = b"", 0
        size, stop = 0, min(self._buffer.next, self.at + SCANNED_MAX)
        while self.at < stop and size < bytes_max:
            topic, text = self._buffer.event(self.at)
            self.at += 1
            if self.includes(topic):
                parts.append(text)
                size += len(text)
        return b"".join(parts)
