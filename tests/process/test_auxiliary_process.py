"""Auxiliary process of the gateway, with real processes: restarts, failed starts, hangs, end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from iskander.gateway.supervision import auxiliary_process
from iskander.gateway.supervision.auxiliary_process import STUCK_MAX, AuxiliaryProcess

WITHIN_S = 20.0
LONG_S = 60.0
NAME = "played"
EXITS_AT_END_OF_FILE = "connection.recv(1)"
IGNORES_END_OF_FILE = "pause()"
ANSWERS_FOR_EVER = "while True: connection.send(b'.'); sleep(0.05)"
FAILS = "raise SystemExit(3)"
PROGRAM = """
import os, socket
from signal import pause
from time import sleep
connection = socket.socket(fileno=0)
connection.send(str("NOTIFY_SOCKET" in os.environ).encode())
"""


class Played:
    """An owner that records what happens, and a program that it runs."""

    def __init__(self, folder: Path, program: str) -> None:
        self._path = folder / f"{NAME}.py"
        self.write(program)
        self.answers = b""
        self.codes: list[int] = []
        self.errors: list[str] = []
        self.pauses_s: list[float] = []
        self.process = AuxiliaryProcess(
            NAME, self._on_start, self._on_exit, self._on_start_error, PYTHONPATH=str(folder)
        )
        self.on_answer: Callable[[], None] = lambda: None

    def write(self, program: str) -> None:
        """Write the program of the next process."""
        self._path.write_text(PROGRAM + program)

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not is_true():
                await asyncio.sleep(0.01)

    def _on_start(self, connection: socket.socket) -> None:
        self.answers = b""
        asyncio.get_running_loop().add_reader(connection, self._receive)

    def _receive(self) -> None:
        assert self.process.socket is not None
        with contextlib.suppress(OSError):
            self.answers += self.process.socket.recv(4096)
            self.on_answer()

    def _on_exit(self, code: int) -> None:
        assert self.process.socket is not None
        asyncio.get_running_loop().remove_reader(self.process.socket)
        self._receive()
        self.codes.append(code)
        self.pauses_s.append(self.process.pause_s)

    def _on_start_error(self, reason: str) -> None:
        self.errors.append(reason)
        self.pauses_s.append(self.process.pause_s)


@contextlib.asynccontextmanager
async def playing(folder: Path, program: str, *, is_started: bool = True) -> AsyncIterator[Played]:
    """A process; at the end, neither it nor a descriptor is left."""
    descriptors = set(os.listdir("/proc/self/fd"))
    played = Played(folder, program)
    if is_started:
        played.process.start()
    try:
        yield played
    finally:
        await played.process.stop(0)
        assert not children()
        assert set(os.listdir("/proc/self/fd")) == descriptors


def children() -> list[psutil.Process]:
    """Children of this process that run the program, zombies too."""
    return [
        each
        for each in psutil.Process().children()
        if each.status() == psutil.STATUS_ZOMBIE or NAME in each.cmdline()
    ]


def test_process_that_ends_is_started_again_later_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/none")

    async def run() -> None:
        async with playing(tmp_path, FAILS) as played:
            await played.until(lambda: len(played.codes) == 3)
            played.write(EXITS_AT_END_OF_FILE)
            await played.until(lambda: played.process.starts == 4 and played.answers)
            assert played.answers == b"False"
            assert (played.process.starts, played.process.pid) == (4, children()[0].pid)
            played.process.reset_backoff()
            os.kill(played.process.pid, signal.SIGKILL)
            await played.until(lambda: played.process.starts == 5 and played.answers)
            assert not played.process.was_killed
        assert played.codes[:4] == [3, 3, 3, -signal.SIGKILL]
        assert played.pauses_s[:4] == [0.1, 0.2, 0.4, 0.1]

    asyncio.run(run())


@pytest.mark.parametrize("free", [1, 2], ids=["no socket pair", "no process"])
def test_start_that_fails_is_repeated(tmp_path: Path, free: int) -> None:
    """A start needs more descriptors."""

    async def run() -> None:
        async with playing(tmp_path, EXITS_AT_END_OF_FILE, is_started=False) as played:
            with free_descriptors(free):
                played.process.start()
            assert played.errors == [os.strerror(errno.EMFILE)]
            await played.until(lambda: played.answers)
            assert not await played.process.stop(LONG_S)
            assert (played.codes, played.pauses_s) == ([0], [0.1, 0.2])

    asyncio.run(run())


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave a number of descriptors to this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.dup(0) for _ in range(count + 1)]
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(probes), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_process_ends_at_end_of_file_and_is_not_started_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with playing(tmp_path, EXITS_AT_END_OF_FILE) as played:
            await played.until(lambda: played.answers)
            assert not await played.process.stop(LONG_S)
            assert (played.codes, played.process.pid) == ([0], 0)
            await asyncio.sleep(2 * played.process.pause_s)
            assert played.process.starts == 1

    asyncio.run(run())


@pytest.mark.parametrize("program", [IGNORES_END_OF_FILE, ANSWERS_FOR_EVER])
def test_process_that_does_not_end_is_killed(tmp_path: Path, program: str) -> None:
    """Its answers do not move the deadline."""

    async def run() -> None:
        async with playing(tmp_path, program) as played:
            played.on_answer = lambda: played.process.expect_answer(LONG_S)
            await played.until(lambda: played.answers)
            async with asyncio.timeout(WITHIN_S):
                assert await played.process.stop(0.3)
            assert played.codes == [-signal.SIGKILL]

    asyncio.run(run())


def test_stop_during_the_backoff_starts_no_process(tmp_path: Path) -> None:
    async def run() -> None:
        async with playing(tmp_path, FAILS) as played:
            await played.until(lambda: played.codes)
            assert not await played.process.stop(LONG_S)
            await asyncio.sleep(2 * played.process.pause_s)
            assert played.process.starts == 1

    asyncio.run(run())


def test_silent_process_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        async with playing(tmp_path, ANSWERS_FOR_EVER) as played:
            played.on_answer = lambda: played.process.expect_answer(1.0)
            await played.until(lambda: len(played.answers) > 20)
            first = played.process.pid
            assert not played.codes
            os.kill(first, signal.SIGSTOP)
            await played.until(lambda: played.codes)
            assert played.process.was_killed
            await played.until(lambda: played.process.starts == 2 and played.answers)
            assert played.codes == [-signal.SIGKILL]

    asyncio.run(run())


def test_killed_processes_that_do_not_end_are_left_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a call of a driver: here, the signal is not sent."""
    monkeypatch.setattr(auxiliary_process, "KILLED_S", 0.05)
    monkeypatch.setattr(auxiliary_process, "STUCK_S", 0.1)

    async def run() -> None:
        async with playing(tmp_path, IGNORES_END_OF_FILE) as played:
            played.on_answer = lambda: played.process.expect_answer(0.05)
            with monkeypatch.context() as patched:
                patched.setattr(subprocess.Popen, "kill", lambda child: None)
                await played.until(lambda: len(played.errors) == 2)
                stuck = children()
                assert len(stuck) == played.process.stuck == played.process.starts == STUCK_MAX
                assert played.errors[0] == f"{STUCK_MAX} killed ones do not end"
                played.on_answer = lambda: None
            stuck[0].kill()
            await played.until(lambda: played.process.starts == STUCK_MAX + 1 and played.answers)
            assert played.process.pid
            stuck[1].kill()
            await played.until(lambda: len(children()) == 2)
            assert played.codes == [-signal.SIGKILL] * STUCK_MAX
            stuck[2].kill()
            await played.until(lambda: len(children()) == 1)

    asyncio.run(run())
