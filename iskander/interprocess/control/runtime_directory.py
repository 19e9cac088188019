"""Runtime directory of a gateway: its sockets and locks, exclusive to one gateway."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from iskander.config.schema import Config
from iskander.errors import ConfigError
from iskander.interprocess.control.attach import SOCKET_PATH_BYTES_MAX, LockFile
from iskander.interprocess.control.identity import LOCK

ATTACH_SOCKET = "attach.sock"
ZMQ_FOLDER = "zmq"
LONGEST_ZMQ_SOCKET = f"{ZMQ_FOLDER}/{'0' * 8}-{'0' * 7}.work"


class Member(NamedTuple):
    """One process of a gateway.

    Attributes:
        number: Number of the process, from 0.
        peers: Attach sockets of the gateway's other processes.
    """

    number: int = 0
    peers: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this process starts and ends the workers."""
        return self.number == 0

    @classmethod
    def of_process(cls, folder: Path, number: int, count: int) -> Member:
        """Create the member of one process, whose runtime directory is `folder`."""
        others = (folder.parent / f"process-{each}" for each in range(count) if each != number)
        return cls(number, tuple(str(other / ATTACH_SOCKET) for other in others))


class RuntimeDirectory:
    """A folder of this user, locked by its gateway.

    Raises:
        ConfigError: The folder cannot be created, belongs to another user, makes socket paths too
            long, or is locked by another gateway.
    """

    def __init__(self, config: Config) -> None:
        self.path = _create_and_check(config)
        self._lock = LockFile(self.path / LOCK)
        if not self._lock.acquire():
            text = "locked by another gateway; set another directory"
            raise ConfigError(f"server.runtime_directory {self.path}: {text}")

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


class ZmqPaths:
    """Paths of the ipc sockets of ZeroMQ channels; a path is never used twice.

    Args:
        folder: Runtime directory; sockets of an earlier gateway are removed.

    Raises:
        ConfigError: The folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ZMQ_FOLDER
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(mode=0o700)
        except OSError as error:
            raise ConfigError(f"server.runtime_directory {folder}: {error.strerror}") from None
        # The path is unique: a worker of an earlier gateway may still remove its sockets.
        self._token = secrets.token_hex(4)

    def prefix(self, incarnation: int) -> str:
        """Return the path of a worker's sockets without their suffix."""
        return str(self._folder / f"{self._token}-{incarnation}")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)


def process_directory(folder: Path, index: int) -> Path:
    """Return the runtime directory of one process of several; create it if missing."""
    path = folder / f"process-{index}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def runtime_path(config: Config, environment: Mapping[str, str], uid: int) -> Path:
    """Return the path of a gateway's runtime directory, which may not exist."""
    if configured := config.server.runtime_directory or environment.get("RUNTIME_DIRECTORY", ""):
        return Path(configured)
    base = Path(environment.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    address = "".join(c if c.isalnum() or c in ".-" else "-" for c in config.addresses[0])
    return base / f"iskander-{uid}" / address


def _create_and_check(config: Config) -> Path:
    configured = config.server.runtime_directory or os.environ.get("RUNTIME_DIRECTORY", "")
    folder = runtime_path(config, os.environ, os.getuid())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owned = [folder] if configured else [folder, folder.parent]
        owners = {path.stat().st_uid for path in owned}
    except OSError as error:
        raise ConfigError(f"server.runtime_directory {folder}: {error.strerror}") from None
    if owners != {os.getuid()}:
        raise ConfigError(f"server.runtime_directory {folder} belongs to another user")
    process = f"/process-{config.server.processes - 1}" if config.server.processes > 1 else ""
    name = LONGEST_ZMQ_SOCKET if config.workers.channel == "zmq" else ATTACH_SOCKET
    length = len(os.fsencode(folder)) + len(f"{process}/{name}")
    if length > SOCKET_PATH_BYTES_MAX:
        text = f"too long for socket paths: {length} bytes, limit {SOCKET_PATH_BYTES_MAX}"
        raise ConfigError(f"server.runtime_directory {folder}: {text}")
    return folder
