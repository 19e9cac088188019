"""Shared memory regions for local clients, which hold the bodies of their batches.

    unix socket  ->  RegionRequest  ->  a sealed memfd, sent as a descriptor, under a random name
    connection closed               ->  the region is released

Each process has a share of the regions. At the limit, the longest unused region of the process with
the most regions is released for a process with fewer.

A client writes a body to its region and sends the location over the stream. The gateway copies the
batch to the input arena, as any other batch. So only the gateway reads memory that a client can
change, and reads it once.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iskander.config.schema import ServerConfig, SharedMemoryConfig
from iskander.errors import (
    ConfigError,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    Overloaded,
    RegionNotFound,
    Unsupported,
)
from iskander.foundation.clock import now_ns
from iskander.gateway.auth.shares import Shares
from iskander.gateway.transport.local_listener import LocalListener
from iskander.gateway.transport.origin import process_of
from iskander.gateway.transport.sockets import BoundPath
from iskander.interprocess.control import shared_regions
from iskander.interprocess.control.shared_regions import REGION_HEADER, RegionGrant, send_region
from iskander.interprocess.memory.client_segment import ClientSegment

BACKLOG = 64
RETRY_MS = 1000
NAME_BYTES = 16


@dataclass(eq=False)
class _Region:
    """A segment, and the connection that keeps it allocated; `used_ns` is its last use."""

    segment: ClientSegment
    connection: socket.socket
    used_ns: int


class RegionServer:
    """Allocates regions over a unix socket; `allocated` has the bytes of each region by name."""

    def __init__(self, config: SharedMemoryConfig, server: ServerConfig, path: Path) -> None:
        self._config = config
        self._server = server
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._bound: BoundPath | None = None
        self._listener: LocalListener | None = None
        self._regions: dict[str, _Region] = {}
        self.allocated: dict[str, int] = {}
        # Names of regions by the process of their client.
        self._shares: Shares[str] = Shares(lambda name: self._regions[name].used_ns, self._release)

    def start(self) -> None:
        """Listen, if `shared_memory.path` is set; raises ConfigError if that fails."""
        if not self._config.path:
            return
        try:
            self._bound = BoundPath(self._path, self._server, socket.SOCK_SEQPACKET)
        except OSError as error:
            where = f"shared_memory.path {self._config.path}"
            raise ConfigError(f"{where}: cannot listen: {error.strerror}") from None
        listener = self._bound.socket
        listener.setblocking(False)
        listener.listen(BACKLOG)
        frame_bytes = shared_regions.FRAME_BYTES_MAX
        self._listener = LocalListener(listener, frame_bytes, self._allocate, self._reject)
        self._listener.open()

    def configure(self, config: SharedMemoryConfig) -> None:
        """Apply the limits to new regions."""
        self._config = config

    def close(self) -> None:
        """Stop listening and release all regions."""
        if self._bound is not None and self._listener is not None:
            self._listener.close()
            self._bound.release()
            self._bound = self._listener = None
        for name in list(self._regions):
            self._release(name)

    def find(self, name: str) -> ClientSegment:
        """The segment of a region; raises RegionNotFound."""
        region = self._regions.get(name)
        if region is None:
            raise RegionNotFound(
                f"unknown region in `{REGION_HEADER}`: a region ends with the connection that "
                "requested it, or after some time without use if all regions "
                "(`shared_memory.regions`) are allocated; request another"
            )
        region.used_ns = now_ns()
        return region.segment

    def describe(self) -> dict[str, Any]:
        """Socket path and size limit, for clients."""
        if self._bound is None:
            raise Unsupported("shared memory is disabled: `shared_memory.path` is not set")
        return {"path": str(self._path), "region_bytes": self._config.region_bytes}

    def _allocate(self, connection: socket.socket, frame: bytes) -> None:
        config, length_bytes = self._config, shared_regions.read_region_request(frame).bytes
        if length_bytes < 1:
            raise MalformedInput(f"wanted a number of bytes, got {length_bytes}")
        if length_bytes > config.region_bytes:
            limit = f"limit {config.region_bytes} bytes (`shared_memory.region_bytes`)"
            text = f"region too large: {length_bytes} bytes, {limit}"
            raise LimitExceeded(text, wanted=config.region_bytes)
        source = process_of(connection)
        own = self._shares.count(source)
        has_room = self._shares.make_room(source, config.regions, now_ns())
        while has_room and sum(self.allocated.values()) + length_bytes > config.total_bytes:
            has_room = self._shares.take_back(now_ns(), above=own)
        if not has_room:
            total = sum(self.allocated.values())
            settings = "(`shared_memory.regions`, `shared_memory.total_bytes`)"
            limit = f"limit {config.regions} with {config.total_bytes} bytes {settings}"
            text = f"{len(self.allocated)} regions with {total} bytes are allocated, {own} of them "
            text += f"of this process, {limit}"
            raise Overloaded(text, retry_after_ms=RETRY_MS)
        segment = ClientSegment("iskander-region", length_bytes)
        name = secrets.token_hex(NAME_BYTES)
        send_region(connection, RegionGrant(name, length_bytes), segment.fd)
        self._regions[name] = _Region(segment, connection, now_ns())
        self.allocated[name] = length_bytes
        self._shares.add(source, name)
        self._loop.add_reader(connection, self._release, name)

    def _reject(self, connection: socket.socket, error: Exception) -> None:
        if isinstance(error, IskanderError):
            send_region(connection, RegionGrant(error=error.to_wire()))

    def _release(self, name: str) -> None:
        """Release a region: its client disconnected, sent unexpected data, or did not use it."""
        region = self._regions.pop(name)
        self._shares.remove(name)
        self._loop.remove_reader(region.connection)
        region.connection.close()
        del self.allocated[name]
        # On a thread: the last reference frees the pages.
        self._loop.run_in_executor(None, [region.segment].clear)
