"""Settings of the event stream."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from iskander.config.section import MIB, Section


class EventsConfig(Section, frozen=True, kw_only=True):
    """Completed requests and changes of workers and models as server-sent events.

    Attributes:
        enabled: Serve the stream at `/events` of `admin.address`, to callers with a token if
            `access.tokens` is set.
        subscribers: Open streams; further ones are rejected.
        buffer_bytes: Memory of the last events, for subscribers that read slowly or connect again;
            others are lost for them.
    """

    restart_reason: ClassVar[str] = "the stream is set up at the start"

    enabled: bool = False
    subscribers: Annotated[int, Meta(ge=1, le=1000)] = 64
    buffer_bytes: Annotated[int, Meta(ge=65_536, le=1 << 30)] = 8 * MIB
