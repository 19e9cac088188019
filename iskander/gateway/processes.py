"""Several gateway processes on one port: started, watched, replaced one by one, stopped together.

    parent        holds the ports, starts the processes, answers for all of them; serves nothing
    process 0     serves, and looks after the workers
    process 1...  serve; the workers attach to them too

Each process listens with SO_REUSEPORT once its models are ready, so the kernel gives a connection
to one that is. They report to the parent as to a service manager. One that ends is started again;
the workers stay meanwhile, also without process 0, and the other processes do not notice.

Runs on: the parent's loop, which imports neither NumPy nor pyarrow.

Source: socket(7) (SO_REUSEPORT), sd_notify(3).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.clock import NS_PER_S, now_ns
from iskander.config import Config
from iskander.errors import ConfigError, IskanderError
from iskander.gateway.access.secrets import require_secrets
from iskander.gateway.addresses import require_addresses
from iskander.gateway.ports import bind, with_port
from iskander.gateway.repository.wishes import Wishes
from iskander.gateway.runtime import ATTACH_SOCKET, RuntimeDirectory, process_directory
from iskander.gateway.systemd import notify

if TYPE_CHECKING:
    from iskander.gateway.telemetry.admin import AdminServer

log = logging.getLogger("iskander.processes")

BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 10.0
STEADY_NS = 10 * NS_PER_S
"""A process that served for so long has not failed in a row."""
STOP_SLACK_S = 20.0
"""Beyond lame duck and drain, for a process and its workers to end."""
TURN_S = 0.02
NOTICE_BYTES_MAX = 4096


class Process:
    """The place of one gateway process, and what fills it.

    Args:
        index: Its number, from 0.
        folder: Its runtime directory.

    Attributes:
        child: The running one.
        is_ready: It has said that it listens, and is not stopping.
        is_able: Its models are ready now.
        admin_address: Where it answers for itself; empty where it does not.
        starts: How often it was started.
        failures: Ends in a row that nobody asked for.
        timer: Of its next start.
    """

    def __init__(self, index: int, folder: Path) -> None:
        self.index = index
        self.child: subprocess.Popen[bytes] | None = None
        self.is_ready = False
        self.admin_address = ""
        self.starts = 0
        self.failures = 0
        self.is_able = False
        self.timer: asyncio.TimerHandle | None = None
        self._started_ns = 0
        self._is_asked_to_end = False
        self._folder = folder
        self._path = folder / "notify"
        self._path.unlink(missing_ok=True)
        self.notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notices.setblocking(False)
        self.notices.bind(str(self._path))

    def start(self, command: Sequence[str]) -> int:
        """Start the process; the caller owns the pidfd that tells of its end.

        Raises:
            OSError: The system refused it.
        """
        assert self.child is None
        self.starts += 1
        self._started_ns = now_ns()
        self._is_asked_to_end = False
        # A session of its own: a Ctrl-C at the terminal is for the parent, which drains them all.
        own = ["--set", f"server.runtime_directory={self._folder}", "--process", str(self.index)]
        self.child = subprocess.Popen(
            [*command, *own],
            stdin=subprocess.DEVNULL,
            env={
                **os.environ,
                "NOTIFY_SOCKET": str(self._path),
                "ISKANDER_PARENT_PID": str(os.getpid()),
            },
            start_new_session=True,
        )
        try:
            return os.pidfd_open(self.child.pid)
        except OSError:
            self.child.kill()
            self.child.wait()
            self.child = None
            raise

    def reap(self) -> tuple[int, bool]:
        """Note how the child ended: its exit code, and whether it was asked to."""
        assert self.child is not None
        code = self.child.wait()
        self.child = None
        self.is_ready = self.is_able = False
        self.admin_address = ""
        was_steady = now_ns() - self._started_ns > STEADY_NS
        self.failures = 0 if self._is_asked_to_end else 1 if was_steady else self.failures + 1
        return code, self._is_asked_to_end

    def read_notices(self) -> None:
        """Take what the child has said of itself."""
        with contextlib.suppress(BlockingIOError):
            while True:
                lines = self.notices.recv(NOTICE_BYTES_MAX).decode(errors="replace").splitlines()
                fields = dict(line.partition("=")[::2] for line in lines)
                self.admin_address = fields.get("X_ISKANDER_ADMIN", self.admin_address)
                if "READY" in fields or "STOPPING" in fields:
                    self.is_ready = "READY" in fields
                self.is_able = fields.get("X_ISKANDER_READY", str(int(self.is_able))) == "1"

    def signal(self, number: signal.Signals) -> None:
        """Signal the child, if there is one; every signal that is sent asks it to end."""
        if self.child is not None:
            self._is_asked_to_end = True
            self.child.send_signal(number)

    def close(self) -> None:
        """Release the socket."""
        self.notices.close()
        self._path.unlink(missing_ok=True)


class Parent:
    """All processes of one gateway.

    Args:
        config: Checked settings, with `server.processes` above 1.
        command: What a process is started with; its number is put behind.
        read_again: Reads the configuration anew.

    Raises:
        ConfigError: An address is none or cannot be shared, or another gateway has the directory.
    """

    def __init__(
        self, config: Config, command: Sequence[str], read_again: Callable[[], Config]
    ) -> None:
        require_addresses(config)
        self._config = config
        self._command = [*command, "--set", f"server.processes={config.server.processes}"]
        self._read_again = read_again
        self._runtime = RuntimeDirectory(config)
        self.processes = [
            Process(index, process_directory(self._runtime.path, index))
            for index in range(config.server.processes)
        ]
        Wishes(self._runtime.path).clear()
        # Workers that a service manager starts find the first process where a lone one would be.
        attach = self._runtime.path / ATTACH_SOCKET
        attach.unlink(missing_ok=True)
        attach.symlink_to(process_directory(self._runtime.path, 0) / ATTACH_SOCKET)
        self._held: list[socket.socket] = []
        self._addresses: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_stopping = self._was_ready = False
        self._boot_code: int | None = None
        self._rolling: asyncio.Task[None] | None = None
        self._admin: AdminServer | None = None

    async def serve(self) -> int:
        """Start all, and look after them until `stop`.

        Returns:
            The exit code: 0, or that of a process that could not start when the gateway did.

        Raises:
            ConfigError: Nobody can listen at an address.
        """
        try:
            await self._hold_ports()
            await self._start_admin()
            for process in self.processes:
                self._loop.add_reader(process.notices, self._on_notice, process)
                self._start(process)
            while not self._is_stopping and self._boot_code is None:
                self._changed.clear()
                self._say_ready()
                await self._changed.wait()
            await self._drain()
        finally:
            await self._release()
        return self._boot_code or 0

    def stop(self) -> None:
        """Let all finish what was accepted, and end; asked again, end at once."""
        if self._is_stopping:
            for process in self.processes:
                process.signal(signal.SIGQUIT)
        self._is_stopping = True
        self._changed.set()

    def roll(self) -> None:
        """Replace the processes one by one, each when the one before is ready again."""
        if not self._was_ready or self._rolling is not None or self._is_stopping:
            log.warning("asked to replace the processes while they start, stop or are replaced")
            return
        try:
            read = self._read_again()
            require_secrets(read)
            was, is_now = _fixed(self._config), _fixed(read)
            changed = [key for key in was if was[key] != is_now[key]]
        except IskanderError as error:
            log.error("the processes stay as they are: %s", error.message)
            return
        if changed:
            log.error("the processes stay: %s changed, which takes a restart", ", ".join(changed))
            return
        self._rolling = self._loop.create_task(self._roll())

    def reasons(self) -> list[str]:
        """Why this gateway is not ready; empty where it is.

        One process that listens is enough, but all that do have to be able to serve.
        """
        if self._is_stopping:
            return ["the gateway is stopping"]
        listening = [each for each in self.processes if each.is_ready]
        if not listening:
            return ["no process is ready"]
        return [
            f"process {each.index} has a model without the workers that it needs"
            for each in listening
            if not each.is_able
        ]

    async def _hold_ports(self) -> None:
        """Find the ports, and keep others from them while a process is replaced."""
        for address in self._config.addresses:
            self._addresses.append(await self._hold_port("server.address", address))
        told = ", ".join(f'"{address}"' for address in self._addresses)
        self._command += ["--set", f"server.address=[{told}]"]
        if self._config.http.address:
            address = await self._hold_port("http.address", self._config.http.address)
            self._command += ["--set", f"http.address={address}"]

    async def _hold_port(self, setting: str, address: str) -> str:
        try:
            # Not shared, to see that nobody listens there; then shared with the processes.
            for probe in await bind(address, is_shared=False):
                probe.close()
            held = await bind(address, is_shared=True)
        except OSError as error:
            raise ConfigError(
                f"{setting} {address}: cannot listen there: {error.strerror}"
            ) from None
        self._held += held
        return with_port(address, held[0])

    async def _start_admin(self) -> None:
        if self._config.admin.address:
            from iskander.gateway.telemetry.admin import AdminServer
            from iskander.gateway.telemetry.merged import MergedPages

            self._admin = AdminServer(self._config.admin.address, MergedPages(self))
            await self._admin.start()
            self._command += ["--set", "admin.address=127.0.0.1:0"]
        else:
            self._command += ["--set", "admin.address="]

    def _start(self, process: Process) -> None:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None
        if self._is_stopping or process.child is not None:
            return
        try:
            ended = process.start(self._command)
        except OSError as error:
            log.error("process %d cannot be started: %s", process.index, error.strerror)
            process.timer = self._loop.call_later(BACKOFF_MOST_S, self._start, process)
        else:
            self._loop.add_reader(ended, self._on_end, process, ended)

    def _on_notice(self, process: Process) -> None:
        process.read_notices()
        self._changed.set()

    def _on_end(self, process: Process, ended: int) -> None:
        self._loop.remove_reader(ended)
        os.close(ended)
        process.read_notices()
        code, was_asked = process.reap()
        self._changed.set()
        if was_asked or self._is_stopping:
            return
        if not self._was_ready:
            # It has said why. What cannot start now would not start later.
            self._boot_code = code if code > 0 else 1
            return
        delay_s = min(BACKOFF_FIRST_S * 2 ** (process.failures - 1), BACKOFF_MOST_S)
        log.error("process %d ended with %d; again in %g s", process.index, code, delay_s)
        process.timer = self._loop.call_later(delay_s, self._start, process)

    def _say_ready(self) -> None:
        if not self._was_ready and all(process.is_ready for process in self.processes):
            self._was_ready = True
            where = ", ".join(self._addresses)
            log.info("%d processes are ready on %s", len(self.processes), where)
            notify(READY="1", STATUS=f"serving on {where}", X_ISKANDER_ADDRESS=self._addresses[0])

    async def _roll(self) -> None:
        log.info("the processes are replaced one by one")
        try:
            # Process 0 last: the workers come back to it with the others there.
            for process in reversed(self.processes):
                await self._end(process, signal.SIGHUP)
                self._start(process)
                if not await _until(partial(_is_ready, process), self._config.workers.start_s):
                    log.error("process %d is not ready; the others stay", process.index)
                    break
                log.info("process %d is replaced", process.index)
        finally:
            self._rolling = None

    async def _drain(self) -> None:
        self._is_stopping = True
        notify(STOPPING="1", STATUS="draining")
        if self._rolling is not None:
            self._rolling.cancel()
        await asyncio.gather(*(self._end(each, signal.SIGTERM) for each in self.processes))

    async def _end(self, process: Process, number: signal.Signals) -> None:
        """Ask a process to end, and kill it where it does not."""
        server = self._config.server
        process.signal(number)
        # Its streams first, and then the workers, which may have to finish for the siblings.
        limit_s = server.lame_duck_s + 2 * server.drain_s + STOP_SLACK_S
        is_gone = partial(_has_no_child, process)
        if not await _until(is_gone, limit_s):
            log.error("process %d does not stop: it is killed", process.index)
            process.signal(signal.SIGKILL)
            await _until(is_gone, STOP_SLACK_S)

    async def _release(self) -> None:
        if self._admin is not None:
            await self._admin.stop()
        for process in self.processes:
            if process.timer is not None:
                process.timer.cancel()
            self._loop.remove_reader(process.notices)
            process.signal(signal.SIGKILL)
            process.close()
        for held in self._held:
            held.close()
        self._runtime.release()


def _has_no_child(process: Process) -> bool:
    return process.child is None


def _is_ready(process: Process) -> bool:
    return process.is_ready


def _fixed(config: Config) -> dict[str, object]:
    """What the processes have to agree on with each other, with the parent and with the workers."""
    server, workers = config.server, config.workers
    return {
        "server.address": config.addresses,
        "server.processes": server.processes,
        "server.cores": server.cores,
        "workers.groups": workers.groups,
        "workers.count": workers.count,
        "workers.thread_pool": workers.thread_pool,
        "workers.busy_poll_us": workers.busy_poll_us,
        "workers of models": [
            (model.pool, model.own_workers, model.python, model.intra_threads)
            for model in config.models
            if model.own_workers
        ],
        "admin.address": config.admin.address,
        "http.address": config.http.address,
    }


async def _until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Wait for something to be so; False where it took too long."""
    deadline_ns = now_ns() + int(limit_s * NS_PER_S)
    while not is_so():
        if now_ns() > deadline_ns:
            return False
        await asyncio.sleep(TURN_S)
    return True
