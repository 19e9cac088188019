"""Actor on one node: supervises one gateway with its workers.

    Ray  ->  NodeServer  ->  PrivateServer  ->  gateway  ->  workers
    (restarts the actor)     (restarts the gateway)

The gateway listens on a unix socket for the actors of its node, and on a TCP port for the others.
A symbolic link leads to the socket, so that the socket's address stays while actors and gateways
change. The kernel ends the gateway with the actor's process, also after SIGKILL. A new gateway of
the same node takes the same port if the port is free.

Runs in: an actor of Ray; one thread beside its calls. Does not use Ray.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import socket
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from iskander.errors import ConfigError, IskanderError, NotReady
from iskander.foundation.backoff import backoff
from iskander.lake.run.server import PrivateServer, prepared_server, temporary_folder

PORT_FIRST: Final = 20_000
PORTS: Final = 8_000
"""Number of ports from `PORT_FIRST` on; all lie below the ports that the system gives out, and
above the ports of Ray's workers."""
PORTS_TRIED: Final = 50
LINK: Final = "isk-node-"
"""Start of the names of links to sockets, in the folder for temporary files."""
LINKS_MAX: Final = 100
"""Maximum number of links that are checked when a server is ready."""
STOP_S: Final = 25.0
BACKOFF_FIRST_S: Final = 0.5
BACKOFF_MAX_S: Final = 30.0
_POLL_S: Final = 0.2


class _PortTakenError(Exception):
    """Another process took the chosen port before the gateway could listen on the port."""


class NodeServer:
    """A gateway that is started again each time that it ends.

    Args:
        source: Path of a model, or of a configuration.
        is_config: Whether `source` is a configuration.
        host: Address of this node for other nodes, on which the gateway listens.
        port: Port on `host`; 0: a free port that depends on `key`.
        key: Key of this server in its cluster.
        token: Token for probes, if the configuration has tokens.
        is_unprotected: Whether the gateway may listen on the network without TLS or tokens.
    """

    def __init__(
        self,
        source: str,
        *,
        is_config: bool,
        host: str,
        port: int,
        key: str,
        token: str | None = None,
        is_unprotected: bool = False,
    ) -> None:
        self._spec = {
            "source": source,
            "is_config": is_config,
            "port": port,
            "is_unprotected": is_unprotected,
        }
        self._source, self._is_config = source, is_config
        self._host, self._port, self._key = host, port, key
        self._token, self._is_unprotected = token, is_unprotected
        self._address = ""
        self._server: PrivateServer | None = None
        self._error: IskanderError | None = None
        self._failures = 0
        self._starts = 0
        self._stopped = threading.Event()
        # Ray sets the variable to the CPUs of this actor, 0: the runtime would use one thread.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._thread = threading.Thread(target=self._run, name="node-server", daemon=True)
        self._thread.start()

    def spec(self) -> dict[str, Any]:
        """Return the arguments that are the same on all nodes."""
        return self._spec

    def status(self) -> dict[str, Any]:
        """Return the state of the gateway.

        Returns:
            `is_ready`; `address` for other nodes; `pid` of the gateway and of its `actor`;
            `starts`; `failures` in a row; `error` of the last failure in a row, as
            `IskanderError.to_wire`.
        """
        server, error = self._server, self._error
        return {
            "is_ready": server is not None and server.is_ready(),
            "address": self._address,
            "pid": None if server is None else server.pid,
            "actor": os.getpid(),
            "starts": self._starts + (0 if server is None else server.starts),
            "failures": self._failures,
            "error": None if error is None else error.to_wire(),
        }

    def stop(self) -> bool:
        """End the gateway in an orderly way; return whether it has ended."""
        self._stopped.set()
        server = self._server
        if server is not None:
            server.stop()
        self._thread.join(STOP_S)
        local_socket(self._key).unlink(missing_ok=True)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._serve()
            except _PortTakenError:
                continue  # The next start takes another port.
            except IskanderError as error:
                self._fail(error)
            except OSError as error:
                self._fail(NotReady(f"the server cannot be started: {error}"))

    def _fail(self, error: IskanderError) -> None:
        """Record a failure, and wait before the next start."""
        self._error = error
        self._failures += 1
        self._stopped.wait(backoff(self._failures, BACKOFF_FIRST_S, BACKOFF_MAX_S))

    def _serve(self) -> None:
        """Start a gateway, and return when it is stopped or has ended."""
        _require_readable(self._source)
        self._address = self._free_address()
        model, config = (None, self._source) if self._is_config else (self._source, None)
        with prepared_server(
            model,
            config=config,
            listen=self._address,
            token=self._token,
            is_unprotected=self._is_unprotected,
        ) as server:
            self._server = server
            try:
                if self._stopped.is_set():
                    return
                server.start()
                _point_link_to(local_socket(self._key), Path(server.address.removeprefix("unix:")))
                self._failures, self._error = 0, None
                while not self._stopped.wait(_POLL_S):
                    lost = server.loss_error()
                    if lost is not None:
                        raise lost
            except NotReady:
                if self._has_lost_port(server):
                    raise _PortTakenError from None
                raise
            finally:
                self._server = None
                self._starts += server.starts

    def _has_lost_port(self, server: PrivateServer) -> bool:
        """Return whether the gateway has ended, and another process has the port that was free."""
        if self._port or self._failures or server.loss_error() is None:
            return False
        return not _is_free(self._host, int(self._address.rpartition(":")[2]))

    def _free_address(self) -> str:
        """Return the first free port of this node's sequence."""
        for port in [self._port] if self._port else ports(self._key):
            if self._port or _is_free(self._host, port):
                host = f"[{self._host}]" if ":" in self._host else self._host
                return f"{host}:{port}"
        raise NotReady(
            f"no port is free on {self._host}; {PORTS_TRIED} of {PORT_FIRST} to "
            f"{PORT_FIRST + PORTS - 1} were tried"
        )


def local_socket(key: str) -> Path:
    """Return the path of a server's socket for processes of its node."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return temporary_folder() / f"{LINK}{digest}"


def _point_link_to(path: Path, socket_path: Path) -> None:
    """Make a path a link to a socket; delete the links of servers that were killed."""
    for link in itertools.islice(path.parent.glob(f"{LINK}*"), LINKS_MAX):
        if not link.exists():
            with contextlib.suppress(OSError):  # It is another user's, or deleted.
                link.unlink()
    new = path.with_suffix(f".{os.getpid()}")
    new.unlink(missing_ok=True)
    new.symlink_to(socket_path)
    new.replace(path)


def ports(key: str) -> Iterator[int]:
    """Yield the ports that a server tries, in order; a restarted server tries the same ports."""
    first = zlib.crc32(key.encode())
    for index in range(PORTS_TRIED):
        yield PORT_FIRST + (first + index) % PORTS


def _is_free(host: str, port: int) -> bool:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except socket.gaierror as error:
        raise ConfigError(f"the address {host} of this node cannot be resolved: {error}") from None
    except OSError as error:
        if error.errno == _NOT_LOCAL:
            raise ConfigError(
                f"{host} is no address of this machine, so that the server cannot listen on it"
            ) from None
        return False
    return True


_NOT_LOCAL: Final = 99
"""The error number EADDRNOTAVAIL of Linux."""


def _require_readable(source: str) -> None:
    path = Path(source)
    if not path.exists():
        reason = "does not exist"
    elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        reason = "cannot be read"
    else:
        return
    raise ConfigError(
        f"{source}: {reason} on this node; the model or configuration must be at the same path on "
        "every node, such as a shared folder or a path of the image"
    )
