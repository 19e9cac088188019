"""Validation of listen addresses, the socket owner and HTTP packages at start.

`iskander check` and the gateway use the same checks.
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
    """Raise `ConfigError` for an invalid address or owner, or a missing package.

    Without the HTTP packages, the default admin port is skipped with a warning.
    """
    owner_of(config.server)
    for address in config.addresses:
        where = f"server.address {address}"
        path = unix_path(address)
        if path is not None:
            _require_one_process(config, where, "unix socket")
            _require_socket_path(where, path)
        elif not is_host_port(address):
            raise ConfigError(f"{where}: expected HOST:PORT, [IPV6]:PORT or unix:PATH")
    used = {address: "server.address" for address in config.addresses}
    _require_http(config, used)
    if config.inferential.address:
        _require_inferential(config, used)
    if config.shared_memory.path:
        where = f"shared_memory.path {config.shared_memory.path}"
        _require_socket_path(where, sharing_path(config, config.server.processes - 1))
        others = [unix_path(address) for address in config.addresses]
        if sharing_path(config, 0) in [*others, zmq_address(config.inferential.address)]:
            raise ConfigError(f"{where}: path already used by another address of this server")


def admin_address(config: AdminConfig) -> str:
    """Return the admin address; empty if it is the default and an HTTP package is missing."""
    is_default = config.address == AdminConfig().address
    return "" if is_default and _missing_http_package() else config.address


def _missing_http_package() -> str:
    """Return the name of a missing HTTP package; empty if all are installed."""
    return next((name for name in HTTP_PACKAGES if importlib.util.find_spec(name) is None), "")


def _require_http(config: Config, used: dict[str, str]) -> None:
    """Check the admin and HTTP addresses and packages; add the addresses to `used`."""
    missing = _missing_http_package()
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
            raise ConfigError(f"{setting} {address}: expected HOST:PORT or [IPV6]:PORT")
        if address in used and not address.endswith(":0"):
            raise ConfigError(f"{setting} {address}: port already used by {used[address]}")
        used[address] = setting


def sharing_path(config: Config, index: int) -> Path:
    """Return the path of the shared-memory socket of a gateway process."""
    path = config.shared_memory.path
    return Path(f"{path}.{index}" if index else path)


def _require_socket_path(where: str, path: Path) -> None:
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"{where}: socket path of {size} bytes, limit {SOCKET_PATH_BYTES_MAX}")
    if not path.is_absolute() or not path.parent.is_dir():
        raise ConfigError(f"{where}: expected an absolute path in an existing folder")


def zmq_address(address: str) -> str | Path | None:
    """Convert a ZeroMQ address to a path or `HOST:PORT` (`*`: 0.0.0.0); None if invalid."""
    transport, _, where = address.partition("://")
    if transport == "ipc" and where:
        return Path(where)
    where = where.replace("*", "0.0.0.0", 1) if where.startswith("*:") else where
    return where if transport == "tcp" and is_host_port(where) else None


def _require_inferential(config: Config, used: Container[str]) -> None:
    address = config.inferential.address
    where = f"inferential.address {address}"
    target = zmq_address(address)
    if target is None:
        raise ConfigError(f"{where}: expected tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
    if isinstance(target, Path):
        _require_one_process(config, where, "unix socket")
        _require_socket_path(where, target)
    elif target.endswith(":0"):
        _require_one_process(config, where, "port 0")
    elif target in used:
        raise ConfigError(f"{where}: port already used by this server: ZeroMQ needs its own port")


def _require_one_process(config: Config, where: str, kind: str) -> None:
    if config.server.processes > 1:
        raise ConfigError(f"{where}: {kind} not allowed with server.processes > 1: use HOST:PORT")


def is_host_port(address: str) -> bool:
    """Whether an address is a valid `HOST:PORT` or `[IPV6]:PORT`."""
    match = _HOST_PORT.match(address)
    return match is not None and int(match[1]) <= PORT_MAX


def unix_path(address: str) -> Path | None:
    """Return the path of a `unix:` address; None for other addresses."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def owner_of(config: ServerConfig) -> tuple[int, int]:
    """Return uid and gid for unix sockets (-1: unchanged), or raise `ConfigError`."""
    user, _, group = config.unix_owner.partition(":")
    try:
        uid = pwd.getpwnam(user).pw_uid if user else -1
        gid = grp.getgrnam(group).gr_gid if group else -1
    except KeyError:
        where = f"server.unix_owner = {config.unix_owner}"
        raise ConfigError(f"{where}: no such user or group") from None
    return uid, gid
