"""The process that reads NVML: start, readings, restart if it ends or does not answer.

The gateway never waits for it. A killed process in a call of the driver may not end; it is reaped
if it does, and at most `STUCK_MAX` are left.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from iskander.logs import gpus as log
from iskander.supervision.gpus.readings import GpuReading, decode_monitor_report
from iskander.supervision.lifecycle import backoff_s
from iskander.supervision.worker import Child, start_process

MODULE: Final = "iskander.supervision.gpus.monitor"
START_S: Final = 30.0
"""Time for the first readings: NVML may first load the driver."""
SILENT_S: Final = 10.0
STUCK_MAX: Final = 3
END_S: Final = 0.5
RECEIVE_BYTES: Final = 1 << 16
LINE_BYTES_MAX: Final = 1 << 20


class MonitorProcess:
    """The process for some devices, and the socket from it.

    Attributes:
        starts: Number of processes that were started.
    """

    def __init__(
        self, uuids: Sequence[str], on_readings: Callable[[list[GpuReading]], None]
    ) -> None:
        self._uuids = uuids
        self._on_readings = on_readings
        self._loop = asyncio.get_running_loop()
        self._children: dict[int, Child] = {}  # By pidfd; the last one is the current process.
        self._socket: socket.socket | None = None
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None
        self._failures = 0
        self.starts = 0

    def start(self) -> None:
        """Start the process."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environment = dict(os.environ)
        environment.pop("NOTIFY_SOCKET", None)
        command = [sys.executable, "-P", "-m", MODULE, *self._uuids]
        try:
            child, pidfd = start_process(command, environment, theirs.fileno())
        except OSError as error:
            ours.close()
            self._restart_later(f"does not start: {error.strerror}")
            return
        finally:
            theirs.close()
        self.starts += 1
        self._socket, self._received = ours, b""
        self._children[pidfd] = child
        self._loop.add_reader(ours, self._receive, ours)
        self._loop.add_reader(pidfd, self._on_exit, pidfd)
        self._set_timer(START_S, self._on_silence)

    def close(self) -> None:
        """Kill the process."""
        if self._timer is not None:
            self._timer.cancel()
        self._close_socket()
        for pidfd, child in self._children.items():
            self._loop.remove_reader(pidfd)
            child.kill()
            if select.select([pidfd], [], [], END_S)[0]:
                child.wait()
            os.close(pidfd)
        self._children.clear()

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(RECEIVE_BYTES)
        except OSError:
            return
        *lines, self._received = (self._received + data).split(b"\n")
        if not data or len(self._received) > LINE_BYTES_MAX:
            self._loop.remove_reader(connection)
            return  # Its exit follows, or its silence.
        for line in lines:
            self._on_line(line)

    def _on_line(self, line: bytes) -> None:
        report = decode_monitor_report(line)
        if report.notice:
            log.gpu_monitor_notice(notice=report.notice)
        if report.readings:
            self._failures = 0
            self._set_timer(SILENT_S, self._on_silence)
            self._on_readings(report.readings)

    def _on_silence(self) -> None:
        self._end("did not answer")

    def _on_exit(self, pidfd: int) -> None:
        """Reap a process; restart if it was the current one."""
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        is_current = self._socket is not None and pidfd == next(reversed(self._children))
        code = self._children.pop(pidfd).wait()
        if is_current:
            self._end(f"ended with {code}" if code else "")

    def _end(self, reason: str) -> None:
        """Give up the current process, and start another one later."""
        self._close_socket()
        for child in self._children.values():
            child.kill()
        self._restart_later(reason)

    def _restart_later(self, reason: str) -> None:
        # A process ends without an error some time after the loss of a device.
        self._failures += bool(reason)
        pause_s = backoff_s(self._failures)
        if reason:
            log.gpu_monitor_ended(reason=reason, pause_s=pause_s)
        self._set_timer(pause_s, self._restart)

    def _restart(self) -> None:
        if len(self._children) < STUCK_MAX:
            self.start()
            return
        log.gpu_monitor_stuck(processes=len(self._children))
        self._set_timer(START_S, self._restart)

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _set_timer(self, delay_s: float, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, callback)
