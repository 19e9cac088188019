"""Parent of several gateway processes: start, watchdog, reload, replacement, shutdown.

    parent        reserves the ports, starts the processes, serves the admin port; no requests
    process 0     serves requests, and supervises the workers
    process 1...  serve requests; the workers attach to them too

Each process listens with SO_REUSEPORT once its models are ready, so the kernel gives connections
only to ready processes. They notify the parent by the protocol of service managers. A process that
ends is started again; meanwhile the workers, even of process 0, and other processes continue.

Runs on: the parent's loop, which imports neither NumPy nor pyarrow.

Source: socket(7) (SO_REUSEPORT), sd_notify(3).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from iskander.config.changes import compare
from iskander.config.schema import Config
from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.exit_codes import ExitCode
from iskander.foundation.file_watcher import ReloadStatus
from iskander.foundation.logs import gateway as log
from iskander.gateway.auth.audit import AuditLog
from iskander.gateway.auth.grants import Authenticator
from iskander.gateway.child import ChildProcess
from iskander.gateway.child_settings import fixed
from iskander.gateway.events import EventStream
from iskander.gateway.repository.load_intents import LoadIntents
from iskander.gateway.secrets import require_secrets
from iskander.gateway.supervision.lifecycle import BACKOFF_MAX_S, backoff_s
from iskander.gateway.systemd import notify, notify_reloading
from iskander.gateway.telemetry.logs import set_log_level
from iskander.gateway.telemetry.status.events import EventLog
from iskander.gateway.transport.addresses import admin_address, require_addresses
from iskander.gateway.transport.sockets import ReservedPorts
from iskander.gateway.transport.tls import HTTP1, Tls
from iskander.interprocess.control.runtime_directory import (
    ATTACH_SOCKET,
    RuntimeDirectory,
    process_directory,
)

if TYPE_CHECKING:
    from iskander.gateway.telemetry.admin import AdminServer

STOP_SLACK_S = 20.0
"""Added to lame duck and drain for the exit of a process and its workers."""
KILL_DELAY_S = 1.0
CHECK_S = 1.0
SILENT_S, HUNG_S = 10.0, 30.0
"""Time without a heartbeat before a process is not ready, and before it is killed."""
RELOAD_S = 10.0
"""Time in which a process applies live settings; it is replaced otherwise."""
TURN_S = 0.02
"""Interval at which a condition is checked."""


class ReloadOutcome(NamedTuple):
    """Outcome of a reload.

    Attributes:
        note: Its description for the service manager.
        is_complete: All processes have the settings of the file.
    """

    note: str
    is_complete: bool


class Parent:
    """All processes of one gateway; raises ConfigError if its addresses or directory are in use.

    Args:
        config: Checked settings, with `server.processes` above 1.
        command: Starts a process; its settings file and number are appended.
        read_again: Reads the configuration again.
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
        self._is_stopping = self._is_signalled = self._was_ready = self.is_forced = False
        self._startup_code: int | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._admin: AdminServer | None = None
        self._events = EventLog()
        self._audit = AuditLog(config.access.audit_file)
        self._access: Authenticator | None = None
        self._tls = Tls(config.tls)
        self._stream = EventStream(config)
        self._reloads = ReloadStatus()
        self._checked_ns = now_ns()
        self._check_timer: asyncio.TimerHandle | None = None

    async def serve(self) -> int:
        """Start all processes and supervise them until `stop`; return the exit code.

        It is 0, or that of a process that failed during the startup.
        """
        try:
            await self._ports.hold(self._config)
            await self._start_admin()
            for process in self.processes:
                self._loop.add_reader(process.notices, self._on_notice, process)
                self._start(process)
            self._check()
            while not self._is_stopping and self._startup_code is None:
                self._changed.clear()
                self._notify_ready()
                await self._changed.wait()
            await self._drain()
        finally:
            await self._release()
        return self._startup_code or 0

    def on_signal(self) -> None:
        """Drain and stop all processes; a second signal stops them immediately."""
        if self._is_signalled:
            self.is_forced = True
            self._signal_all(signal.SIGQUIT)
            self._loop.call_later(KILL_DELAY_S, self._signal_all, signal.SIGKILL)
        self._is_signalled = True
        self.stop()

    def stop(self) -> None:
        """Drain and stop all processes; idempotent."""
        self._is_stopping = True
        self._changed.set()

    def reload(self) -> None:
        """Apply the changes of the file.

        If every changed setting is `Live`, each process applies them. Otherwise, also if no setting
        changed, the processes are replaced one by one, each after the one before is ready again.
        """
        if not self._was_ready or self._reloading is not None or self._is_stopping:
            log.replacement_ignored()
            return
        notify_reloading()
        before = self._config
        problem = self._read_settings()
        if problem:
            self._reloads.record(is_valid=False)
            log.replacement_rejected(reason=problem)
            self._notify_serving(f"; {problem}")
            return
        changes = compare(before, self._config)
        if changes.live and not changes.restart:
            work = partial(self._apply, before, changes.text)
        else:
            work = partial(self._roll, before)
        self._reloading = self._loop.create_task(self._run(work))

    def reasons(self) -> list[str]:
        """Return why this gateway is not ready; empty if it is.

        One listening process is enough, but all listening processes must have ready models.
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
                reasons.append(f"process {each.index} is unresponsive")
            elif not each.has_ready_models:
                reasons.append(f"process {each.index} has a model without its quorum of workers")
        return reasons

    def _read_settings(self) -> str:
        """Read and apply the settings; return why they are rejected, else empty."""
        try:
            read = self._read_again()
            require_addresses(read)
            require_secrets(read)
        except IskanderError as error:
            return f"reload rejected: {error.message}"
        before, after = fixed(self._config), fixed(read)
        changed = [key for key in before if before[key] != after[key]]
        if changed:
            return (
                f"reload rejected: {', '.join(changed)} changed, which all processes and the "
                "workers share: restart required. No change of the file is applied"
            )
        self._use(read)
        return ""

    def _use(self, config: Config) -> None:
        """Use settings for this process and the next starts of the others."""
        if config.admin.log_level != self._config.admin.log_level:
            set_log_level(config.admin)
        self._config = config

    def _child_settings(self) -> Config:
        """The applied settings, with the reserved ports."""
        config = self._ports.with_reserved_ports(self._config)
        own_admin = "127.0.0.1:0" if self._admin else ""
        return replace(config, admin=replace(config.admin, address=own_admin, tls=False))

    async def _start_admin(self) -> None:
        if address := admin_address(self._config.admin):
            from iskander.gateway.telemetry.admin import AdminServer
            from iskander.gateway.telemetry.metrics.aggregate import render
            from iskander.gateway.telemetry.status.aggregate_status import MergedStatus

            page = partial(render, self.processes, self._reloads)
            status = None
            if self._config.admin.page:
                self._events.start()
                status = MergedStatus(self.processes, self.reasons, self._events).read
            if self._config.events.enabled:
                self._audit.start()
                self._access = Authenticator(self._config.access, lambda: None, audit=self._audit)
                self._access.start()
            self._admin = AdminServer(
                address,
                self.reasons,
                page,
                read_status=status,
                config=self._config,
                tls=self._tls.context(HTTP1) if self._config.admin.tls else None,
                events=None if self._access is None else self._stream.endpoint(self._access),
            )
            await self._stream.receive(self._runtime.path, await self._admin.start())
            if self._config.admin.tls:
                self._tls.start()

    def _start(self, process: ChildProcess) -> None:
        if process.timer is not None:
            process.timer.cancel()
            process.timer = None
        if self._is_stopping or process.child is not None:
            return
        try:
            pidfd = process.start(self._command, self._child_settings())
        except OSError as error:
            log.process_start_failed(child=process.index, reason=str(error.strerror))
            process.timer = self._loop.call_later(BACKOFF_MAX_S, self._start, process)
        else:
            self._loop.add_reader(pidfd, self._on_end, process, pidfd)

    def _on_notice(self, process: ChildProcess) -> None:
        process.read_notices()
        action, process.action = process.action, ""
        if action == "drain":
            self.stop()
        elif action == "reload":
            self.reload()
        self._changed.set()

    def _on_end(self, process: ChildProcess, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        process.read_notices()
        code, was_requested = process.reap()
        self._changed.set()
        if self._is_stopping or (was_requested and self._reloading is not None):
            return
        if was_requested:
            self._start(process)  # It was killed for a replacement that has timed out meanwhile.
        elif not self._was_ready:
            # A failure during the startup is final; the process has logged the reason.
            self._startup_code = code if code > 0 else 1
        else:
            delay_s = backoff_s(process.failures)
            log.process_ended(child=process.index, exit_code=code, delay_s=delay_s)
            process.timer = self._loop.call_later(delay_s, self._start, process)

    def _notify_ready(self) -> None:
        """Notify the service manager once, when all processes are ready."""
        if not self._was_ready and all(process.is_ready for process in self.processes):
            self._was_ready = True
            where = ", ".join(self._ports.addresses)
            log.processes_ready(count=len(self.processes), addresses=where)
            self._notify_serving(X_ISKANDER_ADDRESS=self._ports.addresses[0])

    def _notify_serving(self, note: str = "", **fields: str) -> None:
        where = ", ".join(self._ports.addresses)
        notify(READY="1", STATUS=f"serving on {where}{note}", **fields)

    def _check(self) -> None:
        """Kill unresponsive processes, periodically."""
        now = now_ns()
        # If this loop was blocked, heartbeats may have been lost to a full socket buffer.
        was_blocked = now - self._checked_ns > SILENT_S / 2 * NS_PER_S
        self._checked_ns = now
        for process in self.processes:
            if process.is_socket_missing:
                self._reopen_socket(process)
            process.read_notices()
            if was_blocked:
                process.notified_ns = now
            start_s = 0.0 if process.has_notified else process.config.workers.start_s
            limit_s = max(HUNG_S, start_s)
            if process.silent_s(now) > limit_s:
                log.process_silent(child=process.index, limit_s=limit_s)
                process.notified_ns = now
                process.kill()
        self._changed.set()
        self._check_timer = self._loop.call_later(CHECK_S, self._check)

    def _reopen_socket(self, process: ChildProcess) -> None:
        log.runtime_directory_deleted(child=process.index)
        self._loop.remove_reader(process.notices)
        try:
            process.reopen_socket()
            self._link()
        except OSError as error:
            log.notification_socket_failed(reason=str(error.strerror))
        else:
            self._loop.add_reader(process.notices, self._on_notice, process)

    def _link(self) -> None:
        """Make `attach.sock` of the runtime directory a link to the socket of process 0."""
        self._attach.unlink(missing_ok=True)
        self._attach.symlink_to(process_directory(self._runtime.path, 0) / ATTACH_SOCKET)

    async def _run(self, work: Callable[[], Awaitable[ReloadOutcome]]) -> None:
        """Run a reload; record its outcome, and report it to the service manager."""
        outcome = ReloadOutcome("reload did not finish", is_complete=False)
        try:
            outcome = await work()
        finally:
            self._reloading = None
            if not self._is_stopping:
                self._reloads.record(is_valid=outcome.is_complete)
                self._notify_serving(f"; {outcome.note}")
                for process in self.processes:
                    self._start(
                        process
                    )  # Starts those that ended after the timeout of their replacement.

    async def _apply(self, before: Config, note: str) -> ReloadOutcome:
        """Apply live settings in all processes, and replace those that do not confirm it."""
        had_ready_models = self._have_ready_models()
        settings = self._child_settings()
        try:
            for process in self.processes:
                process.write(settings)
        except OSError as error:
            self._use(before)
            reason = f"reload rejected: the settings cannot be written: {error.strerror}"
            log.replacement_rejected(reason=reason)
            return ReloadOutcome(reason, is_complete=False)
        applied = await asyncio.gather(*(self._apply_in(each, settings) for each in self.processes))
        outcomes = zip(self.processes, applied, strict=True)
        not_applied = [process for process, is_applied in outcomes if not is_applied]
        failed = await self._replace(reversed(not_applied), had_ready_models)
        if failed is not None:
            unconfirmed = [each for each in not_applied if each.config != settings]
            return ReloadOutcome(_report_incomplete(failed, unconfirmed), is_complete=False)
        log.reloaded(note=note)
        return ReloadOutcome(note, is_complete=True)

    async def _apply_in(self, process: ChildProcess, settings: Config) -> bool:
        """Apply written settings in one process; return whether it, or its successor, has them."""
        # While it starts, it may have the previous settings.
        start_s = self._config.workers.start_s
        await _wait_until(lambda: process.is_ready or process.child is None, start_s)
        if process.child is None or process.config == settings:
            return True
        starts = process.starts
        process.reload()
        await _wait_until(lambda: bool(process.reloaded) or process.starts != starts, RELOAD_S)
        if process.reloaded == "1" and process.starts == starts:
            process.config = settings
        return process.config == settings

    async def _roll(self, before: Config) -> ReloadOutcome:
        """Replace all processes; restore the previous settings if one does not get ready."""
        log.replacement_started()
        had_ready_models = self._have_ready_models()
        # Process 0 is last: when the workers attach to it again, they serve the others already.
        failed = await self._replace(reversed(self.processes), had_ready_models)
        if failed is None:
            return ReloadOutcome("replaced", is_complete=True)
        note = f"process {failed.index} did not get ready: previous settings restored"
        log.replacement_undone(child=failed.index, note=note)
        self._use(before)
        settings = self._child_settings()
        changed = [each for each in self.processes if each.config != settings]
        failed = await self._replace(changed or [failed], had_ready_models)
        if failed is not None:
            note = _report_incomplete(failed)
        return ReloadOutcome(note, is_complete=False)

    def _have_ready_models(self) -> bool:
        return all(process.has_ready_models for process in self.processes)

    async def _replace(
        self, processes: Iterable[ChildProcess], had_ready_models: bool
    ) -> ChildProcess | None:
        """Replace processes one by one; return the first that does not get ready, if any."""
        for process in processes:
            await self._end(process, signal.SIGHUP)
            if process.child is not None:
                return process
            self._start(process)
            if not await self._wait_until_back(process, needs_models=had_ready_models):
                return process
            log.process_replaced(child=process.index)
        return None

    async def _wait_until_back(self, process: ChildProcess, *, needs_models: bool) -> bool:
        """Wait until a new process is ready; False at the timeout, or if it rejects its files."""

        def is_decided() -> bool:
            is_rejected = process.exit_code == ExitCode.CONFIG
            return is_rejected or process.is_back(needs_models=needs_models)

        await _wait_until(is_decided, self._config.workers.start_s)
        return process.is_back(needs_models=needs_models)

    async def _drain(self) -> None:
        self._is_stopping = True
        notify(STOPPING="1", STATUS="draining")
        if self._reloading is not None:
            self._reloading.cancel()
        # Only this process sends SIGINT, which also stops the workers.
        await asyncio.gather(*(self._end(each, signal.SIGINT) for each in self.processes))

    async def _end(self, process: ChildProcess, number: signal.Signals) -> None:
        """Stop a process by a signal, and by SIGKILL after a timeout."""
        process.signal(number)
        # Settings differ between processes during a reload, and a process may have applied new ones
        # that it has not confirmed. It drains its streams first, and then its workers, which may
        # have batches of its peers.
        servers = [self._config.server, *(each.config.server for each in self.processes)]
        limit_s = max(each.lame_duck_s + 2 * each.drain_s for each in servers) + STOP_SLACK_S
        if not await _wait_until(lambda: process.child is None, limit_s):
            log.process_not_stopped(child=process.index, limit_s=limit_s)
            process.signal(signal.SIGKILL)
            await _wait_until(lambda: process.child is None, STOP_SLACK_S)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.signal(number)

    async def _release(self) -> None:
        if self._check_timer is not None:
            self._check_timer.cancel()
        await self._stream.stop()
        if self._admin is not None:
            await self._admin.stop()
        self._tls.stop()
        if self._access is not None:
            self._access.stop()
            self._audit.stop()
        self._events.stop()
        for process in self.processes:
            if process.timer is not None:
                process.timer.cancel()
            self._loop.remove_reader(process.notices)
            process.signal(signal.SIGKILL)
            process.close()
        self._ports.close()
        self._attach.unlink(missing_ok=True)
        self._runtime.release()


def _report_incomplete(failed: ChildProcess, unconfirmed: Sequence[ChildProcess] = ()) -> str:
    note = f"process {failed.index} is not ready; the others keep serving"
    if unconfirmed:
        indexes = ", ".join(str(each.index) for each in unconfirmed)
        note += f"; new settings not confirmed by process {indexes}"
    log.replacement_incomplete(child=failed.index, note=note)
    return note


async def _wait_until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition; return False after the timeout."""
    deadline_ns = now_ns() + int(limit_s * NS_PER_S)
    while not condition():
        if now_ns() > deadline_ns:
            return False
        await asyncio.sleep(TURN_S)
    return True
