"""Address of the event stream.

Source: zmq_ipc(7), zmq_tcp(7).
"""

from __future__ import annotations

import socket
from pathlib import Path

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.gateway.transport.addresses import zmq_address
from iskander.gateway.transport.sockets import BoundPath, bind, keep_alive, with_port


class Endpoint:
    """`events.address`: binds sockets to it.

    A path has the lock, owner and mode of the server's unix sockets.

    Attributes:
        address: Actual address, once bound.
    """

    def __init__(self, config: Config) -> None:
        self.address = config.events.address
        self._config = config
        self._path: BoundPath | None = None

    async def bind(self) -> list[socket.socket]:
        """Return bound sockets.

        Raises:
            ConfigError: It is in use, or not an address of this machine.
        """
        target = zmq_address(self.address)
        if isinstance(target, Path):
            self._path = BoundPath(target, self._config.server)
            return [self._path.socket]
        assert target is not None, "the addresses are validated at the start"
        try:
            sockets = await bind(target, is_shared=False)
        except OSError as error:
            where = f"events.address {self.address}"
            raise ConfigError(f"{where}: cannot listen: {error.strerror}") from None
        for each in sockets:
            keep_alive(each)
        self.address = f"tcp://{with_port(target, sockets[0])}"
        return sockets

    def release(self) -> None:
        """Remove the socket file; idempotent."""
        if self._path is not None:
            self._path.release()
            self._path = None
