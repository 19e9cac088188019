"""Address of the event stream.

Source: zmq_ipc(7), zmq_tcp(7), zmq_setsockopt(3) (ZMQ_USE_FD).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.transport.sockets import BoundPath

IPC = "ipc://"
FORWARDER_SOCKET = "events.sock"
"""Socket of the forwarder in the parent's runtime directory."""
LINGER_MS = 500
"""Longest wait at the end until subscribers have the last events."""
SUBSCRIPTION_BYTES_MAX = 1024
"""Subscribers send nothing else; a longer message ends their connection."""


class Endpoint:
    """`events.address`: binds a ZeroMQ socket to it.

    A path has the lock, owner and mode of the server's unix sockets.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path: BoundPath | None = None

    def bind(self, zmq_socket: Any) -> str:  # noqa: ANN401
        """Bind a socket; return the actual address.

        Raises:
            ConfigError: It is in use, or not an address of this machine.
        """
        address = self._config.events.address
        if address.startswith(IPC):
            path = Path(address.removeprefix(IPC))
            self._path = BoundPath(path, self._config.server)
            self._path.socket.listen()
            zmq_socket.setsockopt(zmq.USE_FD, self._path.socket.detach())
        zmq_socket.ipv6 = "[" in address
        zmq_socket.maxmsgsize = SUBSCRIPTION_BYTES_MAX
        try:
            zmq_socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"events.address {address}: {error}") from None
        return str(zmq_socket.last_endpoint.decode().rstrip("\0"))

    def release(self) -> None:
        """Remove the socket file; idempotent."""
        if self._path is not None:
            self._path.release()
            self._path = None
