"""The process that reads NVML, as the gateway sees it: readings and notices.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Final

from iskander.foundation.logs import gpus as log
from iskander.gateway.supervision.auxiliary_process import STUCK_MAX, AuxiliaryProcess
from iskander.gateway.supervision.gpus.readings import GpuReading, decode_monitor_report

START_S: Final = 30.0
"""Time for the first readings: NVML may first load the driver."""
SILENT_S: Final = 10.0
RECEIVE_BYTES: Final = 1 << 16
LINE_BYTES_MAX: Final = 1 << 20


class MonitorProcess:
    """The process for some devices, and the socket from it."""

    def __init__(
        self, uuids: Sequence[str], on_readings: Callable[[list[GpuReading]], None]
    ) -> None:
        self._on_readings = on_readings
        self._loop = asyncio.get_running_loop()
        self._process = AuxiliaryProcess(
            "iskander.gateway.supervision.gpus.monitor",
            self._on_start,
            self._on_exit,
            self._on_start_error,
            uuids,
        )
        self._received = b""

    @property
    def starts(self) -> int:
        return self._process.starts

    def start(self) -> None:
        self._process.start()

    async def stop(self) -> None:
        await self._process.stop(0)

    def _on_start(self, connection: socket.socket) -> None:
        self._received = b""
        self._loop.add_reader(connection, self._receive, connection)
        self._process.expect_answer(START_S)

    def _on_exit(self, code: int) -> None:
        assert self._process.socket is not None
        self._receive(self._process.socket)
        self._loop.remove_reader(self._process.socket)
        if self._process.is_stopping:
            return
        if self._process.was_killed:
            self._log_end("did not answer")
        elif code:  # It ends without an error some time after the loss of a device.
            self._log_end(f"ended with {code}")

    def _on_start_error(self, reason: str) -> None:
        if self._process.stuck >= STUCK_MAX:
            log.gpu_monitor_stuck(processes=self._process.stuck)
        else:
            self._log_end(f"does not start: {reason}")

    def _log_end(self, reason: str) -> None:
        log.gpu_monitor_ended(reason=reason, pause_s=self._process.pause_s)

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
            self._process.reset_backoff()
            self._process.expect_answer(SILENT_S)
            self._on_readings(report.readings)
