"""Where the gateway listens: addresses and owners found right before anything is started.

So is what HTTP takes, which not everybody installs. `iskander check` and the gateway ask the same.
"""

from __future__ import annotations

import grp
import importlib.util
import logging
import os
import pwd
import re
from collections.abc import Container
from pathlib import Path

from iskander.config.schema import AdminConfig, Config, ServerConfig
from iskander.control.attach import SOCKET_PATH_BYTES_MAX
from iskander.errors import ConfigError

_HOST_PORT = re.compile(r"(?:\[[0-9a-fA-F:.%\w]+\]|[\w.-]+):(\d{1,5})\Z")
PORT_MAX = 65_535
HTTP_PACKAGES = ("h11", "starlette", "uvicorn")
HTTP_INSTALL = "`pip install 'iskander[http]'`"

log = logging.getLogger("iskander.addresses")


def require_addresses(config: Config) -> None:
    """Refuse an address that nobody could listen on, and an owner that is not there.

    The default of the admin port asks for nothing that is not installed: without it there is no
    such port, which is logged.

    Raises:
        ConfigError: Which address, and what is wrong with it.
    """
    owner_of(config.server)
    for address in config.addresses:
        where = f"server.address {address}"
        path = unix_path(address)
        if path is not None:
            if config.server.processes > 1:
                raise ConfigError(
                    f"{where}: a unix socket has one listener; with server.processes above 1 "
                    "every address is HOST:PORT"
                )
            _require_path(where, path)
            continue
        if not is_host_port(address):
            raise ConfigError(f"{where}: wanted HOST:PORT, [IPV6]:PORT or unix:PATH")
    taken = {address: "server.address" for address in config.addresses}
    _require_http(config, taken)
    if config.inferential.address:
        _require_inferential(config, taken)
    if config.shared_memory.path:
        where = f"shared_memory.path {config.shared_memory.path}"
        _require_path(where, sharing_path(config, config.server.processes - 1))
        others = [unix_path(address) for address in config.addresses]
        if sharing_path(config, 0) in [*others, zmq_address(config.inferential.address)]:
            raise ConfigError(f"{where} is another address of this server: each needs its own")


def admin_address(config: AdminConfig) -> str:
    """Where the admin port is to be; empty where there is none."""
    is_default = config.address == AdminConfig().address
    return "" if is_default and _missing_of_http() else config.address


def _missing_of_http() -> str:
    """A package that is not there; empty where all are."""
    return next((name for name in HTTP_PACKAGES if importlib.util.find_spec(name) is None), "")


def _require_http(config: Config, taken: dict[str, str]) -> None:
    """Look at the ports of HTTP, and add them to those that are taken."""
    missing = _missing_of_http()
    if config.admin.address and not admin_address(config.admin):
        log.warning("no admin port: %s is not installed: %s", missing, HTTP_INSTALL)
    for setting, address in (
        ("admin.address", admin_address(config.admin)),
        ("http.address", config.http.address),
    ):
        if not address:
            continue
        if missing:
            raise ConfigError(f"{setting} {address}: {missing} is not installed: {HTTP_INSTALL}")
        if not is_host_port(address):
            raise ConfigError(f"{setting} {address}: wanted HOST:PORT or [IPV6]:PORT")
        if address in taken and not address.endswith(":0"):
            raise ConfigError(
                f"{setting} {address} is {taken[address]} too: each needs its own port"
            )
        taken[address] = setting


def sharing_path(config: Config, index: int) -> Path:
    """Where a process of several lends memory."""
    path = config.shared_memory.path
    return Path(f"{path}.{index}" if index else path)


def _require_path(where: str, path: Path) -> None:
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"{where}: a socket path has at most {SOCKET_PATH_BYTES_MAX} bytes")
    if not path.is_absolute() or not path.parent.is_dir():
        raise ConfigError(f"{where}: wanted an absolute path in a folder that is there")


def zmq_address(address: str) -> str | Path | None:
    """What a ZeroMQ address stands for: `HOST:PORT`, a path, or None where it is neither.

    `*` is every IPv4 address, as there.
    """
    transport, _, where = address.partition("://")
    if transport == "ipc" and where:
        return Path(where)
    where = where.replace("*", "0.0.0.0", 1) if where.startswith("*:") else where
    return where if transport == "tcp" and is_host_port(where) else None


def _require_inferential(config: Config, taken: Container[str]) -> None:
    address = config.inferential.address
    where = f"inferential.address {address}"
    target = zmq_address(address)
    if target is None:
        raise ConfigError(f"{where}: wanted tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
    is_several = config.server.processes > 1
    if isinstance(target, Path):
        if is_several:
            raise ConfigError(
                f"{where}: a unix socket has one listener; with server.processes above 1 it is "
                "tcp://HOST:PORT"
            )
        _require_path(where, target)
    elif target.endswith(":0"):
        if is_several:
            raise ConfigError(f"{where}: server.processes above 1 share a port, which is not 0")
    elif target in taken:
        raise ConfigError(f"{where} is another address of this server: ZeroMQ needs its own port")


def is_host_port(address: str) -> bool:
    """Whether an address is `HOST:PORT` with a port that there is."""
    match = _HOST_PORT.match(address)
    return match is not None and int(match[1]) <= PORT_MAX


def unix_path(address: str) -> Path | None:
    """The path of a `unix:` address; None for any other."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def owner_of(config: ServerConfig) -> tuple[int, int]:
    """User and group that own a `unix:` socket; -1 for whoever makes it.

    Raises:
        ConfigError: There is no such user or group.
    """
    user, _, group = config.unix_owner.partition(":")
    try:
        uid = pwd.getpwnam(user).pw_uid if user else -1
        gid = grp.getgrnam(group).gr_gid if group else -1
    except KeyError:
        raise ConfigError(
            f"server.unix_owner = {config.unix_owner}: there is no such user or group"
        ) from None
    return uid, gid
