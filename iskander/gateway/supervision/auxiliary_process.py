"""Auxiliary process of the gateway: start, restart after a backoff, hang detection, and end.

Its standard input is one end of a socket pair; it exits when the gateway closes the other one. The
messages are the owner's. Each exit and each failed start belongs to a series of failures, which the
owner ends.

A killed process in a call of a driver or of a file system may not end. It is left after `KILLED_S`,
and reaped if it ends later. With `STUCK_MAX` of them, no process is started.

Runs on: gateway loop. Source: unix(7), pidfd_open(2).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from iskander.foundation.clock import now_ns
from iskander.gateway.supervision.lifecycle import backoff_s
from iskander.gateway.supervision.worker import Child, start_process

KILLED_S: Final = 2.0
STUCK_MAX: Final = 3
STUCK_S: Final = 30.0
"""Pause before the next start, while `STUCK_MAX` killed processes have not ended."""


class AuxiliaryProcess:
    """At most one process in service, and the gateway's end of its socket. Nothing waits for it.

    Attributes:
        socket: Non-blocking; None without a process.
        starts: Started processes.
        started_ns: Time of the last start.
        was_killed: The last process did not answer.
        is_stopping: No other process is started.

    Args:
        module: Python module that runs as the process.
        on_start: Receives the socket of a new process.
        on_exit: Receives the exit code; the socket is closed afterwards.
        on_start_error: Receives the reason.
        arguments: Arguments of the module.
        kind: Type of the socket.
        variables: Additional environment variables.
    """

    def __init__(
        self,
        module: str,
        on_start: Callable[[socket.socket], None],
        on_exit: Callable[[int], None],
        on_start_error: Callable[[str], None],
        arguments: Sequence[str] = (),
        kind: socket.SocketKind = socket.SOCK_STREAM,
        **variables: str,
    ) -> None:
        self.socket: socket.socket | None = None
        self.starts = self.started_ns = 0
        self.was_killed = self.is_stopping = False
        self._on_start, self._on_exit, self._on_start_error = on_start, on_exit, on_start_error
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._kind, self._variables = kind, variables
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}  # By pidfd; all but the current one are stuck.
        self._pidfd = -1
        self._failures = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the current process; 0 without a process."""
        return 0 if self.socket is None else self._children[self._pidfd].pid

    @property
    def pause_s(self) -> float:
        """Backoff after the last failure."""
        return backoff_s(self._failures)

    @property
    def stuck(self) -> int:
        """Number of killed processes that have not ended."""
        return len(self._children) - (self.socket is not None)

    def start(self) -> None:
        """Start a process; if that fails, try again later."""
        if self.stuck >= STUCK_MAX:
            self._on_start_error(f"{self.stuck} killed ones do not end")
            self._call_later(STUCK_S, self.start)
            return
        try:
            self.socket = self._launch()
        except OSError as error:
            self._failures += 1
            self._on_start_error(error.strerror or str(error))
            self._call_later(self.pause_s, self.start)
            return
        self.starts += 1
        self.started_ns = now_ns()
        self.was_killed = False
        self._ended.clear()
        self._on_start(self.socket)

    def expect_answer(self, within_s: float) -> None:
        """Kill the process if this is not called again in time."""
        if not self.was_killed and not self.is_stopping:
            self._call_later(within_s, self._kill)

    def reset_backoff(self) -> None:
        """End the series of failures: the process does its work."""
        self._failures = 0

    async def stop(self, within_s: float) -> bool:
        """Send end of file, and kill the process if it takes longer; return whether it did."""
        self.is_stopping, self.was_killed = True, False
        self._cancel_timer()
        if self.socket is not None:
            self.socket.shutdown(socket.SHUT_WR)
            self._call_later(within_s, self._kill)
            await self._ended.wait()
        for pidfd in list(self._children):
            self._release(pidfd)
        return self.was_killed

    def _launch(self) -> socket.socket:
        environment = {**os.environ, **self._variables}
        environment.pop("NOTIFY_SOCKET", None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, self._kind)
        ours.setblocking(False)
        with theirs:
            try:
                child, self._pidfd = start_process(self._command, environment, theirs.fileno())
            except OSError:
                ours.close()
                raise
        self._children[self._pidfd] = child
        self._loop.add_reader(self._pidfd, self._reap, self._pidfd)
        return ours

    def _kill(self) -> None:
        self.was_killed = True
        self._children[self._pidfd].kill()
        self._call_later(KILLED_S, lambda: self._leave(-signal.SIGKILL))

    def _reap(self, pidfd: int) -> None:
        code = self._release(pidfd).wait()
        if self.socket is not None and pidfd == self._pidfd:
            self._leave(code)

    def _release(self, pidfd: int) -> Child:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        return self._children.pop(pidfd)

    def _leave(self, code: int) -> None:
        """Take the process out of service: it has ended, or it is stuck."""
        assert self.socket is not None
        self._failures += 1
        self._on_exit(code)
        self.socket.close()
        self.socket = None
        self._ended.set()
        self._cancel_timer()
        if not self.is_stopping:
            self._call_later(self.pause_s, self.start)

    def _call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(delay_s, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
