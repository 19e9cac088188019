"""File descriptors of this process: the limit, the part for connections, and a few in reserve.

Connections may use what the rest of the process does not: workers, models and files must be opened
also when clients open as many connections as they can.

Runs on: gateway loop. Source: getrlimit(2), accept(2).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
from typing import Final

from iskander.clock import NS_PER_S, now_ns

KEPT: Final = 256
"""Descriptors that connections leave free, or a quarter of the limit where that is less."""
SPARE: Final = 4
"""Descriptors that are open for nothing, and closed where there is no other to accept with."""
LOG_NS: Final = 10 * NS_PER_S
"""At most one line of the log in this time."""
EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)

log = logging.getLogger("iskander.connections")


class Descriptors:
    """The descriptors of this process.

    Attributes:
        connections_max: Connections that may be open, over all listeners.
    """

    def __init__(self) -> None:
        self._limit = _raised_limit()
        self._spare: list[int] = []
        self._logged_ns = self._unlogged = 0
        self.connections_max = self._limit
        self.measure()

    def measure(self, connections: int = 0) -> None:
        """Count what the rest of the process uses now.

        Args:
            connections: That are open.
        """
        used = len(os.listdir("/proc/self/fd")) - len(self._spare) - connections
        kept = min(KEPT, self._limit // 4)
        self.connections_max = max(self._limit - used - kept, 1)
        self._keep_spare()

    def close(self) -> None:
        """Close the reserve."""
        while self._spare:
            os.close(self._spare.pop())

    def refuse(self, listening: socket.socket, error: OSError) -> int:
        """After `accept` had no descriptor: close connections that wait; return how many.

        Their clients learn that they have to try elsewhere, instead of waiting for an answer.
        """
        self._log(error)
        if error.errno not in EXHAUSTED:
            return 0
        count = len(self._spare)
        self.close()
        closed = 0
        for _ in range(count):
            try:
                connection, _ = listening.accept()
            except OSError:
                break
            connection.close()
            closed += 1
        self._keep_spare()
        return closed

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spare) < SPARE:
                self._spare.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def _log(self, error: OSError) -> None:
        now = now_ns()
        self._unlogged += 1
        if self._logged_ns and now - self._logged_ns < LOG_NS:
            return
        log.error(
            "a connection could not be accepted: %s (%d times since the last line); the limit of "
            "descriptors is %d (RLIMIT_NOFILE)",
            error.strerror,
            self._unlogged,
            self._limit,
        )
        self._logged_ns, self._unlogged = now, 0


def _raised_limit() -> int:
    """Raise the soft limit of open files to the hard one; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return int(soft)
