"""Process that calls NVML: the cards once (`--list`), or readings every second.

A thread for each device, because a call for a lost card may not return: the readings of the others
continue, and the age of its own shows it. The process ends with the gateway's end of the socket,
and some time after the loss of a device, so that its successor finds a device that has returned.

Runs on: its own process; `python -m iskander.gateway.supervision.gpus.monitor UUID ...`, with the
socket to the gateway as standard input.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns, pause_s
from iskander.gateway.supervision.gpus.nvml import (
    DeviceReader,
    XidEvents,
    open_library,
    read_report,
)
from iskander.gateway.supervision.gpus.readings import (
    OFF_THE_BUS,
    XIDS_MAX,
    GpuReading,
    MonitorReport,
)

INTERVAL_S: Final = 1.0
FAILED: Final = 69
"""Exit code without NVML, as `EX_UNAVAILABLE`."""
SEND_S: Final = 10.0
"""A gateway that does not read for so long is gone."""
REOPEN_S: Final = 30.0
"""Life after the loss of a device, or without any answer: a new process of NVML finds a device that
has returned."""
UNANSWERED: Final = "NVML has not answered yet"
"""Stands for no reading: the last process may have ended because the card is lost."""
LIST: Final = "--list"


class _Device:
    """A device with its last reading and the Xid errors of its card."""

    def __init__(self, reader: DeviceReader, uuid: str) -> None:
        self._reader = reader
        self._reading = GpuReading(uuid, error=UNANSWERED)
        self._answered_ns = now_ns()
        self._xids: dict[str, int] = {}
        self._fell_ns = 0
        self.has_answered = threading.Event()

    @property
    def card(self) -> Any:  # noqa: ANN401
        return self._reader.card

    @property
    def card_uuid(self) -> str:
        return self._reader.card_uuid

    def run(self) -> None:
        """Read for ever."""
        while True:
            asked_ns = now_ns()
            reading = self._reader.read()
            if not reading.error:
                # An error that came during the call counts against later answers only.
                self._fell_ns = self._fell_ns if self._fell_ns > asked_ns else 0
            self._reading, self._answered_ns = reading, now_ns()
            self.has_answered.set()
            pause_s(INTERVAL_S)

    def count(self, xid: int) -> None:
        """Count an Xid error."""
        code = str(xid) if len(self._xids) < XIDS_MAX or str(xid) in self._xids else "other"
        self._xids = {**self._xids, code: self._xids.get(code, 0) + 1}
        if xid == OFF_THE_BUS:
            self._fell_ns = now_ns()

    def current(self) -> GpuReading:
        """Return the last reading, with its age."""
        reading = self._reading
        lost = reading.lost
        if self._fell_ns and not lost:
            lost = f"Xid {OFF_THE_BUS}: it has fallen off the bus"
        age_s = round((now_ns() - self._answered_ns) / NS_PER_S, 1)
        return msgspec.structs.replace(reading, lost=lost, age_s=age_s, xids=self._xids)


def main(words: Sequence[str]) -> int:
    """Run the process."""
    if list(words) == [LIST]:
        sys.stdout.buffer.write(msgspec.json.encode(read_report()))
        return 0
    with socket.socket(fileno=0) as connection, contextlib.suppress(OSError):
        connection.settimeout(SEND_S)
        try:
            nvml = open_library()
        except OSError as error:
            _send(connection, MonitorReport(notice=f"NVML does not start: {error}"))
            return FAILED
        devices = [_Device(DeviceReader(nvml, uuid), uuid) for uuid in words]
        notices: SimpleQueue[str] = SimpleQueue()
        for device in devices:
            threading.Thread(target=device.run, daemon=True).start()
        threading.Thread(target=_count_xids, args=(nvml, devices, notices), daemon=True).start()
        _report(connection, devices, notices)
    return 0


def _send(connection: socket.socket, report: MonitorReport) -> None:
    connection.sendall(msgspec.json.encode(report) + b"\n")


def _report(
    connection: socket.socket, devices: Sequence[_Device], notices: SimpleQueue[str]
) -> None:
    """Send the readings every interval, until `REOPEN_S` after a loss or without any answer.

    One device that never answers does not end the process, which may then remain, stuck in the
    driver: the others are still read.
    """
    _wait_for_answers(devices)
    failed_ns = 0
    while True:
        readings = [device.current() for device in devices]
        _send(connection, MonitorReport(readings, "" if notices.empty() else notices.get()))
        has_answer = any(device.has_answered.is_set() for device in devices)
        is_failed = not has_answer or any(reading.lost for reading in readings)
        failed_ns = (failed_ns or now_ns()) if is_failed else 0
        if is_failed and now_ns() - failed_ns > REOPEN_S * NS_PER_S:
            return
        pause_s(INTERVAL_S)


def _wait_for_answers(devices: Sequence[_Device]) -> None:
    """Wait for the first answers of all devices, for an interval at most."""
    until_ns = now_ns() + int(INTERVAL_S * NS_PER_S)
    for device in devices:
        device.has_answered.wait(max(until_ns - now_ns(), 0) / NS_PER_S)


def _count_xids(
    nvml: Any,  # noqa: ANN401
    devices: Sequence[_Device],
    notices: SimpleQueue[str],
) -> None:
    """Count Xid errors for ever; a driver that does not report them is a notice.

    A card that answers later is added then.
    """
    _wait_for_answers(devices)
    known: set[str] = set()
    try:
        events = XidEvents(nvml)
        while True:
            for device in devices:
                if device.card is not None and device.card_uuid not in known:
                    known.add(device.card_uuid)
                    events.add(device.card)
            if not known:
                pause_s(INTERVAL_S)
                continue
            found = events.wait(int(INTERVAL_S * NS_PER_S / NS_PER_MS))
            if found is not None:
                uuid, xid = found
                for device in devices:
                    if device.card_uuid == uuid:
                        device.count(xid)
    except nvml.NVMLError as error:
        notices.put(f"Xid errors are not counted: {error}")


if __name__ == "__main__":
    # Threads in a call that does not return would delay a normal exit.
    import os

    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
