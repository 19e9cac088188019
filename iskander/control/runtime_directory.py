"""The runtime directory: where a gateway keeps its sockets and locks, and that it is its alone."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from iskander.config.schema import Config
from iskander.control.attach import SOCKET_PATH_BYTES_MAX, LockFile
from iskander.errors import ConfigError

ATTACH_SOCKET = "attach.sock"


class Member(NamedTuple):
    """Which of a gateway's processes one is.

    Attributes:
        number: From 0.
        siblings: Attach sockets of the others; none where it is alone.
    """

    number: int = 0
    siblings: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether the workers are this one's to start and to end."""
        return self.number == 0

    @classmethod
    def of(cls, folder: Path, number: int, count: int) -> Member:
        """One of so many, whose own runtime directory is given."""
        others = (folder.parent / f"process-{each}" for each in range(count) if each != number)
        return cls(number, tuple(str(other / ATTACH_SOCKET) for other in others))


class RuntimeDirectory:
    """A folder of this user, locked by the gateway that runs there.

    Args:
        config: Checked settings.

    Raises:
        ConfigError: It cannot be made, is another user's, makes socket paths too long, or another
            gateway has it.
    """

    def __init__(self, config: Config) -> None:
        self.path = _made(config)
        self._lock = LockFile(self.path / "gateway.lock")
        if not self._lock.take():
            raise ConfigError(
                "server.runtime_directory: another gateway runs there; give this one its own"
            )

    def release(self) -> None:
        """Let another gateway have it."""
        self._lock.release()


def process_directory(folder: Path, index: int) -> Path:
    """The runtime directory of one process of several, made where it is not there."""
    path = folder / f"process-{index}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _made(config: Config) -> Path:
    named = config.server.runtime_directory or os.environ.get("RUNTIME_DIRECTORY", "")
    if named:
        folder = Path(named)
    else:
        base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
        address = "".join(c if c.isalnum() or c in ".-" else "-" for c in config.addresses[0])
        folder = base / f"iskander-{os.getuid()}" / address
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ours = [folder] if named else [folder, folder.parent]
        owners = {path.stat().st_uid for path in ours}
    except OSError as error:
        raise ConfigError(f"server.runtime_directory {folder}: {error.strerror}") from None
    if owners != {os.getuid()}:
        raise ConfigError(f"server.runtime_directory {folder} belongs to another user")
    longest = f"/process-{config.server.processes - 1}" if config.server.processes > 1 else ""
    if len(os.fsencode(folder)) + len(f"{longest}/{ATTACH_SOCKET}") > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(f"server.runtime_directory {folder}: too long for socket paths")
    return folder
