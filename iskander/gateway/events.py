"""Event stream of a gateway process, and of a parent.

A single process serves its stream. Several send their events to their parent, which serves them and
its own.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iskander.config.schema import Config
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.event_stream.endpoint import EventEndpoint
from iskander.gateway.event_stream.parent_link import ParentLink, ParentListener
from iskander.gateway.event_stream.publisher import Publisher
from iskander.interprocess.control.runtime_directory import Member


class EventStream:
    """The stream of a process; without `events.enabled` its methods do nothing.

    Attributes:
        publisher: The events; None if disabled.
    """

    def __init__(self, config: Config, process: int | None = None) -> None:
        self.publisher = Publisher(config.events, process) if config.events.enabled else None
        self._config = config.events
        self._scheme = "https" if config.admin.tls else "http"
        self._link: ParentLink | None = None
        self._listener: ParentListener | None = None

    def endpoint(self, authenticator: Authenticator) -> EventEndpoint | None:
        """Return the application for the admin port; None if disabled."""
        if self.publisher is None:
            return None
        return EventEndpoint(self.publisher, self._config, authenticator)

    def start(self, member: Member, runtime: Path, admin_address: str) -> None:
        """Start to publish at the admin port, or to send to the parent."""
        if self.publisher is None:
            return
        if member.peers:
            self._link = ParentLink(self.publisher, member.number, runtime.parent)
        else:
            self.publisher.address = self._url(admin_address)
        self.publisher.start()

    async def receive(self, runtime: Path, admin_address: str) -> None:
        """Start to publish in a parent, and to receive the events of its processes."""
        if self.publisher is None:
            return
        self._listener = ParentListener(self.publisher, runtime, self._url(admin_address))
        await self._listener.start()
        self.publisher.start()

    def stats(self) -> dict[str, Any]:
        """Return the URL, and counts of events and subscribers; empty if disabled."""
        return {} if self.publisher is None else self.publisher.stats()

    async def stop(self) -> None:
        """Publish the last events, and end; idempotent."""
        if self._listener is not None:
            await self._listener.stop()
        if self.publisher is not None:
            await self.publisher.stop()
        if self._link is not None:
            await self._link.stop()

    def _url(self, admin_address: str) -> str:
        return f"{self._scheme}://{admin_address}/events"
