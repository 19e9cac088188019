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
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import Config
from iskander.control.runtime_directory import ATTACH_SOCKET, RuntimeDirectory, process_directory
from iskander.errors import IskanderError
from iskander.gateway.child import BACKOFF_MOST_S, ChildProcess
from iskander.gateway.child_settings import fixed
from iskander.gateway.secrets import require_secrets
from iskander.gateway.systemd import notify, notify_reloading
from iskander.repository.load_intents import LoadIntents
from iskander.transport.addresses import admin_address, require_addresses
from iskander.transport.sockets import ReservedPorts

if TYPE_CHECKING:
    from iskander.telemetry.admin import AdminServer

log = logging.getLogger("iskander.processes")

STOP_SLACK_S = 20.0
"""Beyond lame duck and drain, for a process and its workers to end."""
AT_ONCE_S = 1.0
"""For a process that is to end at once; then it is killed."""
LOOK_S = 1.0
SILENT_S, HUNG_S = 10.0, 30.0
"""Without a beat, until a process does not count as ready, and until it is killed."""
TURN_S = 0.02


class Parent:
    """All processes of one gateway.

    Args:
        config: Checked settings, with `server.processes` above 1.
        command: What a process is started with; its settings and its number are put behind.
        read_again: Reads the configuration anew.

    Attributes:
        processes: By their numbers.
        is_cut: It was asked to end at once.

    Raises:
        ConfigError: An address is none or cannot be shared, or another gateway has the directory.
    """

    def __init__(
        self, config: Config, command: Sequence[str], read_again: Callable[[], Config]
    ) -> None:
        require_addresses(config)
        self._config = config
        self._command = command
        self._read_again = read_again
        self._runtime = RuntimeDirectory(config)
        self.processes = [
            ChildProcess(index, process_directory(self._runtime.path, index), config)
            for index in range(config.server.processes)
        ]
        LoadIntents(self._runtime.path).clear()
        self._attach = self._runtime.path / ATTACH_SOCKET
        self._link()
        self._ports = ReservedPorts()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_stopping = self._was_ready = self.is_cut = False
        self._boot_code: int | None = None
        self._rolling: asyncio.Task[None] | None = None
        self._admin: AdminServer | None = None
        self._looked_ns = now_ns()
        self._looking: asyncio.TimerHandle | None = None

    async def serve(self) -> int:
        """Start all, and look after them until `stop`.

        Returns:
            The exit code: 0, or that of a process that could not start when the gateway did.

        Raises:
            ConfigError: Nobody can listen at an address.
        """
        try:
            await self._ports.hold(self._config)
            await self._start_admin()
            for process in self.processes:
                self._loop.add_reader(process.notices, self._on_notice, process)
                self._start(process)
            self._look()
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
            self.is_cut = True
            self._signal_all(signal.SIGQUIT)
            self._loop.call_later(AT_ONCE_S, self._signal_all, signal.SIGKILL)
        self._is_stopping = True
        self._changed.set()

    def roll(self) -> None:
        """Replace the processes one by one, each when the one before is ready again."""
        if not self._was_ready or self._rolling is not None or self._is_stopping:
            log.warning("asked to replace the processes while they start, stop or are replaced")
            return
        notify_reloading()
        before = self._config
        complaint = self._accept()
        if complaint:
            log.error(complaint)
            self._say_serving(complaint)
        else:
            self._rolling = self._loop.create_task(self._roll(before))

    def reasons(self) -> list[str]:
        """Why this gateway is not ready; empty where it is.

        One process that listens is enough, but all that do have to be able to serve.
        """
        if self._is_stopping:
            return ["the gateway is stopping"]
        listening = [each for each in self.processes if each.is_ready]
        if not listening:
            return ["no process is ready"]
        now = now_ns()
        reasons = []
        for each in listening:
            if each.silent_s(now) > SILENT_S:
                reasons.append(f"process {each.index} does not move")
            elif not each.is_able:
                reasons.append(
                    f"process {each.index} has a model without the workers that it needs"
                )
        return reasons

    def _accept(self) -> str:
        """Read the settings anew, and go by them; else why not."""
        try:
            read = self._read_again()
            require_secrets(read)
        except IskanderError as error:
            return f"the processes stay as they are: {error.message}"
        was, is_now = fixed(self._config), fixed(read)
        changed = [key for key in was if was[key] != is_now[key]]
        if changed:
            return f"the processes stay: {', '.join(changed)} changed, which takes a restart"
        self._config = read
        return ""

    def _settings(self) -> Config:
        """What a process is started with: what was accepted, with the ports that were taken."""
        config = self._ports.said_in(self._config)
        own_admin = "127.0.0.1:0" if self._admin else ""
        return replace(config, admin=replace(config.admin, address=own_admin))

    async def _start_admin(self) -> None:
        if address := admin_address(self._config.admin):
            from iskander.telemetry.admin import AdminServer
            from iskander.telemetry.aggregate import AggregatedPages

            self._admin = AdminServer(address, AggregatedPages(self))
            await self._admin.start()

    def _start(self, process: ChildProcess) -> None:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None
        if self._is_stopping or process.child is not None:
            return
        try:
            ended = process.start(self._command, self._settings())
        except OSError as error:
            log.error("process %d cannot be started: %s", process.index, error.strerror)
            process.timer = self._loop.call_later(BACKOFF_MOST_S, self._start, process)
        else:
            self._loop.add_reader(ended, self._on_end, process, ended)

    def _on_notice(self, process: ChildProcess) -> None:
        process.read_notices()
        self._changed.set()

    def _on_end(self, process: ChildProcess, ended: int) -> None:
        self._loop.remove_reader(ended)
        os.close(ended)
        process.read_notices()
        code, was_asked = process.reap()
        self._changed.set()
        if self._is_stopping or (was_asked and self._rolling is not None):
            return
        if was_asked:
            self._start(process)  # It was killed, and did not end while anybody waited.
            return
        if not self._was_ready:
            # It has said why. What cannot start now would not start later.
            self._boot_code = code if code > 0 else 1
            return
        delay_s = process.backoff_s()
        log.error("process %d ended with %d; again in %g s", process.index, code, delay_s)
        process.timer = self._loop.call_later(delay_s, self._start, process)

    def _say_ready(self) -> None:
        if not self._was_ready and all(process.is_ready for process in self.processes):
            self._was_ready = True
            addresses = self._ports.addresses
            where = ", ".join(addresses)
            log.info("%d processes are ready on %s", len(self.processes), where)
            notify(READY="1", STATUS=f"serving on {where}", X_ISKANDER_ADDRESS=addresses[0])

    def _say_serving(self, note: str) -> None:
        where = ", ".join(self._ports.addresses)
        notify(READY="1", STATUS=f"serving on {where}; {note}")

    def _look(self) -> None:
        """Find the processes that do not move any more."""
        now = now_ns()
        # What they said meanwhile may not have found room.
        was_away = now - self._looked_ns > SILENT_S / 2 * NS_PER_S
        self._looked_ns = now
        for process in self.processes:
            if process.is_cut_off:
                self._listen_again(process)
            process.read_notices()
            if was_away:
                process.heard_ns = now
            limit_s = HUNG_S if process.is_heard else max(HUNG_S, process.config.workers.start_s)
            if process.silent_s(now) > limit_s:
                log.error("process %d did not move for %g s: killed", process.index, limit_s)
                process.heard_ns = now
                process.kill()
        self._changed.set()
        self._looking = self._loop.call_later(LOOK_S, self._look)

    def _listen_again(self, process: ChildProcess) -> None:
        """Nobody is killed for what could not be heard."""
        log.error(
            "somebody removed the runtime directory: what process %d speaks to is made again; "
            "what the process itself had there comes back when it is replaced",
            process.index,
        )
        self._loop.remove_reader(process.notices)
        try:
            process.listen_again()
            self._link()
        except OSError as error:
            log.error("it cannot be made again: %s", error.strerror)
        else:
            self._loop.add_reader(process.notices, self._on_notice, process)

    def _link(self) -> None:
        """Let workers of a service manager find the first process where a lone one would be."""
        self._attach.unlink(missing_ok=True)
        self._attach.symlink_to(process_directory(self._runtime.path, 0) / ATTACH_SOCKET)

    async def _roll(self, before: Config) -> None:
        """Replace all; where one does not get ready, go by what was accepted before again."""
        log.info("the processes are replaced one by one")
        note = "replaced"
        was_able = all(process.is_able for process in self.processes)
        try:
            # Process 0 last: the workers come back to it with the others there.
            late = await self._replace(reversed(self.processes), was_able)
            if late is not None:
                note = f"process {late.index} did not get ready: the settings before hold"
                log.error(note)
                self._config = before
                settings = self._settings()
                changed = [each for each in self.processes if each.config != settings]
                late = await self._replace(changed or [late], was_able)
            if late is not None:
                note = f"process {late.index} is not ready; the others stay"
                log.error(note)
        finally:
            self._rolling = None
            if not self._is_stopping:
                self._say_serving(note)
                for process in self.processes:
                    self._start(process)  # One that ended too late to be replaced.

    async def _replace(
        self, processes: Iterable[ChildProcess], was_able: bool
    ) -> ChildProcess | None:
        """Replace processes, each when the one before is back; the one that is not, if any."""
        for process in processes:
            await self._end(process, signal.SIGHUP)
            if process.child is not None:
                return process
            self._start(process)
            is_back = partial(_is_back, process, was_able)
            if not await _until(is_back, self._config.workers.start_s):
                return process
            log.info("process %d is replaced", process.index)
        return None

    async def _drain(self) -> None:
        self._is_stopping = True
        notify(STOPPING="1", STATUS="draining")
        if self._rolling is not None:
            self._rolling.cancel()
        # SIGINT, which only this process sends: after it the workers end, too.
        await asyncio.gather(*(self._end(each, signal.SIGINT) for each in self.processes))

    async def _end(self, process: ChildProcess, number: signal.Signals) -> None:
        """Ask a process to end, and kill it where it does not."""
        process.signal(number)
        # Each by what it was started with: they differ while they are replaced.
        limit_s = max(_stop_s(each.config) for each in self.processes)
        is_gone = partial(_has_no_child, process)
        if not await _until(is_gone, limit_s):
            log.error("process %d does not stop: it is killed", process.index)
            process.signal(signal.SIGKILL)
            await _until(is_gone, STOP_SLACK_S)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.signal(number)

    async def _release(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        if self._admin is not None:
            await self._admin.stop()
        for process in self.processes:
            if process.timer is not None:
                process.timer.cancel()
            self._loop.remove_reader(process.notices)
            process.signal(signal.SIGKILL)
            process.close()
        self._ports.close()
        self._attach.unlink(missing_ok=True)
        self._runtime.release()


def _has_no_child(process: ChildProcess) -> bool:
    return process.child is None


def _is_back(process: ChildProcess, was_able: bool) -> bool:
    return process.is_ready and (process.is_able or not was_able)


def _stop_s(config: Config) -> float:
    """Its streams first, and then the workers, which may have to finish for the siblings."""
    return config.server.lame_duck_s + 2 * config.server.drain_s + STOP_SLACK_S


async def _until(is_so: Callable[[], bool], limit_s: float) -> bool:
    """Wait for something to be so; False where it took too long."""
    deadline_ns = now_ns() + int(limit_s * NS_PER_S)
    while not is_so():
        if now_ns() > deadline_ns:
            return False
        await asyncio.sleep(TURN_S)
    return True
