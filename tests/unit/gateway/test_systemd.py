"""What a service manager is told: never waited for, in order, and not twice."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from iskander.clock import NS_PER_MS, now_ns
from iskander.gateway import systemd


class Manager:
    """A service manager that may be too busy to read."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self._path = str(path)

    def fill(self) -> None:
        """Leave no room for a datagram."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            try:
                while True:
                    channel.sendto(b"FILL=1", self._path)
            except BlockingIOError:
                pass

    def read(self) -> list[str]:
        """What has come, but for what filled it."""
        told = []
        try:
            while True:
                told.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            return [each for each in told if each != "FILL=1"]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    yield found
    found.socket.close()


def test_a_manager_that_does_not_read_holds_up_nobody_and_misses_nothing(manager: Manager) -> None:
    async def tell() -> list[str]:
        manager.fill()
        begun_ns = now_ns()
        systemd.notify(STOPPING="1", STATUS="two\nlines")
        for value in range(50):
            systemd.notify_changes(X_ISKANDER_READY=str(value % 2))
        assert now_ns() - begun_ns < 500 * NS_PER_MS
        assert manager.read() == []
        await asyncio.sleep(2 * systemd.RESEND_S)
        return manager.read()

    assert asyncio.run(tell()) == ["STOPPING=1\nSTATUS=two lines", "X_ISKANDER_READY=1"]


def test_a_change_is_told_once(manager: Manager) -> None:
    systemd.notify(READY="1", X_ISKANDER_READY="1")
    for value in "11001":
        systemd.notify_changes(X_ISKANDER_READY=value)
    assert manager.read() == [
        "READY=1\nX_ISKANDER_READY=1",
        "X_ISKANDER_READY=0",
        "X_ISKANDER_READY=1",
    ]


def test_a_reload_says_when_it_began(manager: Manager) -> None:
    before = now_ns()
    systemd.notify_reloading()
    told = dict(line.split("=") for line in manager.read()[0].splitlines())
    assert told["RELOADING"] == "1"
    assert before // 1000 <= int(told["MONOTONIC_USEC"]) <= now_ns() // 1000


@pytest.mark.parametrize(
    ("wanted", "pid", "beats"), [("40000", "", 3), ("40000", "1", 0), ("", "", 0), ("x", "", 0)]
)
def test_a_loop_that_turns_says_so_where_it_is_watched(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, wanted: str, pid: str, beats: int
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", wanted)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)

    async def turn() -> None:
        systemd.keep_alive()
        await asyncio.sleep(0.1)

    asyncio.run(turn())
    told = manager.read()
    assert set(told) <= {"WATCHDOG=1"}
    assert beats <= len(told) <= 6 * bool(beats)


def test_nobody_is_told_where_nobody_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify(READY="1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    systemd.notify(READY="1")
