"""Memory lent to clients of this machine, in which the bodies of their batches come.

    unix socket  ->  Borrow  ->  a sealed memfd, handed over as a descriptor, under a name of chance
    connection ends          ->  it is lent no longer; batches on their way have what they need

A client fills its region and says over its stream where a batch is; from there on it is a batch
like any other, copied into the input arena. So nobody but the gateway reads what a client can
change, and the gateway reads it once.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from pathlib import Path
from typing import Any, NamedTuple

from iskander.config.schema import ServerConfig, SharedMemoryConfig
from iskander.control.shared_regions import (
    FRAME_BYTES_MAX,
    REGION_HEADER,
    RegionGrant,
    read_region_request,
    send_region,
)
from iskander.errors import (
    ConfigError,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    RegionNotFound,
    Unsupported,
)
from iskander.memory.client_segment import ClientSegment
from iskander.transport.local_listener import LocalListener
from iskander.transport.sockets import BoundPath

BACKLOG = 64
RETRY_MS = 1000
NAME_BYTES = 16


class _Region(NamedTuple):
    """Lent for as long as its connection is open."""

    loan: ClientSegment
    connection: socket.socket


class RegionServer:
    """What is lent.

    Args:
        config: Whether, where, and how much.
        server: Who is to own the socket.
        path: Of this process's socket.

    Attributes:
        lent: Bytes of each region that is lent.
    """

    def __init__(self, config: SharedMemoryConfig, server: ServerConfig, path: Path) -> None:
        self._config = config
        self._server = server
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._bound: BoundPath | None = None
        self._doorstep: LocalListener | None = None
        self._regions: dict[str, _Region] = {}
        self.lent: dict[str, int] = {}

    def start(self) -> None:
        """Listen, where memory is to be lent.

        Raises:
            ConfigError: The path is another's, or cannot be had.
        """
        if not self._config.path:
            return
        try:
            self._bound = BoundPath(self._path, self._server, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise ConfigError(
                f"shared_memory.path {self._config.path}: cannot listen there: {error.strerror}"
            ) from None
        self._bound.socket.setblocking(False)
        self._bound.socket.listen(BACKLOG)
        self._doorstep = LocalListener(
            self._bound.socket, FRAME_BYTES_MAX, self._greet, self._refuse
        )
        self._doorstep.open()

    def close(self) -> None:
        """Lend nothing, and nothing more."""
        if self._bound is not None and self._doorstep is not None:
            self._doorstep.close()
            self._bound.release()
            self._bound = self._doorstep = None
        for name in list(self._regions):
            self._end(name)

    def find(self, name: str) -> ClientSegment:
        """The memory of a region.

        Raises:
            RegionNotFound: None is lent under this name.
        """
        region = self._regions.get(name)
        if region is None:
            raise RegionNotFound(
                f"no memory is lent as `{REGION_HEADER}` says: a region ends with the connection "
                "over which it was had; ask for another"
            )
        return region.loan

    def describe(self) -> dict[str, Any]:
        """Where a client asks for memory, and for how much.

        Raises:
            Unsupported: No memory is lent.
        """
        if self._bound is None:
            raise Unsupported("this server lends no memory; `shared_memory.path` is not set")
        return {"path": str(self._path), "region_bytes": self._config.region_bytes}

    def _greet(self, connection: socket.socket, frame: bytes) -> None:
        self._lend(connection, read_region_request(frame).bytes)

    def _refuse(self, connection: socket.socket, error: Exception) -> None:
        if isinstance(error, IskanderError):
            send_region(connection, RegionGrant(error=error.to_wire()))

    def _lend(self, connection: socket.socket, length_bytes: int) -> None:
        config = self._config
        if length_bytes < 1:
            raise MalformedInput(f"wanted a number of bytes, got {length_bytes}")
        if length_bytes > config.region_bytes:
            raise LimitExceeded(
                f"a region may have {config.region_bytes} bytes, got {length_bytes}",
                wanted=config.region_bytes,
            )
        lent_bytes = sum(self.lent.values())
        if len(self.lent) >= config.regions or lent_bytes + length_bytes > config.total_bytes:
            raise Overloaded(
                f"{len(self.lent)} regions with {lent_bytes} bytes are lent; there may be "
                f"{config.regions} with {config.total_bytes}",
                retry_after_ms=RETRY_MS,
            )
        loan = ClientSegment("iskander-region", length_bytes)
        name = secrets.token_hex(NAME_BYTES)
        send_region(connection, RegionGrant(name, length_bytes), loan.fd)
        self._regions[name] = _Region(loan, connection)
        self.lent[name] = length_bytes
        self._loop.add_reader(connection, self._end, name)

    def _end(self, name: str) -> None:
        """The client has gone, or says what there is nothing to say for."""
        region = self._regions.pop(name)
        self._loop.remove_reader(region.connection)
        region.connection.close()
        del self.lent[name]
        # Where the client went first, its pages are freed by whoever lets go last: by a thread.
        self._loop.run_in_executor(None, [region.loan].clear)
