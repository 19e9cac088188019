"""The process that reads NVML, with a scripted NVML: values, losses, hangs, Xid errors, its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from support.gpus import MIG, ScriptedNvml, scripted_card, slice_uuid, uuid_of

from iskander.gateway.supervision import auxiliary_process
from iskander.gateway.supervision.gpus import monitor, monitor_process
from iskander.gateway.supervision.gpus.monitor_process import MonitorProcess
from iskander.gateway.supervision.gpus.query import ask_nvml, read_devices
from iskander.gateway.supervision.gpus.readings import GpuReading

WITHIN_S = 20.0


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScriptedNvml:
    """Two cards; the second one has a slice."""
    sliced = {"uuid": slice_uuid(1, 9), "profile": "1g.10gb", "memory_mib": 9_728}
    second = scripted_card(1, mig=1, slices=[sliced | {"instance": [9, 0]}])
    scripted = ScriptedNvml(tmp_path, scripted_card(0), second)
    for name, value in scripted.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(monitor_process, "START_S", 3.0)
    return scripted


class Readings:
    """The readings of a monitor, by UUID."""

    def __init__(self) -> None:
        self.last: dict[str, GpuReading] = {}
        self.changed = asyncio.Event()
        self.process: MonitorProcess

    @property
    def pid(self) -> int:
        return self.process._process.pid

    def note(self, readings: list[GpuReading]) -> None:
        self.last = {reading.uuid: reading for reading in readings}
        self.changed.set()

    async def until(self, uuid: str, **fields: object) -> GpuReading:
        """Wait for a reading with these values."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                found = self.last.get(uuid)
                if found and all(getattr(found, key) == value for key, value in fields.items()):
                    return found
                self.changed.clear()
                await self.changed.wait()


@contextlib.asynccontextmanager
async def monitored(*uuids: str) -> AsyncIterator[Readings]:
    readings = Readings()
    readings.process = MonitorProcess(uuids, readings.note)
    readings.process.start()
    try:
        yield readings
    finally:
        await readings.process.stop()


def test_cards_and_slices_are_listed(nvml: ScriptedNvml, tmp_path: Path) -> None:
    report = ask_nvml()
    assert (report.driver, report.error, len(report.cards)) == ("580.1", "", 2)
    assert report.cards[1].slices[0].instance == (9, 0)
    devices = read_devices(tmp_path, {"CUDA_VISIBLE_DEVICES": "1"})
    (found,) = devices.gpus
    assert (found.number, found.profile, found.cpus) == ("1:0", "1g.10gb", (0, 1))
    assert devices.notes == ()


def test_slices_are_listed_though_the_memory_of_their_card_is_not_shown(
    nvml: ScriptedNvml,
) -> None:
    """As in a container without privileges."""
    nvml.change(1, memory_mib=None)
    _, card = ask_nvml().cards
    assert (card.is_mig, card.memory_bytes) == (True, 0)
    assert [each.memory_bytes for each in card.slices] == [9_728 << 20]
    nvml.change(0, memory_mib=None)
    assert [each.uuid for each in ask_nvml().cards] == [uuid_of(1)]


def test_card_that_is_lost_is_not_listed(nvml: ScriptedNvml) -> None:
    nvml.change(0, error=15)
    assert [card.uuid for card in ask_nvml().cards] == [uuid_of(1)]


def test_nvml_that_hangs_or_fails_is_a_reason_and_the_files_remain(
    nvml: ScriptedNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.script["hangs"] = True
    nvml.write()
    assert ask_nvml(0.5).error == "NVML did not answer within 0.5 s"
    nvml.script.update(hangs=False, error=9)
    nvml.write()
    MIG.gpus(tmp_path)
    devices = read_devices(tmp_path, {})
    assert [gpu.number for gpu in devices.gpus] == ["0", "1:0", "1:1", "1:2"]
    assert devices.notes[0].endswith("monitored: Driver Not Loaded")


def test_readings_have_the_values_of_the_card_and_of_the_slice(nvml: ScriptedNvml) -> None:
    nvml.change(0, throttle=0x44, ecc=[7, 2], xids=[13], used_mib=1000)
    nvml.change(1, busy_percent=None)

    async def run() -> None:
        async with monitored(uuid_of(0), slice_uuid(1, 9)) as readings:
            card = await readings.until(uuid_of(0), xids={"13": 1})
            assert (card.utilization, card.temperature_c, card.power_w) == (0.37, 41, 71.5)
            assert (card.memory_used_bytes, card.throttles) == (
                1000 << 20,
                ("power cap", "hardware thermal"),
            )
            assert (card.ecc_corrected, card.ecc_uncorrected) == (7, 2)
            assert (card.pcie_generation, card.pcie_width, card.pcie_replays) == (5, 16, 0)
            part = await readings.until(slice_uuid(1, 9), error="")
            assert (part.utilization, part.memory_total_bytes) == (None, 9_728 << 20)
            assert part.temperature_c == 41

    asyncio.run(run())


@pytest.mark.slow
def test_loss_hang_and_return_of_one_card_do_not_stop_the_other(nvml: ScriptedNvml) -> None:
    nvml.change(1, mig=0, slices=[])

    async def run() -> None:
        async with monitored(uuid_of(0), uuid_of(1)) as readings:
            await readings.until(uuid_of(0), error="")
            nvml.change(0, error=15)
            lost = await readings.until(uuid_of(0), lost="it is lost (GPU is lost)")
            assert lost.utilization is None
            nvml.change(0, error=0)
            await readings.until(uuid_of(0), lost="")
            nvml.change(0, hangs=True)
            nvml.change(1, busy_percent=99)
            await readings.until(uuid_of(1), utilization=0.99)
            async with asyncio.timeout(WITHIN_S):
                while readings.last[uuid_of(0)].age_s < 2:
                    await asyncio.sleep(0.05)
            assert readings.last[uuid_of(1)].age_s < 2
            assert readings.process.starts == 1

    asyncio.run(run())


def test_card_without_an_answer_hides_no_xid_errors_and_is_not_good(nvml: ScriptedNvml) -> None:
    """Its own errors are counted once it answers."""
    nvml.change(0, xids=[13])
    nvml.change(1, mig=0, slices=[], hangs=True, xids=[31])

    async def run() -> None:
        async with monitored(uuid_of(1), uuid_of(0)) as readings:
            await readings.until(uuid_of(0), xids={"13": 1})
            silent = readings.last[uuid_of(1)]
            assert (silent.error, silent.xids) == (monitor.UNANSWERED, {})
            nvml.change(1, hangs=False)
            await readings.until(uuid_of(1), error="", xids={"31": 1})

    asyncio.run(run())


class Ended(Exception):
    """The end of a test."""


def device_of(reports: int, *, has_answered: bool) -> Any:
    """A device of the monitor that ends the test after some reports."""
    answered, left = threading.Event(), iter(range(reports))
    if has_answered:
        answered.set()

    def current() -> GpuReading:
        if next(left, None) is None:
            raise Ended
        return GpuReading("GPU-1")

    return SimpleNamespace(has_answered=answered, current=current)


def test_process_without_any_answer_ends_for_its_successor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that reads another card continues: it may not end while a call does not return."""
    for name in ("INTERVAL_S", "REOPEN_S"):
        monkeypatch.setattr(monitor, name, 0.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        silent, good = (device_of(20, has_answered=each) for each in (False, True))
        monitor._report(theirs, [silent], SimpleQueue())
        with pytest.raises(Ended):
            monitor._report(theirs, [silent, good], SimpleQueue())


@pytest.mark.slow
def test_xid_79_is_a_loss_until_the_card_answers_again(nvml: ScriptedNvml) -> None:
    async def run() -> None:
        async with monitored(uuid_of(0)) as readings:
            await readings.until(uuid_of(0), error="")
            nvml.change(0, hangs=True, xids=[79])
            await readings.until(uuid_of(0), lost="Xid 79: it has fallen off the bus")
            nvml.change(0, hangs=False)
            await readings.until(uuid_of(0), lost="", xids={"79": 1})

    asyncio.run(run())


@pytest.mark.slow
def test_process_that_ends_or_hangs_is_started_again(nvml: ScriptedNvml) -> None:
    async def run() -> None:
        async with monitored(uuid_of(0)) as readings:
            process = readings.process
            await readings.until(uuid_of(0), error="")
            os.kill(readings.pid, 9)
            async with asyncio.timeout(WITHIN_S):
                while process.starts < 2:
                    await asyncio.sleep(0.02)
            nvml.script["hangs"] = True
            nvml.write()
            readings.last.clear()
            os.kill(readings.pid, 9)
            async with asyncio.timeout(WITHIN_S):
                while process.starts < 4:
                    await asyncio.sleep(0.02)
            assert readings.last == {}
            nvml.script["hangs"] = False
            nvml.write()
            await readings.until(uuid_of(0), error="")

    asyncio.run(run())


def test_no_process_is_started_while_too_many_do_not_end(
    nvml: ScriptedNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process in a call of the driver is not ended by SIGKILL: here, the signal is not sent."""
    for module in (auxiliary_process, monitor_process):
        monkeypatch.setattr(module, "STUCK_MAX", 1)
    monkeypatch.setattr(auxiliary_process, "KILLED_S", 0.1)
    monkeypatch.setattr(auxiliary_process, "STUCK_S", 0.1)
    monkeypatch.setattr(monitor_process, "SILENT_S", 2.0)

    async def run() -> None:
        async with monitored(uuid_of(0)) as readings:
            await readings.until(uuid_of(0), error="")
            pid = readings.pid
            with monkeypatch.context() as patched:
                patched.setattr(subprocess.Popen, "kill", lambda child: None)
                os.kill(pid, signal.SIGSTOP)
                async with asyncio.timeout(WITHIN_S):
                    while "1 processes that read NVML do not end" not in caplog.text:
                        await asyncio.sleep(0.02)
                assert readings.process.starts == 1
                assert psutil.pid_exists(pid)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(WITHIN_S):
                while readings.process.starts < 2:
                    await asyncio.sleep(0.02)
            assert not psutil.pid_exists(pid)

    asyncio.run(run())
    assert "did not answer; the next start is in 0.1 s" in caplog.text


def test_process_ends_with_the_socket(nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with monitored(uuid_of(0)) as readings:
            await readings.until(uuid_of(0), error="")
            connection = readings.process._process.socket
            assert connection is not None
            connection.shutdown(socket.SHUT_RDWR)
            async with asyncio.timeout(WITHIN_S):
                while readings.process.starts < 2:
                    await asyncio.sleep(0.02)

    asyncio.run(run())
    assert "the process that reads NVML" not in caplog.text


def test_process_without_nvml_says_why(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.script["error"] = 9
    nvml.write()

    async def run() -> None:
        async with monitored(uuid_of(0)) as readings, asyncio.timeout(WITHIN_S):
            while readings.process.starts < 2:
                await asyncio.sleep(0.02)

    asyncio.run(run())
    assert "NVML does not start: Driver Not Loaded" in caplog.text
    assert f"ended with {monitor.FAILED}; the next start is in 0.1 s" in caplog.text


def test_driver_without_xid_events_has_a_notice(
    nvml: ScriptedNvml, caplog: pytest.LogCaptureFixture
) -> None:
    nvml.script["events"] = False
    nvml.write()

    async def run() -> None:
        async with monitored(uuid_of(0)), asyncio.timeout(WITHIN_S):
            while "Xid errors are not counted: Not Supported" not in caplog.text:
                await asyncio.sleep(0.02)

    asyncio.run(run())
