"""File descriptor limit of this process, the share for connections, and spare ones.

Clients cannot use up the descriptors that workers, models and files need.

Runs on: gateway loop. Source: getrlimit(2), accept(2).
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
from typing import Final

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import network as log

RESERVED_MAX: Final = 256
"""Descriptors reserved for other uses; a quarter of the limit if that is less."""
SPARE_COUNT: Final = 4
"""Descriptors on /dev/null, closed to reject connections when no other descriptor is free."""
LOG_INTERVAL_NS: Final = 10 * NS_PER_S
"""At most one log line per interval."""
EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE)


def open_descriptors() -> int:
    """Return the number of open file descriptors of this process. Source: proc_pid_fd(5)."""
    # Linux 6.2 and later report the number as the size; listing costs 0.4 us for each descriptor.
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1


def descriptor_limit() -> int:
    """Return the limit of open file descriptors of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Descriptors:
    """File descriptors of this process; `connections_max` limits the open connections."""

    def __init__(self) -> None:
        self._limit = _raise_limit()
        self._spare: list[int] = []
        self._logged_ns = self._unlogged = 0
        self.connections_max = self._limit
        self.measure()

    def measure(self, connections: int = 0) -> None:
        """Recompute `connections_max`; `connections` of the open descriptors are connections."""
        used = len(os.listdir("/proc/self/fd")) - len(self._spare) - connections
        reserved = min(RESERVED_MAX, self._limit // 4)
        self.connections_max = max(self._limit - used - reserved, 1)
        self._open_spare()

    def close(self) -> None:
        """Close the spare descriptors."""
        while self._spare:
            os.close(self._spare.pop())

    def refuse(self, listening: socket.socket, error: OSError) -> int:
        """Log an `accept` error; if descriptors are exhausted, close pending connections.

        Returns how many were closed. The spare descriptors make it possible, and the clients can
        retry elsewhere at once.
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
        self._open_spare()
        return closed

    def _open_spare(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spare) < SPARE_COUNT:
                self._spare.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))

    def _log(self, error: OSError) -> None:
        """Log an accept error, at most once per `LOG_INTERVAL_NS`."""
        now = now_ns()
        self._unlogged += 1
        if self._logged_ns and now - self._logged_ns < LOG_INTERVAL_NS:
            return
        log.accept_failed(reason=str(error.strerror), times=self._unlogged, limit=self._limit)
        self._logged_ns, self._unlogged = now, 0


def _raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return int(soft)
