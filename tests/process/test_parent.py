"""The parent of several gateway processes, with scripted child processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from iskander.config.schema import AdminConfig, Config, ServerConfig, WorkersConfig
from iskander.errors import ConfigError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.file_watcher import ReloadStatus
from iskander.gateway import parent as parent_module
from iskander.gateway import systemd
from iskander.gateway.child import ChildProcess
from iskander.gateway.parent import Parent
from iskander.gateway.transport import addresses

CHILD = """
import contextlib, json, os, pathlib, signal, socket, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def notify(text):
    with contextlib.suppress(OSError):
        channel.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
def pause(name):
    path = folder.parent / name
    time.sleep(float(path.read_text()) if path.exists() else 0)
def stop(*_):
    notify("STOPPING=1")
    pause("stop_s")
    (folder / "ended").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGHUP, stop)
signal.signal(signal.SIGQUIT, lambda *_: os._exit(130))
def read():
    return json.loads((folder / "settings.json").read_text())["server"]
def reload(*_):
    if not (folder.parent / "deaf").exists():
        (folder / "applied").write_text(str(read()["drain_s"]))
        notify("READY=1\\nX_ISKANDER_RELOADED=1")
signal.signal(signal.SIGUSR1, reload)
while read()["busy_poll_us"] == 66:
    notify("WATCHDOG=1")
    time.sleep(0.05)
if read()["busy_poll_us"] == 78 or (folder.parent / "reject").exists():
    sys.exit(78)
hang = folder.parent / "hang"
if hang.exists():
    hang.unlink()
    time.sleep(60)
pause("listen_s")
notify("READY=1\\nX_ISKANDER_READY=0")
pause("load_s")
while True:
    notify("WATCHDOG=1\\nX_ISKANDER_READY=1")
    time.sleep(0.05)
"""
WITHIN_S = 20.0


class Reloads(ReloadStatus):
    """Outcomes of a parent's reloads, and whether one that the test has started runs."""

    is_running = False

    def record(self, *, is_valid: bool) -> None:
        self.is_running = False
        super().record(is_valid=is_valid)


class Harness:
    """A running parent, and the settings that it reads at a reload."""

    def __init__(self, folder: Path, drain_s: float = 5.0, start_s: float = 20.0) -> None:
        self.folder = folder
        server = ServerConfig(
            address="127.0.0.1:0", processes=2, drain_s=drain_s, runtime_directory=str(folder)
        )
        self.config = Config(
            server=server, admin=AdminConfig(address=""), workers=WorkersConfig(start_s=start_s)
        )
        self.reloads = Reloads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parent_module, "ReloadStatus", lambda: self.reloads)
            self.parent = Parent(self.config, [sys.executable, "-c", CHILD], self._read)
        self.code: asyncio.Task[int] = asyncio.create_task(self.parent.serve())

    def write(self, **server: Any) -> None:
        """Changes the settings for the next reload.

        `busy_poll_us` is not live; with 66, no process gets ready, and with 78, each exits with 78.
        """
        self.config = replace(self.config, server=replace(self.config.server, **server))

    def reload(self) -> None:
        self.reloads.is_running = True
        self.parent.reload()

    def set_pauses(self, **pauses: float) -> None:
        """Sets how long children take to listen, load their models and stop, in seconds."""
        for name, seconds in pauses.items():
            (self.folder / name).write_text(str(seconds))

    def pid(self, index: int) -> int:
        child = self.parent.processes[index].child
        return child.pid if child is not None else 0

    def settings(self, index: int) -> Any:
        """Returns the settings that the parent last wrote for a process."""
        return json.loads((self.folder / f"process-{index}" / "settings.json").read_text())

    def is_ready(self) -> bool:
        return not self.parent.reasons() and all(
            each.has_ready_models for each in self.parent.processes
        )

    def _read(self) -> Config:
        if self.config.server.drain_s < 0:
            raise ConfigError("drain_s: below 0")
        return self.config


async def until(condition: Callable[[], bool]) -> None:
    deadline_ns = now_ns() + int(WITHIN_S * NS_PER_S)
    while not condition():
        assert now_ns() < deadline_ns
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Harness]:
    harness = Harness(folder, **settings)
    try:
        await until(lambda: harness.is_ready() or harness.code.done())
        yield harness
        harness.parent.stop()
        await harness.code
    finally:
        for index in (0, 1):
            if pid := harness.pid(index):
                os.kill(pid, signal.SIGKILL)
        harness.code.cancel()


async def roll(harness: Harness) -> None:
    """Rolls all processes and waits for the end."""
    starts = [each.starts for each in harness.parent.processes]
    harness.reload()
    await until(lambda: [each.starts - 1 for each in harness.parent.processes] == starts)
    await until(lambda: harness.is_ready() and not harness.reloads.is_running)


async def signal_and_await_replacement(
    harness: Harness, index: int, number: signal.Signals
) -> None:
    """Signals a process and waits for its replacement."""
    before = harness.pid(index)
    os.kill(before, number)
    await until(lambda: harness.pid(index) not in (0, before) and harness.is_ready())


def test_roll_continues_after_the_previous_process_has_ready_models(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            first, second = harness.parent.processes
            harness.set_pauses(load_s=0.5)
            harness.reload()
            await until(lambda: second.starts == 2 and second.is_ready)
            assert not second.has_ready_models
            await until(lambda: not first.is_ready)
            assert second.has_ready_models

    asyncio.run(run())


def applied(harness: Harness) -> list[str]:
    """Returns the `drain_s` that each running process has applied; empty before."""
    paths = [harness.folder / f"process-{index}" / "applied" for index in (0, 1)]
    return [path.read_text() if path.exists() else "" for path in paths]


def test_live_settings_are_applied_without_a_replacement(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            before = [harness.pid(index) for index in (0, 1)]
            for drain_s in (7.0, 8.0):
                harness.write(drain_s=drain_s)
                harness.reload()
                await until(lambda: not harness.reloads.is_running)
                assert applied(harness) == [str(drain_s)] * 2
            assert [harness.pid(index) for index in (0, 1)] == before
            await signal_and_await_replacement(harness, 1, signal.SIGKILL)
            assert harness.settings(1)["server"]["drain_s"] == 8.0

    asyncio.run(run())


def test_rejected_reload_changes_no_process(tmp_path: Path) -> None:
    """One setting is live, and the processes share the other."""

    async def run() -> None:
        async with serving(tmp_path) as harness:
            harness.write(drain_s=7.0, processes=3)
            harness.reload()
            assert not harness.reloads.is_running and not harness.reloads.is_valid
            harness.write(processes=2, drain_s=5.0, lame_duck_s=1.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert applied(harness) == ["5.0", "5.0"] and harness.reloads.is_valid

    asyncio.run(run())


def test_settings_that_cannot_be_written_for_one_process_change_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            obstacle = tmp_path / "process-1" / "settings.new"
            obstacle.mkdir()
            harness.write(drain_s=7.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert applied(harness) == ["", ""] and not harness.reloads.is_valid
            obstacle.rmdir()
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert applied(harness) == ["7.0", "7.0"] and harness.reloads.is_valid

    asyncio.run(run())


def test_process_that_starts_during_a_reload_gets_the_live_settings(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            process = harness.parent.processes[1]
            harness.set_pauses(listen_s=0.5)
            os.kill(harness.pid(1), signal.SIGKILL)
            await until(lambda: process.starts == 2 and process.has_notified is False)
            harness.write(drain_s=7.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert harness.settings(1)["server"]["drain_s"] == 7.0
            assert process.config.server.drain_s == 7.0 and process.starts == 2
            assert applied(harness) == ["7.0", "7.0"]

    asyncio.run(run())


def test_process_that_does_not_apply_live_settings_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "RELOAD_S", 0.3)

    async def run() -> None:
        async with serving(tmp_path) as harness:
            (tmp_path / "deaf").touch()
            before = [harness.pid(index) for index in (0, 1)]
            harness.write(drain_s=7.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            await until(harness.is_ready)
            assert not set(before) & {harness.pid(index) for index in (0, 1)}
            assert harness.settings(0)["server"]["drain_s"] == 7.0

    asyncio.run(run())


def test_process_without_confirmation_keeps_its_settings_if_another_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise live settings could end all processes, one after the other."""
    monkeypatch.setattr(parent_module, "RELOAD_S", 0.3)

    async def run() -> None:
        async with serving(tmp_path, start_s=60.0) as harness:
            parent, (first, second) = harness.parent, harness.parent.processes
            notes: list[str] = []
            monkeypatch.setattr(parent, "_notify_serving", notes.append)
            for name in ("deaf", "reject"):
                (tmp_path / name).touch()
            harness.write(drain_s=7.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert notes == [
                "; process 1 is not ready; the others keep serving; new settings not confirmed by "
                "process 0"
            ]
            assert not harness.reloads.is_valid
            assert first.starts == 1 and first.config.server.drain_s == 5.0
            assert second.config.server.drain_s == 7.0
            for name in ("deaf", "reject"):
                (tmp_path / name).unlink()
            await until(harness.is_ready)
            harness.write(drain_s=8.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert applied(harness) == ["8.0", "8.0"]
            assert first.starts == 1 and first.config.server.drain_s == 8.0
            assert harness.reloads.is_valid

    asyncio.run(run())


def test_reload_that_exposes_a_listener_changes_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with such settings ends at its start."""

    async def run() -> None:
        async with serving(tmp_path) as harness:
            # As if the address were not loopback, and the file had lost its tokens.
            monkeypatch.setattr(addresses, "_resolved", lambda address: {"192.0.2.1"})
            harness.reload()
            assert not harness.reloads.is_running and not harness.reloads.is_valid
            assert [each.starts for each in harness.parent.processes] == [1, 1]

    asyncio.run(run())


def test_settings_are_reverted_at_once_if_a_process_rejects_them(tmp_path: Path) -> None:
    """It is not restarted until `workers.start_s`, which is longer than this test."""

    async def run() -> None:
        async with serving(tmp_path, start_s=10 * WITHIN_S) as harness:
            parent = harness.parent
            harness.write(busy_poll_us=78)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert harness.is_ready() and not harness.reloads.is_valid
            assert parent.processes[0].starts == 1
            assert harness.settings(1)["server"]["busy_poll_us"] == 0

    asyncio.run(run())


def test_stop_uses_the_drain_time_of_the_last_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "STOP_SLACK_S", 0.3)

    async def run() -> None:
        async with serving(tmp_path, drain_s=0.1) as harness:
            harness.write(drain_s=30.0)
            harness.reload()
            await until(lambda: not harness.reloads.is_running)
            assert applied(harness) == ["30.0", "30.0"]
            markers = [tmp_path / f"process-{index}" / "ended" for index in (0, 1)]
            harness.set_pauses(stop_s=1.0)
            harness.parent.stop()
            assert await harness.code == 0
            assert all(each.exists() for each in markers)

    asyncio.run(run())


def test_restarted_process_gets_the_settings_of_the_parent(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            port = harness.settings(1)["server"]["address"]
            harness.write(drain_s=7.0)  # Applies at a later reload.
            for _ in range(2):
                await signal_and_await_replacement(harness, 1, signal.SIGKILL)
                assert harness.settings(1)["server"]["drain_s"] == 5.0
                assert harness.settings(1)["server"]["address"] == port != ["127.0.0.1:0"]
                harness.write(drain_s=-1.0)
                harness.reload()

    asyncio.run(run())


def test_unresponsive_process_is_not_ready_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "CHECK_S", 0.05)
    monkeypatch.setattr(parent_module, "SILENT_S", 0.6)
    monkeypatch.setattr(parent_module, "HUNG_S", 1.2)

    async def run() -> None:
        async with serving(tmp_path) as harness:
            before = harness.pid(1)
            os.kill(before, signal.SIGSTOP)
            await until(lambda: harness.parent.reasons() == ["process 1 is unresponsive"])
            assert harness.pid(1) == before
            await until(lambda: harness.pid(1) not in (0, before) and harness.is_ready())
            assert harness.parent.processes[0].starts == 1

    asyncio.run(run())


@pytest.mark.slow
def test_process_that_hangs_at_its_start_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "CHECK_S", 0.05)
    monkeypatch.setattr(parent_module, "HUNG_S", 2.0)

    async def run() -> None:
        async with serving(tmp_path, start_s=2.5) as harness:
            (tmp_path / "hang").touch()
            started_ns = now_ns()
            os.kill(harness.pid(1), signal.SIGKILL)
            await until(lambda: harness.parent.processes[1].starts == 3 and harness.is_ready())
            # The start timeout is longer than the watchdog timeout.
            assert now_ns() - started_ns > 2.4 * NS_PER_S
            assert harness.parent.processes[0].starts == 1

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 0])
def test_settings_are_reverted_if_a_process_does_not_get_ready(tmp_path: Path, index: int) -> None:
    async def run() -> None:
        async with serving(tmp_path, start_s=2.0) as harness:
            parent, process = harness.parent, harness.parent.processes[index]
            harness.write(busy_poll_us=66 if index else 7)
            harness.reload()
            if not index:
                # Process 1 is replaced; process 0 starts with settings that never get ready.
                await until(lambda: parent.processes[1].starts == 2)
                parent._config = replace(
                    parent._config, server=replace(parent._config.server, busy_poll_us=66)
                )
            await until(lambda: process.starts == 3 and not harness.reloads.is_running)
            await until(harness.is_ready)
            assert not harness.reloads.is_valid
            for number in (0, 1):
                assert harness.settings(number)["server"]["busy_poll_us"] == 0
            await signal_and_await_replacement(harness, 1, signal.SIGKILL)
            assert harness.settings(1)["server"]["busy_poll_us"] == 0
            harness.write(busy_poll_us=8)
            await roll(harness)
            assert harness.settings(0)["server"]["busy_poll_us"] == 8
            assert harness.reloads.is_valid

    asyncio.run(run())


@pytest.mark.slow
def test_removed_runtime_directory_does_not_end_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parent_module, "CHECK_S", 0.05)
    monkeypatch.setattr(parent_module, "HUNG_S", 2.0)

    async def run() -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        async with serving(folder) as harness:
            before = [harness.pid(index) for index in (0, 1)]
            shutil.rmtree(folder)
            await asyncio.sleep(3.0)
            assert [harness.pid(index) for index in (0, 1)] == before
            await until(harness.is_ready)
            await signal_and_await_replacement(harness, 1, signal.SIGKILL)

    asyncio.run(run())


@pytest.mark.slow
def test_revert_stops_at_a_process_without_ready_models(tmp_path: Path) -> None:
    """Otherwise the previous settings could end all processes, one after the other."""

    async def run() -> None:
        async with serving(tmp_path, start_s=1.0) as harness:
            first, second = harness.parent.processes
            harness.write(busy_poll_us=7)
            harness.set_pauses(load_s=0.0)
            harness.reload()
            await until(lambda: second.starts == 2 and second.has_ready_models)
            harness.set_pauses(load_s=4.0)
            await until(lambda: first.starts == 2)
            await until(lambda: not harness.reloads.is_running)
            # The first has no ready models with either settings; the second is not replaced.
            assert first.starts == 3 and not first.has_ready_models
            assert second.starts == 2 and second.has_ready_models

    asyncio.run(run())


def test_process_that_exits_long_after_its_kill_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may delay the exit; until then the process does not count as replaced."""
    monkeypatch.setattr(parent_module, "STOP_SLACK_S", 0.2)
    on_end, is_delayed = Parent._on_end, threading.Event()
    delayed: list[tuple[Parent, ChildProcess, int]] = []

    def delay(parent: Parent, process: ChildProcess, ended: int) -> None:
        if not is_delayed.is_set():
            return on_end(parent, process, ended)
        parent._loop.remove_reader(ended)
        delayed.append((parent, process, ended))

    monkeypatch.setattr(Parent, "_on_end", delay)

    async def run() -> None:
        async with serving(tmp_path, drain_s=0.1, start_s=1.0) as harness:
            process = harness.parent.processes[1]
            is_delayed.set()
            harness.reload()
            await until(lambda: bool(delayed) and not harness.reloads.is_running)
            assert process.starts == 1 and process.child is not None
            # The other process is not replaced.
            assert {each.index for _, each, _ in delayed} == {1}
            is_delayed.clear()
            for each in delayed:
                on_end(*each)
            await until(lambda: process.starts == 2 and harness.is_ready())

    asyncio.run(run())


def test_second_signal_kills_hanging_processes_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as harness:
            os.kill(harness.pid(1), signal.SIGSTOP)
            harness.parent.stop()  # A drain by a call.
            harness.parent.on_signal()
            await asyncio.sleep(0.1)
            assert not harness.parent.is_forced
            started_ns = now_ns()
            harness.parent.on_signal()
            await harness.code
            assert now_ns() - started_ns < 5 * NS_PER_S
            assert harness.parent.is_forced

    asyncio.run(run())
    assert not os.path.lexists(tmp_path / "attach.sock")


def test_service_manager_is_notified_of_each_roll_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "manager"))
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
    notifications: list[dict[str, str]] = []

    def has_received(state: str) -> bool:
        try:
            while True:
                lines = manager.recv(4096).decode().splitlines()
                notifications.append(dict(line.split("=", 1) for line in lines))
        except BlockingIOError:
            return any(state in each for each in notifications)

    async def run() -> None:
        async with serving(tmp_path / "run") as harness:
            await until(lambda: has_received("READY"))
            for state in ("server.processes changed", "drain_s: below 0", "replaced"):
                changes = {"server.": {"processes": 3}, "drain_s": {"drain_s": -1.0}}
                harness.write(processes=2, drain_s=5.0)
                harness.write(**changes.get(state[:7], {}))
                notifications.clear()
                harness.reload()
                await until(lambda: has_received("READY"))
                assert int(notifications[0]["MONOTONIC_USEC"]) > 0
                assert [next(iter(each)) for each in notifications] == ["RELOADING", "READY"]
                assert state in notifications[1]["STATUS"]
            notifications.clear()
            # A stop during a roll sends no READY.
            harness.reload()
            harness.parent.stop()
            await harness.code
            has_received("")
            assert [next(iter(each)) for each in notifications] == ["RELOADING", "STOPPING"]

    (tmp_path / "run").mkdir()
    asyncio.run(run())
    manager.close()
