"""Binding of sockets: TCP ports, optionally shared between processes, and unix socket paths.

Source: socket(7) (SO_REUSEPORT), ipv6(7) (IPV6_V6ONLY), tcp(7) (TCP_KEEPIDLE).
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

from msgspec.structs import replace

from iskander.config.schema import Config, ServerConfig
from iskander.errors import ConfigError
from iskander.gateway.transport.addresses import owner_of, zmq_address
from iskander.interprocess.control.attach import LockFile

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Detects a silently lost peer after a minute and a half."""


class ReservedPorts:
    """Ports bound by the parent process for its gateway processes."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self._http_address = ""
        self._sockets: list[socket.socket] = []

    async def hold(self, config: Config) -> None:
        """Bind the configured ports, or raise `ConfigError`."""
        for address in config.addresses:
            self.addresses.append(await self._reserve("server.address", address))
        if config.http.address:
            self._http_address = await self._reserve("http.address", config.http.address)
        inferential = zmq_address(config.inferential.address)
        if isinstance(inferential, str):
            await self._reserve("inferential.address", inferential)

    def with_reserved_ports(self, config: Config) -> Config:
        """Return a copy of the configuration with the bound ports instead of port 0."""
        server = replace(config.server, address=tuple(self.addresses))
        http = replace(config.http, address=self._http_address)
        return replace(config, server=server, http=http)

    def close(self) -> None:
        """Release the ports."""
        for reserved in self._sockets:
            reserved.close()

    async def _reserve(self, setting: str, address: str) -> str:
        """Bind a port without listening; return the address with the port number."""
        try:
            # An exclusive bind first: it fails while another process listens.
            for probe in await bind(address, is_shared=False):
                probe.close()
            bound = await bind(address, is_shared=True)
        except OSError as error:
            raise ConfigError(f"{setting} {address}: cannot listen: {error.strerror}") from None
        self._sockets += bound
        for each in bound:
            # Otherwise another server with SO_REUSEADDR can bind the port while none listens.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        return with_port(address, bound[0])


async def bind(address: str, *, is_shared: bool) -> list[socket.socket]:
    """Bind one socket per resolved address of `HOST:PORT`; none listens yet.

    Args:
        address: Port 0 selects a free port.
        is_shared: Allow other processes of this user to bind the port; the kernel distributes
            connections among the listeners.
    """
    host, _, service = address.rpartition(":")
    host, port = host.strip("[]"), int(service)
    resolved = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, target in dict.fromkeys(resolved):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            if family == socket.AF_INET6:
                # Only `::` accepts IPv4 too.
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            bound.bind((target[0], port, *target[2:]))
            port = bound.getsockname()[1]
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def keep_alive(listening: socket.socket) -> None:
    """Probe the peers of accepted TCP connections, which inherit the options."""
    if listening.family != socket.AF_UNIX:
        for option in KEEPALIVE:
            listening.setsockopt(*option)


def with_port(address: str, bound: socket.socket) -> str:
    """Return the address with the port of a bound socket."""
    return f"{address.rpartition(':')[0]}:{bound.getsockname()[1]}"


class BoundPath:
    """A bound unix socket, its path and its lock; replaces the socket file of an ended process.

    Raises ConfigError if another process listens on the path, it is not a socket, or the owner or
    mode cannot be set.
    """

    def __init__(
        self, path: Path, config: ServerConfig, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> None:
        if _is_other_file(path):
            raise ConfigError(f"{path}: path exists and is not a socket")
        # Without the lock, unlink and bind would succeed even while another process listens.
        self._lock = LockFile(path.with_name(path.name + ".lock"))
        if not self._lock.acquire():
            raise ConfigError(f"{path}: another process listens on this path")
        self._path = path
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, kind)
        try:
            self.socket.bind(str(path))
            _set_owner_and_mode(path, config)
        except BaseException:
            self.socket.close()
            self.release()
            raise

    def release(self) -> None:
        """Remove the socket file and release the lock; the lock file stays."""
        if not _is_other_file(self._path):
            self._path.unlink(missing_ok=True)
        self._lock.release()


def _is_other_file(path: Path) -> bool:
    """Return whether the path exists and is not a socket; links are not followed."""
    try:
        return not stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _set_owner_and_mode(path: Path, config: ServerConfig) -> None:
    try:
        os.chown(path, *owner_of(config))
        os.chmod(path, int(config.unix_mode, 8))
    except OSError as error:
        where = f"server.unix_owner = {config.unix_owner}"
        raise ConfigError(f"{where}: cannot set socket owner or mode: {error.strerror}") from None
