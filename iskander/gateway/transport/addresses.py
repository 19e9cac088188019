"""Validation of listen addresses, the socket owner and HTTP packages at start.

`iskander check` and the gateway use the same checks.
"""

from __future__ import annotations

import grp
import importlib.util
import ipaddress
import os
import pwd
import re
import socket
from collections.abc import Container, Iterator
from pathlib import Path

from iskander.config.schema import AdminConfig, Config, ServerConfig
from iskander.errors import ConfigError
from iskander.foundation.logs import gateway as log
from iskander.gateway.transport.exposure import ALLOW, Listener, exposure_error, is_exposed
from iskander.interprocess.control.attach import SOCKET_PATH_BYTES_MAX

_HOST_PORT = re.compile(r"(?:\[([\w:.%-]+)\]|[\w.-]+):([0-9]{1,5})\Z")
PORT_MAX = 65_535
HTTP_PACKAGES = ("h11", "starlette")
HTTP_INSTALL = "`pip install 'iskander[http]'`"


def require_addresses(config: Config) -> None:
    """Raise `ConfigError` for an address on which the server cannot or must not listen.

    It is invalid or unprotected, the owner of its socket is unknown, or a package is missing.

    Without the HTTP packages, the default admin port is skipped with a warning.
    """
    owner_of(config.server)  # Raises if the user or group is unknown.
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
        _require_socket_path(where, shared_memory_socket(config, config.server.processes - 1))
        others = [unix_path(address) for address in config.addresses]
        if shared_memory_socket(config, 0) in [*others, zmq_address(config.inferential.address)]:
            raise ConfigError(f"{where}: path already used by another address of this server")
    for listener in _listeners(config):
        require_protected(config, listener)


def require_protected(config: Config, listener: Listener) -> None:
    """Raise `ConfigError` for a listener that is open to the network without permission.

    A permitted one is logged.
    """
    resolved, allowed = _resolved(listener.address), config.access.allow_unprotected_network
    if error := exposure_error(listener, resolved, allowed):
        raise ConfigError(error)
    if is_exposed(listener, resolved):
        log.listener_exposed(listener=listener.describe(), setting=ALLOW)


def require_extension_protected(config: Config, name: str, address: str) -> None:
    """Raise as `require_protected` for the address that an extension's protocol listens on.

    An extension is trusted to use the tokens and the TLS that it gets.
    """
    if is_host_port(address):
        setting = f"extensions.protocols.{name}"
        require_protected(config, Listener(setting, address, _lacks(config)))


def _lacks(config: Config) -> tuple[str, ...]:
    """Which of TLS and tokens the configuration does not set, for error texts."""
    tls, tokens = config.tls.certificate, config.access.tokens
    needed = (("TLS (`tls.certificate`)", tls), ("tokens (`access.tokens`)", tokens))
    return tuple(name for name, value in needed if not value)


def _listeners(config: Config) -> Iterator[Listener]:
    """The TCP listeners of a configuration with valid addresses."""
    lacks, neither = _lacks(config), ("TLS", "tokens")
    for address in config.addresses:
        if unix_path(address) is None:
            yield Listener("server.address", address, lacks)
    if config.http.address:
        yield Listener("http.address", config.http.address, lacks)
    inferential = zmq_address(config.inferential.address)
    if isinstance(inferential, str):
        yield Listener("inferential.address", inferential, neither, is_protectable=False)
    if address := admin_address(config.admin):
        lacks = ("tokens",) if config.admin.tls else neither
        yield Listener("admin.address", address, lacks, is_protectable=False)


def _resolved(address: str) -> set[str]:
    """The IP addresses of the host of `HOST:PORT`; none if it is unknown."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return set()
    return {str(each[4][0]) for each in found}


def admin_address(config: AdminConfig) -> str:
    """Return the admin address; empty if it is the default and an HTTP package is missing."""
    is_default = config.address == AdminConfig().address
    return "" if is_default and _missing_http_package() else config.address


def _missing_http_package() -> str:
    """Return the name of a missing HTTP package; empty if all are installed."""
    return next((name for name in HTTP_PACKAGES if importlib.util.find_spec(name) is None), "")


def _require_http(config: Config, used: dict[str, str]) -> None:
    """Check the admin and HTTP addresses and their packages.

    Adds the addresses to `used`, in which the next check finds them.
    """
    missing = _missing_http_package()
    if config.events.enabled and not admin_address(config.admin):
        why = f"{missing} is not installed: {HTTP_INSTALL}" if missing else "which is empty"
        raise ConfigError(f"events.enabled: events are served at admin.address, {why}")
    if config.admin.tls and not config.tls.certificate:
        raise ConfigError("admin.tls needs tls.certificate, which is empty")
    if config.admin.address and not admin_address(config.admin):
        log.admin_port_missing(package=str(missing), install=HTTP_INSTALL)
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


def shared_memory_socket(config: Config, index: int) -> Path:
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
    if match is None or int(match[2]) > PORT_MAX:
        return False
    try:
        return match[1] is None or bool(ipaddress.IPv6Address(match[1]).compressed)
    except ValueError:
        return False


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
