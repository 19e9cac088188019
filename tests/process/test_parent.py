"""The parent of several gateway processes, with children that only say what such processes say."""

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

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import AdminConfig, Config, ServerConfig, WorkersConfig
from iskander.errors import ConfigError
from iskander.gateway import parent as processes
from iskander.gateway import systemd
from iskander.gateway.child import ChildProcess
from iskander.gateway.parent import Parent

CHILD = """
import contextlib, json, os, pathlib, signal, socket, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]).parent
channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def say(text):
    with contextlib.suppress(OSError):
        channel.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])
def pause(name):
    path = folder.parent / name
    time.sleep(float(path.read_text()) if path.exists() else 0)
def end(*_):
    say("STOPPING=1")
    pause("end_s")
    (folder / "ended").touch()
    os._exit(0)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
signal.signal(signal.SIGHUP, end)
signal.signal(signal.SIGQUIT, lambda *_: os._exit(130))
drain_s = json.loads((folder / "settings.json").read_text())["server"]["drain_s"]
while drain_s == 66.0:
    say("WATCHDOG=1")
    time.sleep(0.05)
mute = folder.parent / "mute"
if mute.exists():
    mute.unlink()
    time.sleep(60)
say("READY=1\\nX_ISKANDER_READY=0")
pause("able_s")
while True:
    say("WATCHDOG=1\\nX_ISKANDER_READY=1")
    time.sleep(0.05)
"""
WITHIN_S = 20.0


class Served:
    """A parent that serves, and the settings that it would read anew."""

    def __init__(self, folder: Path, drain_s: float = 5.0, start_s: float = 20.0) -> None:
        self.folder = folder
        server = ServerConfig(
            address="127.0.0.1:0", processes=2, drain_s=drain_s, runtime_directory=str(folder)
        )
        self.config = Config(
            server=server, admin=AdminConfig(address=""), workers=WorkersConfig(start_s=start_s)
        )
        self.parent = Parent(self.config, [sys.executable, "-c", CHILD], self._read)
        self.code: asyncio.Task[int] = asyncio.create_task(self.parent.serve())

    def write(self, **server: Any) -> None:
        """What the file says from now on; with a `drain_s` of 66 no process gets ready."""
        self.config = replace(self.config, server=replace(self.config.server, **server))

    def behave(self, **pauses: float) -> None:
        """How long the children take from now on."""
        for name, seconds in pauses.items():
            (self.folder / name).write_text(str(seconds))

    def pid(self, index: int) -> int:
        child = self.parent.processes[index].child
        return child.pid if child is not None else 0

    def settings(self, index: int) -> Any:
        """What a process was started with last."""
        return json.loads((self.folder / f"process-{index}" / "settings.json").read_text())

    def is_whole(self) -> bool:
        return not self.parent.reasons() and all(
            each.has_ready_models for each in self.parent.processes
        )

    def _read(self) -> Config:
        if self.config.server.drain_s < 0:
            raise ConfigError("drain_s: below 0")
        return self.config


async def until(is_so: Callable[[], bool]) -> None:
    deadline_ns = now_ns() + int(WITHIN_S * NS_PER_S)
    while not is_so():
        assert now_ns() < deadline_ns
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    served = Served(folder, **settings)
    try:
        await until(lambda: served.is_whole() or served.code.done())
        yield served
        served.parent.stop()
        await served.code
    finally:
        for index in (0, 1):
            if pid := served.pid(index):
                os.kill(pid, signal.SIGKILL)
        served.code.cancel()


async def roll(served: Served) -> None:
    """Replace all, and wait for it."""
    starts = [each.starts for each in served.parent.processes]
    served.parent.roll()
    await until(lambda: [each.starts - 1 for each in served.parent.processes] == starts)
    await until(lambda: served.is_whole() and served.parent._rolling is None)


async def replaced(served: Served, index: int, number: signal.Signals) -> None:
    """Signal a process, and wait for another in its place."""
    before = served.pid(index)
    os.kill(before, number)
    await until(lambda: served.pid(index) not in (0, before) and served.is_whole())


def test_a_process_is_replaced_when_the_one_before_is_able_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as served:
            first, second = served.parent.processes
            served.behave(able_s=0.5)
            served.parent.roll()
            await until(lambda: second.starts == 2 and second.is_ready)
            assert not second.has_ready_models
            await until(lambda: not first.is_ready)
            assert second.has_ready_models

    asyncio.run(run())


def test_what_was_accepted_at_a_roll_says_how_long_a_stop_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_SLACK_S", 0.3)

    async def run() -> None:
        async with serving(tmp_path, drain_s=0.1) as served:
            served.write(drain_s=30.0)
            await roll(served)
            assert served.settings(0)["server"]["drain_s"] == 30.0
            ended = [tmp_path / f"process-{index}" / "ended" for index in (0, 1)]
            for each in ended:
                each.unlink()  # Of the process that was replaced.
            served.behave(end_s=1.0)
            served.parent.stop()
            assert await served.code == 0
            assert all(each.exists() for each in ended)

    asyncio.run(run())


def test_a_process_that_comes_back_gets_what_the_parent_goes_by(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as served:
            port = served.settings(1)["server"]["address"]
            served.write(drain_s=7.0)  # For a restart that is still to come.
            for _ in range(2):
                await replaced(served, 1, signal.SIGKILL)
                assert served.settings(1)["server"]["drain_s"] == 5.0
                assert served.settings(1)["server"]["address"] == port != ["127.0.0.1:0"]
                served.write(drain_s=-1.0)
                served.parent.roll()

    asyncio.run(run())


def test_a_process_that_does_not_move_is_not_ready_and_then_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CHECK_S", 0.05)
    monkeypatch.setattr(processes, "SILENT_S", 0.6)
    monkeypatch.setattr(processes, "HUNG_S", 1.2)

    async def run() -> None:
        async with serving(tmp_path) as served:
            before = served.pid(1)
            os.kill(before, signal.SIGSTOP)
            await until(lambda: served.parent.reasons() == ["process 1 is unresponsive"])
            assert served.pid(1) == before
            await until(lambda: served.pid(1) not in (0, before) and served.is_whole())
            assert served.parent.processes[0].starts == 1

    asyncio.run(run())


def test_a_process_that_never_says_anything_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs in its start, where a roll or a crash before that went well."""
    monkeypatch.setattr(processes, "CHECK_S", 0.05)
    monkeypatch.setattr(processes, "HUNG_S", 2.0)

    async def run() -> None:
        async with serving(tmp_path, start_s=2.5) as served:
            (tmp_path / "mute").touch()
            begun_ns = now_ns()
            os.kill(served.pid(1), signal.SIGKILL)
            await until(lambda: served.parent.processes[1].starts == 3 and served.is_whole())
            # A start may take longer than a loop may stand still.
            assert now_ns() - begun_ns > 2.4 * NS_PER_S
            assert served.parent.processes[0].starts == 1

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("index", [1, 0])
def test_settings_that_a_process_does_not_get_ready_with_are_taken_back(
    tmp_path: Path, index: int
) -> None:
    async def run() -> None:
        async with serving(tmp_path, start_s=2.0) as served:
            parent, late = served.parent, served.parent.processes[index]
            if not index:
                served.write(drain_s=7.0)
            else:
                served.write(drain_s=66.0)
            parent.roll()
            if not index:
                # Process 1 is through; what 0 is started with is no more what 1 was.
                await until(lambda: parent.processes[1].starts == 2)
                parent._config = replace(
                    parent._config, server=replace(parent._config.server, drain_s=66.0)
                )
            await until(lambda: late.starts == 3 and parent._rolling is None)
            await until(served.is_whole)
            for number in (0, 1):
                assert served.settings(number)["server"]["drain_s"] == 5.0
            await replaced(served, 1, signal.SIGKILL)
            assert served.settings(1)["server"]["drain_s"] == 5.0
            # The next roll begins anew.
            served.write(drain_s=8.0)
            await roll(served)
            assert served.settings(0)["server"]["drain_s"] == 8.0

    asyncio.run(run())


def test_a_runtime_directory_that_is_removed_costs_nobody_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CHECK_S", 0.05)
    monkeypatch.setattr(processes, "HUNG_S", 2.0)

    async def run() -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        async with serving(folder) as served:
            before = [served.pid(index) for index in (0, 1)]
            shutil.rmtree(folder)
            await asyncio.sleep(3.0)
            assert [served.pid(index) for index in (0, 1)] == before
            await until(served.is_whole)
            await replaced(served, 1, signal.SIGKILL)

    asyncio.run(run())


def test_going_back_stops_where_a_process_is_not_able(tmp_path: Path) -> None:
    """Or the settings before would take all down, one after the other."""

    async def run() -> None:
        async with serving(tmp_path, start_s=1.0) as served:
            parent, (first, second) = served.parent, served.parent.processes
            served.write(drain_s=7.0)
            served.behave(able_s=0.0)
            parent.roll()
            await until(lambda: second.starts == 2 and second.has_ready_models)
            served.behave(able_s=4.0)
            await until(lambda: first.starts == 2)
            await until(lambda: parent._rolling is None)
            # The first was not able with either; the second, which is, was left alone.
            assert first.starts == 3 and not first.has_ready_models
            assert second.starts == 2 and second.has_ready_models

    asyncio.run(run())


def test_one_that_ends_long_after_it_was_killed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that the kernel holds: its place is not taken for replaced meanwhile."""
    monkeypatch.setattr(processes, "STOP_SLACK_S", 0.2)
    on_end, is_late = Parent._on_end, threading.Event()
    held: list[tuple[Parent, ChildProcess, int]] = []

    def hold(parent: Parent, process: ChildProcess, ended: int) -> None:
        if not is_late.is_set():
            return on_end(parent, process, ended)
        parent._loop.remove_reader(ended)
        held.append((parent, process, ended))

    monkeypatch.setattr(Parent, "_on_end", hold)

    async def run() -> None:
        async with serving(tmp_path, drain_s=0.1, start_s=1.0) as served:
            parent, process = served.parent, served.parent.processes[1]
            is_late.set()
            parent.roll()
            await until(lambda: bool(held) and parent._rolling is None)
            assert process.starts == 1 and process.child is not None
            assert {each.index for _, each, _ in held} == {1}  # The other is not touched.
            is_late.clear()
            for each in held:
                on_end(*each)
            await until(lambda: process.starts == 2 and served.is_whole())

    asyncio.run(run())


def test_asked_twice_it_ends_at_once_whatever_hangs(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path) as served:
            os.kill(served.pid(1), signal.SIGSTOP)
            served.parent.stop()
            await asyncio.sleep(0.1)
            begun_ns = now_ns()
            served.parent.stop()
            await served.code
            assert now_ns() - begun_ns < 5 * NS_PER_S
            assert served.parent.is_forced

    asyncio.run(run())
    assert not os.path.lexists(tmp_path / "attach.sock")


def test_a_service_manager_hears_of_every_roll_and_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "manager"))
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "manager"))
    told: list[dict[str, str]] = []

    def hears(state: str) -> bool:
        try:
            while True:
                lines = manager.recv(4096).decode().splitlines()
                told.append(dict(line.split("=", 1) for line in lines))
        except BlockingIOError:
            return any(state in each for each in told)

    async def run() -> None:
        async with serving(tmp_path / "run") as served:
            await until(lambda: hears("READY"))
            for state in ("server.processes changed", "drain_s: below 0", "replaced"):
                changes = {"server.": {"processes": 3}, "drain_s": {"drain_s": -1.0}}
                served.write(processes=2, drain_s=5.0)
                served.write(**changes.get(state[:7], {}))
                told.clear()
                served.parent.roll()
                await until(lambda: hears("READY"))
                assert int(told[0]["MONOTONIC_USEC"]) > 0
                assert [next(iter(each)) for each in told] == ["RELOADING", "READY"]
                assert state in told[1]["STATUS"]
            told.clear()
            # Nothing is ready once it stops, also where that ends a roll.
            served.parent.roll()
            served.parent.stop()
            await served.code
            hears("")
            assert [next(iter(each)) for each in told] == ["RELOADING", "STOPPING"]

    (tmp_path / "run").mkdir()
    asyncio.run(run())
    manager.close()
