"""Event stream of a gateway process, and of a parent.

One process listens on `events.address`. Several are connected to their parent, which broadcasts
their events and its own, so that subscribers have one address.

Runs on: gateway loop, and the parent's loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from iskander.config.schema import Config
from iskander.foundation.logs import gateway as log
from iskander.interprocess.control.runtime_directory import Member

if TYPE_CHECKING:
    from iskander.gateway.event_stream.broadcaster import Broadcaster
    from iskander.gateway.event_stream.forwarder import Forwarder
    from iskander.gateway.event_stream.publisher import Publisher

NAME = "event stream"


def create_stream(config: Config, member: Member) -> Publisher | None:
    """Return the stream of a process; None without `events.address`."""
    if not config.events.address:
        return None
    from iskander.gateway.event_stream.publisher import Publisher

    return Publisher(config.events, member.number if member.peers else None)


async def start_stream(
    stream: Publisher | None, config: Config, member: Member, runtime: Path
) -> None:
    """Start to publish; raises ConfigError if the address is in use."""
    if stream is None:
        return
    if member.peers:
        from iskander.gateway.event_stream.forwarder import ForwardedPublications

        stream.start(ForwardedPublications(config, runtime.parent))
    else:
        stream.start(await _start_broadcaster(config))


class ForwardedStreams:
    """The streams of the gateway processes, and the parent's own one."""

    def __init__(self) -> None:
        self._forwarder: Forwarder | None = None
        self._stream: Publisher | None = None

    async def start(self, config: Config, runtime: Path) -> None:
        """Start to forward and to publish; raises ConfigError if the address is in use."""
        if not config.events.address:
            return
        from iskander.gateway.event_stream.forwarder import Forwarder
        from iskander.gateway.event_stream.publisher import Publisher

        broadcaster = await _start_broadcaster(config)
        self._stream = Publisher(config.events)
        self._stream.start(broadcaster)
        self._forwarder = Forwarder(broadcaster, config, runtime)

    async def stop(self) -> None:
        """Publish the last events, and end."""
        if self._forwarder is not None:
            self._forwarder.stop()
        if self._stream is not None:
            await self._stream.stop()


async def _start_broadcaster(config: Config) -> Broadcaster:
    from iskander.gateway.event_stream.broadcaster import Broadcaster

    broadcaster = Broadcaster(config)
    await broadcaster.start()
    log.protocol_listening(protocol=NAME, address=broadcaster.address)
    return broadcaster
