"""Gateway side of the export process: start, feed, restart, and flush at shutdown.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final

from iskander import __version__
from iskander.config.tracing import TracingConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import tracing as log
from iskander.gateway.supervision.auxiliary_process import AuxiliaryProcess
from iskander.gateway.telemetry.tracing.recorder import Recorder
from iskander.gateway.telemetry.tracing.records import (
    ExportReport,
    ExportSettings,
    FrameReader,
    RequestRecord,
    decode_report,
    frame,
)

TICK_S: Final = 0.1
FRAME_RECORDS: Final = 64
FRAMES_PER_TICK: Final = 8
"""Encoded in one event loop iteration, in about a millisecond."""
RECEIVE_BYTES: Final = 1 << 16
FLUSH_S: Final = 3.0
"""Timeout for the last exports at shutdown."""
FLUSH_TICK_S: Final = 0.01


class ExportProcess:
    """The process, and the socket that feeds it. The loop never waits for it.

    Raises ConfigError without OpenTelemetry's exporter.
    """

    def __init__(self, config: TracingConfig) -> None:
        _require_exporter()
        self.recorder = Recorder(config)
        self._endpoint = config.endpoint
        self._loop = asyncio.get_running_loop()
        self._process = AuxiliaryProcess(
            "iskander.gateway.telemetry.tracing.exporter",
            self._on_start,
            self._on_exit,
            lambda reason: log.export_process_not_started(reason=reason),
        )
        self._reports = FrameReader()
        self._settings = b""
        self._unsent = memoryview(b"")
        self._taken_later = 0  # Spans of the records that the process has not reported.
        self._is_failing = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, number: int, listeners: Mapping[str, Sequence[str]]) -> None:
        """Start the process, and feed it periodically.

        Args:
            number: Number of this gateway process.
            listeners: Addresses of each system.
        """
        resource: dict[str, str | int] = {
            "service.version": __version__,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
            "iskander.process": number,
        }
        self._settings = frame(ExportSettings(self._endpoint, resource, _single(listeners)))
        self._process.start()
        self._tick()

    async def stop(self) -> None:
        """Export the queued records, and end the process; after `FLUSH_S` kill it."""
        self._process.is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        deadline_ns = now_ns() + int(FLUSH_S * NS_PER_S)
        while self._has_unsent and now_ns() < deadline_ns:
            self._exchange()
            await asyncio.sleep(FLUSH_TICK_S)
        await self._process.stop((deadline_ns - now_ns()) / NS_PER_S)
        lost = self._taken_later + sum(record.spans for record in self.recorder.records)
        if lost:
            log.export_incomplete(spans=lost)

    @property
    def _has_unsent(self) -> bool:
        return self._process.socket is not None and bool(self._unsent or self.recorder.records)

    def _on_start(self, _connection: socket.socket) -> None:
        self._reports, self._unsent = FrameReader(), memoryview(self._settings)

    def _on_exit(self, code: int) -> None:
        self._receive()
        self.recorder.counts["failed"] += self._taken_later
        if not self._process.is_stopping:
            log.export_process_ended(exit_code=code, spans=self._taken_later)
            self._taken_later = 0

    def _tick(self) -> None:
        self._exchange()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _exchange(self) -> None:
        """Receive reports, and send records until the socket is full."""
        self._receive()
        connection = self._process.socket
        if connection is None:
            return
        for _ in range(FRAMES_PER_TICK):
            if not self._unsent:
                self._unsent = self._next_frame(self.recorder.records)
            try:
                while self._unsent:
                    self._unsent = self._unsent[connection.send(self._unsent) :]
            except OSError:
                return  # Full, or the process has ended, which `_on_exit` handles.

    def _next_frame(self, records: deque[RequestRecord]) -> memoryview:
        if not records:
            return memoryview(b"")
        count = min(len(records), FRAME_RECORDS)
        taken = [records.popleft() for _ in range(count)]
        self._taken_later += sum(record.spans for record in taken)
        return memoryview(frame(taken))

    def _receive(self) -> None:
        if self._process.socket is None:
            return
        try:
            data = self._process.socket.recv(RECEIVE_BYTES)
        except OSError:
            return
        for content in self._reports.feed(data):
            self._on_report(decode_report(content))

    def _on_report(self, report: ExportReport) -> None:
        counts = self.recorder.counts
        self._taken_later -= report.taken
        counts["exported"] += report.exported
        counts["failed"] += report.failed
        if report.exported:
            self._process.reset_backoff()
            if self._is_failing:
                log.export_recovered()
            self._is_failing = False
        elif report.failed and not self._is_failing:
            self._is_failing = True
            log.export_failed(reason=report.reason)


def _single(listeners: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, int]]:
    """Host and port of each system with one TCP listener: spans do not show which one it was."""
    single = {}
    for system, addresses in listeners.items():
        host, _, port = addresses[0].rpartition(":")
        if len(addresses) == 1 and host and port.isdecimal():
            single[system] = (host.strip("[]"), int(port))
    return single


def _require_exporter() -> None:
    try:
        is_installed = find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        raise ConfigError("`tracing.enabled` needs the extra `otel`: pip install 'iskander[otel]'")
