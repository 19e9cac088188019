"""Notifications to the service manager: non-blocking, in order, and without repeats."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.gateway import systemd


class Manager:
    """A service manager that does not read until `read` is called."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self._path = str(path)

    def fill(self) -> None:
        """Fill the socket buffer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.setblocking(False)
            try:
                while True:
                    channel.sendto(b"FILL=1", self._path)
            except BlockingIOError:
                pass

    def read(self) -> list[str]:
        """Return the received messages except those of `fill`."""
        messages = []
        try:
            while True:
                messages.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            return [each for each in messages if each != "FILL=1"]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    fake = Manager(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    yield fake
    fake.socket.close()


def test_notify_does_not_block_and_resends_to_a_busy_manager(manager: Manager) -> None:
    async def send() -> list[str]:
        manager.fill()
        started_ns = now_ns()
        systemd.notify(STOPPING="1", STATUS="two\nlines")
        for value in range(50):
            systemd.notify_changes(X_ISKANDER_READY=str(value % 2))
        assert now_ns() - started_ns < 500 * NS_PER_MS
        assert manager.read() == []
        await asyncio.sleep(2 * systemd.RESEND_S)
        return manager.read()

    assert asyncio.run(send()) == ["STOPPING=1\nSTATUS=two lines", "X_ISKANDER_READY=1"]


def test_each_change_is_sent_once(manager: Manager) -> None:
    systemd.notify(READY="1", X_ISKANDER_READY="1")
    for value in "11001":
        systemd.notify_changes(X_ISKANDER_READY=value)
    assert manager.read() == [
        "READY=1\nX_ISKANDER_READY=1",
        "X_ISKANDER_READY=0",
        "X_ISKANDER_READY=1",
    ]


def test_reload_notification_has_its_start_time(manager: Manager) -> None:
    before = now_ns()
    systemd.notify_reloading()
    messages = dict(line.split("=") for line in manager.read()[0].splitlines())
    assert messages["RELOADING"] == "1"
    assert before // 1000 <= int(messages["MONOTONIC_USEC"]) <= now_ns() // 1000


@pytest.mark.parametrize(
    ("watchdog_usec", "pid", "beats"),
    [("60000", "", 3), ("60000", "1", 0), ("", "", 0), ("x", "", 0)],
)
def test_running_loop_sends_watchdog_messages_if_enabled(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, watchdog_usec: str, pid: str, beats: int
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", watchdog_usec)
    if pid:
        monkeypatch.setenv("WATCHDOG_PID", pid)

    async def run_loop() -> None:
        systemd.keep_alive()
        await asyncio.sleep(0.1)

    asyncio.run(run_loop())
    messages = manager.read()
    assert set(messages) <= {"WATCHDOG=1"}
    assert beats <= len(messages) <= 6 * bool(beats)


def test_notify_without_a_manager_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "_channel", systemd._Channel())
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    systemd.notify(READY="1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    systemd.notify(READY="1")
