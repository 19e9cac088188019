"""The ports of a gateway of several processes, held by the parent, which serves nothing there.

So a port 0 is the same for all, and nobody else takes a port while a process is replaced.

Runs on: the parent's loop. Source: socket(7) (SO_REUSEPORT).
"""

from __future__ import annotations

import socket

from msgspec.structs import replace

from iskander.config import Config
from iskander.errors import ConfigError
from iskander.gateway.addresses import zmq_address
from iskander.gateway.ports import bind, with_port


class HeldPorts:
    """What is held.

    Attributes:
        addresses: Of the server, with the ports that were taken.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._http_address = ""
        self._sockets: list[socket.socket] = []

    async def hold(self, config: Config) -> None:
        """Find the ports that the settings name.

        Raises:
            ConfigError: Nobody can listen at an address.
        """
        for address in config.addresses:
            self.addresses.append(await self._hold("server.address", address))
        if config.http.address:
            self._http_address = await self._hold("http.address", config.http.address)
        inferential = zmq_address(config.inferential.address)
        if isinstance(inferential, str):
            await self._hold("inferential.address", inferential)

    def said_in(self, config: Config) -> Config:
        """Settings with the ports that were taken for them."""
        return replace(
            config,
            server=replace(config.server, address=tuple(self.addresses)),
            http=replace(config.http, address=self._http_address),
        )

    def close(self) -> None:
        """Let others have them."""
        for held in self._sockets:
            held.close()

    async def _hold(self, setting: str, address: str) -> str:
        try:
            # Not shared, to see that nobody listens there; then shared with the processes.
            for probe in await bind(address, is_shared=False):
                probe.close()
            held = await bind(address, is_shared=True)
        except OSError as error:
            raise ConfigError(
                f"{setting} {address}: cannot listen there: {error.strerror}"
            ) from None
        self._sockets += held
        for each in held:
            # Or whoever sets it too, as servers do, may have the port while nobody listens there.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return with_port(address, held[0])
