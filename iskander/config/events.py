"""Settings of the event stream."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from iskander.config.section import Section


class EventsConfig(Section, frozen=True, kw_only=True):
    """A ZeroMQ PUB socket with completed requests and changes of workers and models.

    Attributes:
        address: `ipc://PATH` or `tcp://HOST:PORT` of a loopback address. Port 0: a free port.
            Empty: disabled. Several gateway processes share it.
        queue: Events that wait for the next message; further ones are dropped and counted.
        subscriber_messages: Messages that wait for a slow subscriber; it loses further ones. A
            message has up to 256 events.
        subscribers: Open connections of subscribers; further ones are closed at once.
    """

    restart_reason: ClassVar[str] = "the publisher is set up at the start"

    address: str = ""
    queue: Annotated[int, Meta(ge=1, le=1_000_000)] = 8192
    subscriber_messages: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    subscribers: Annotated[int, Meta(ge=1, le=10_000)] = 64
