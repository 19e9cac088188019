"""Event stream of a gateway process, and the forwarder of a parent.

One process is bound to `events.address`. Several are connected to their parent, which forwards
their events and its own, so that subscribers have one address.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from iskander.config.schema import Config
from iskander.control.runtime_directory import Member
from iskander.logs import gateway as log

if TYPE_CHECKING:
    from iskander.event_stream.forwarder import Forwarder
    from iskander.event_stream.publisher import Publisher

NAME = "event stream"


def create_stream(config: Config, member: Member) -> Publisher | None:
    """Return the stream of a process; None without `events.address`."""
    if not config.events.address:
        return None
    from iskander.event_stream.publisher import Publisher

    return Publisher(config.events, member.number if member.peers else None)


def start_stream(stream: Publisher | None, config: Config, member: Member, runtime: Path) -> None:
    """Start to publish; raises ConfigError if the address is in use."""
    if stream is None:
        return
    from iskander.event_stream.endpoint import FORWARDER_SOCKET, Endpoint

    if member.peers:
        stream.connect(str(runtime.parent / FORWARDER_SOCKET), config.events.address)
    else:
        stream.bind(Endpoint(config))
        log.protocol_listening(protocol=NAME, address=stream.address)


class ForwardedStreams:
    """The parent's forwarder, and its own stream; raises ConfigError."""

    def __init__(self, config: Config, runtime: Path) -> None:
        self._forwarder: Forwarder | None = None
        self._stream: Publisher | None = None
        if not config.events.address:
            return
        from iskander.event_stream.endpoint import FORWARDER_SOCKET
        from iskander.event_stream.forwarder import Forwarder
        from iskander.event_stream.publisher import Publisher

        self._forwarder = Forwarder(config, runtime)
        self._stream = Publisher(config.events)
        self._stream.connect(str(runtime / FORWARDER_SOCKET), self._forwarder.address)
        log.protocol_listening(protocol=NAME, address=self._forwarder.address)

    def stop(self) -> None:
        """Publish the last events, and end."""
        if self._stream is not None:
            self._stream.stop()
        if self._forwarder is not None:
            self._forwarder.stop()
