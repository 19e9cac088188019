"""The place of one gateway process among several: its child, what that says, and how it ended.

Runs on: the parent's loop, which imports neither NumPy nor pyarrow.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import Config
from iskander.gateway.child_settings import SETTINGS_FILE, write_settings

BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 10.0
STEADY_NS = 10 * NS_PER_S
"""A process that served for so long has not failed in a row."""
NOTICE_BYTES_MAX = 4096
WATCHDOG_USEC = 4_000_000
"""What a child goes by, which beats twice in that time."""


class ChildProcess:
    """The place of one gateway process, and what fills it.

    Args:
        index: Its number, from 0.
        folder: Its runtime directory.
        config: What it is to be started with.

    Attributes:
        child: The running one.
        config: What that was started with.
        is_ready: It has said that it listens, and is not stopping.
        is_able: Its models are ready now.
        admin_address: Where it answers for itself; empty where it does not.
        starts: How often it was started.
        failures: Ends in a row that nobody asked for.
        timer: Of its next start.
        is_heard: It has said something since it was started.
        heard_ns: When it last did, or was started.
    """

    def __init__(self, index: int, folder: Path, config: Config) -> None:
        self.index = index
        self.child: subprocess.Popen[bytes] | None = None
        self.config = config
        self.is_ready = False
        self.admin_address = ""
        self.starts = 0
        self.failures = 0
        self.is_able = False
        self.timer: asyncio.TimerHandle | None = None
        self.is_heard = False
        self.heard_ns = 0
        self._started_ns = 0
        self._is_asked_to_end = False
        self._folder = folder
        self._path = folder / "notify"
        self.notices = self._listen()

    @property
    def is_cut_off(self) -> bool:
        """Somebody has removed the socket, so the child speaks to nobody."""
        return not self._path.exists()

    def listen_again(self) -> None:
        """Make the socket anew, where it was, and what it lies in.

        Raises:
            OSError: It cannot be made now.
        """
        self.heard_ns = now_ns()
        notices = self._listen()
        self.notices.close()
        self.notices = notices

    def start(self, command: Sequence[str], config: Config) -> int:
        """Start the process; the caller owns the pidfd that tells of its end.

        Raises:
            OSError: The system refused it.
        """
        assert self.child is None
        settings = write_settings(config, self._folder)
        self.config = config
        self.starts += 1
        self._started_ns = self.heard_ns = now_ns()
        self.is_heard = False
        self._is_asked_to_end = False
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self._path),
            "ISKANDER_PARENT_PID": str(os.getpid()),
            "WATCHDOG_USEC": str(WATCHDOG_USEC),
        }
        environment.pop("WATCHDOG_PID", None)
        # A session of its own: a Ctrl-C at the terminal is for the parent, which drains them all.
        self.child = subprocess.Popen(
            [*command, "--config", str(settings), "--process", str(self.index)],
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            return os.pidfd_open(self.child.pid)
        except OSError:
            self.child.kill()
            self.child.wait()
            self.child = None
            raise

    def _listen(self) -> socket.socket:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        notices.setblocking(False)
        notices.bind(str(self._path))
        return notices

    def reap(self) -> tuple[int, bool]:
        """Note how the child ended: its exit code, and whether it was asked to."""
        assert self.child is not None
        code = self.child.wait()
        self.child = None
        self.is_ready = self.is_able = False
        self.admin_address = ""
        was_steady = now_ns() - self._started_ns > STEADY_NS
        self.failures = 0 if self._is_asked_to_end else 1 if was_steady else self.failures + 1
        return code, self._is_asked_to_end

    def backoff_s(self) -> float:
        """How long to wait before it is started again."""
        return min(BACKOFF_FIRST_S * 2.0 ** min(max(self.failures - 1, 0), 16), BACKOFF_MOST_S)

    def read_notices(self) -> None:
        """Take what the child has said of itself."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self.notices.recv(NOTICE_BYTES_MAX).decode(errors="replace").splitlines()
                fields = dict(line.partition("=")[::2] for line in lines)
                self.heard_ns, self.is_heard = now_ns(), True
                self.admin_address = fields.get("X_ISKANDER_ADMIN", self.admin_address)
                if "READY" in fields or "STOPPING" in fields:
                    self.is_ready = "READY" in fields
                self.is_able = fields.get("X_ISKANDER_READY", str(int(self.is_able))) == "1"

    def silent_s(self, now: int) -> float:
        """For how long it has not said that its loop turns; 0 where there is none."""
        return (now - self.heard_ns) / NS_PER_S if self.child is not None else 0.0

    def kill(self) -> None:
        """End the child, which is not asked to: another takes its place."""
        if self.child is not None:
            self.child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Signal the child, if there is one; every signal that is sent asks it to end."""
        if self.child is not None:
            self._is_asked_to_end = True
            self.child.send_signal(number)

    def close(self) -> None:
        """Release the socket, and leave nothing behind."""
        self.notices.close()
        self._path.unlink(missing_ok=True)
        (self._folder / SETTINGS_FILE).unlink(missing_ok=True)
