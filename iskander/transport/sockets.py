"""Ports and paths: sockets that are bound, for one process or for several that share a port.

Source: socket(7) (SO_REUSEPORT), ipv6(7) (IPV6_V6ONLY).
"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from pathlib import Path

from msgspec.structs import replace

from iskander.config.schema import Config, ServerConfig
from iskander.control.attach import LockFile
from iskander.errors import ConfigError
from iskander.transport.addresses import owner_of, zmq_address


class ReservedPorts:
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


async def bind(address: str, *, is_shared: bool) -> list[socket.socket]:
    """Sockets for a host and a port, one for each address of the host; none of them listens yet.

    Args:
        address: `HOST:PORT`; port 0 takes a free one.
        is_shared: Others of this user may bind it too; the kernel deals connections out among
            those that listen.

    Raises:
        OSError: It is taken, or not this machine's.
    """
    host, _, wanted = address.rpartition(":")
    host, port = host.strip("[]"), int(wanted)
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(is_shared))
            if family == socket.AF_INET6:
                # The address of all takes IPv4 too, as servers do; any other is just itself.
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            bound.bind((where[0], port, *where[2:]))
            port = bound.getsockname()[1]
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def with_port(address: str, bound: socket.socket) -> str:
    """An address with the port that a socket has."""
    return f"{address.rpartition(':')[0]}:{bound.getsockname()[1]}"


class BoundPath:
    """A unix socket that is bound, and the files that it has.

    Args:
        path: Where; taken from whoever listened there before and is gone.
        config: Who is to own it.
        kind: Of the socket.

    Raises:
        ConfigError: Another process listens there, something else than a socket is there, or it
            cannot be given to its owner.
        OSError: It cannot be bound.
    """

    def __init__(
        self, path: Path, config: ServerConfig, kind: socket.SocketKind = socket.SOCK_STREAM
    ) -> None:
        if _is_other(path):
            raise ConfigError(f"{path}: there is a file that is no socket")
        # Whoever binds a path takes it from the one who listens there, without a word.
        self._lock = LockFile(path.with_name(path.name + ".lock"))
        if not self._lock.take():
            raise ConfigError(f"{path}: another process listens there")
        self._path = path
        path.unlink(missing_ok=True)
        self.socket = socket.socket(socket.AF_UNIX, kind)
        try:
            self.socket.bind(str(path))
            _own(path, config)
        except BaseException:
            self.socket.close()
            self.release()
            raise

    def release(self) -> None:
        """Take the files away."""
        if not _is_other(self._path):
            self._path.unlink(missing_ok=True)
        self._lock.release()


def _is_other(path: Path) -> bool:
    """Whether there is something that is no socket; a link is none, wherever it leads."""
    try:
        return not stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _own(path: Path, config: ServerConfig) -> None:
    try:
        os.chown(path, *owner_of(config))
        os.chmod(path, int(config.unix_mode, 8))
    except OSError as error:
        raise ConfigError(
            f"server.unix_owner = {config.unix_owner}: the socket cannot be given to them: "
            f"{error.strerror}"
        ) from None
