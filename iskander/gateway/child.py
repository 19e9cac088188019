"""Child process slot of a multi-process gateway: start, notifications, exit, restart delay.

Runs on: the parent's loop, which imports neither NumPy nor pyarrow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from iskander.config.schema import Config
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.child_settings import RELOAD_SIGNAL, SETTINGS_FILE, write_settings
from iskander.gateway.supervision.worker import Child, start_process

STEADY_NS = 10 * NS_PER_S
"""Uptime that resets the count of failures."""
NOTICE_BYTES_MAX = 4096
WATCHDOG_USEC = 4_000_000
"""Watchdog period of the child, which sends three heartbeats in it."""


class ChildProcess:
    """Slot of one gateway process, which restarts in it.

    Attributes:
        config: Settings that the current child started with, or the last that it has applied.
        exit_code: Exit code of the last child, while none runs.
        is_ready: Whether the child listens and is not stopping.
        failures: Unexpected exits in a row.
        has_notified: Whether the current child has sent a notification.
        notified_ns: Time of its start or last notification.
        action: Action of an operator that the child passed on and the parent has not run.
        reloaded: Answer of the child to its last reload: "1", "0" if it failed, empty before.
    """

    def __init__(self, index: int, folder: Path, config: Config) -> None:
        self.index = index
        self.child: Child | None = None
        self.config = config
        self.exit_code: int | None = None
        self.is_ready = self.has_ready_models = self.has_notified = False
        self.admin_address = self.action = self.reloaded = ""
        self.starts = self.failures = 0
        self.timer: asyncio.TimerHandle | None = None
        self.notified_ns = self._started_ns = 0
        self._is_stop_requested = False
        self._folder = folder
        self._path = folder / "notify"
        self.notices = self._listen()

    @property
    def is_socket_missing(self) -> bool:
        """Whether the notification socket was deleted from the file system."""
        return not self._path.exists()

    def reopen_socket(self) -> None:
        """Create the notification socket and its directory again; may raise OSError."""
        self.notified_ns = now_ns()
        notices = self._listen()
        self.notices.close()
        self.notices = notices

    def start(self, command: Sequence[str], config: Config) -> int:
        """Start the process; return a pidfd that the caller must close. May raise OSError."""
        assert self.child is None
        settings = write_settings(config, self._folder)
        self.config = config
        self.exit_code = None
        self.starts += 1
        self._started_ns = self.notified_ns = now_ns()
        self.has_notified = self._is_stop_requested = False
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._path),
            "ISKANDER_PARENT_PID": str(os.getpid()),
            "WATCHDOG_USEC": str(WATCHDOG_USEC),
        }
        environment.pop("WATCHDOG_PID", None)
        arguments = ["--config", str(settings), "--process", str(self.index)]
        self.child, pidfd = start_process([*command, *arguments], environment)
        return pidfd

    def write(self, config: Config) -> None:
        """Write settings for `reload`; may raise OSError."""
        write_settings(config, self._folder)

    def reload(self) -> None:
        """Make the child apply the written settings; `reloaded` has its answer later."""
        self.reloaded = ""
        if self.child is not None:
            self.child.send_signal(RELOAD_SIGNAL)

    def _listen(self) -> socket.socket:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        notices.setblocking(False)
        notices.bind(str(self._path))
        return notices

    def reap(self) -> tuple[int, bool]:
        """Collect the exit code, and whether the exit was requested."""
        assert self.child is not None
        self.exit_code = code = self.child.wait()
        self.child = None
        self.is_ready = self.has_ready_models = False
        self.admin_address = ""
        was_steady = now_ns() - self._started_ns > STEADY_NS
        self.failures = 0 if self._is_stop_requested else 1 if was_steady else self.failures + 1
        return code, self._is_stop_requested

    def read_notices(self) -> None:
        """Process the child's pending notifications."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self.notices.recv(NOTICE_BYTES_MAX).decode(errors="replace").splitlines()
                fields = dict(line.partition("=")[::2] for line in lines)
                self.notified_ns, self.has_notified = now_ns(), True
                self.admin_address = fields.get("X_ISKANDER_ADMIN", self.admin_address)
                if self.action != "drain":  # It is final.
                    self.action = fields.get("X_ISKANDER_ACTION", self.action)
                self.reloaded = fields.get("X_ISKANDER_RELOADED", self.reloaded)
                if "READY" in fields or "STOPPING" in fields:
                    self.is_ready = "READY" in fields
                if "X_ISKANDER_READY" in fields:
                    self.has_ready_models = fields["X_ISKANDER_READY"] == "1"

    def silent_s(self, now: int) -> float:
        """Return the time since the last notification; 0 without a child."""
        return (now - self.notified_ns) / NS_PER_S if self.child is not None else 0.0

    def is_back(self, *, needs_models: bool) -> bool:
        """Whether the child is ready, with ready models if needed."""
        return self.is_ready and (self.has_ready_models or not needs_models)

    def kill(self) -> None:
        """Kill the child; this does not count as a requested exit."""
        if self.child is not None:
            self.child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal that requests the exit of the child, if there is one."""
        if self.child is not None:
            self._is_stop_requested = True
            self.child.send_signal(number)

    def close(self) -> None:
        """Close the socket and delete the files."""
        self.notices.close()
        self._path.unlink(missing_ok=True)
        (self._folder / SETTINGS_FILE).unlink(missing_ok=True)
