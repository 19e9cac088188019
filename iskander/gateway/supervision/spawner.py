"""Worker processes: start, restart with backoff, and exit counts.

A process is restarted after a doubling backoff if it failed, and at once after an orderly exit. An
exit before the models are loaded is a boot failure, a later one a crash; `workers.crash_loop` of
them in a row are a crash loop. An exit that a batch explains does not count.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from iskander.config.schema import WorkersConfig
from iskander.errors import IskanderError, NotReady
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import workers as log
from iskander.gateway.supervision.lifecycle import BACKOFF_MAX_S, Event, State, backoff_s
from iskander.gateway.supervision.worker import Child, ProcessExit, Worker
from iskander.interprocess.control.attach import LockFile
from iskander.interprocess.control.runtime_directory import ATTACH_SOCKET

ADOPTION_POLL_S = 0.1
"""Poll interval for a worker of an earlier gateway, which may be busy."""
BOOT_STARTS_MAX = 3
QUEUE_BACKOFF_MAX_S = 2.0
"""Longest backoff during which requests are queued for the next process."""


class Timers:
    """One timer for each worker slot."""

    def __init__(self) -> None:
        self._handles: dict[int, asyncio.TimerHandle] = {}

    def set(
        self, worker: Worker, delay_s: float, callback: Callable[..., object], *arguments: object
    ) -> None:
        """Replace the slot's timer."""
        self.clear(worker)
        loop = asyncio.get_running_loop()
        self._handles[worker.index] = loop.call_later(delay_s, callback, *arguments)

    def clear(self, worker: Worker) -> None:
        """Cancel the slot's timer."""
        if worker.index in self._handles:
            self._handles.pop(worker.index).cancel()

    def close(self) -> None:
        """Cancel all timers."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()


@dataclass(eq=False, repr=False)
class Spawner:
    """Starts processes and counts their exits.

    Attributes:
        is_first: This gateway process starts the workers; the others wait for them.
        boot_error: The reason why a slot cannot be filled for the first time, once known.
    """

    settings: WorkersConfig
    folder: Path
    is_first: bool
    timers: Timers
    on_event: Callable[[Worker, Event], None]
    on_exit: Callable[[Worker, ProcessExit], None]
    boot_error: IskanderError | None = field(default=None, init=False)

    def fill(self, workers: list[Worker]) -> None:
        """Start a process in each slot that no worker of an earlier gateway holds."""
        deadline_ns = now_ns() + int(self.settings.start_s * NS_PER_S / 2)
        for worker in workers:
            self._adopt_or_spawn(worker, deadline_ns)

    def spawn(self, worker: Worker) -> None:
        """Start a process now."""
        try:
            child, pidfd = worker.spawn(self.folder / ATTACH_SOCKET)
        except OSError as error:
            log.worker_spawn_failed(worker=worker.index, reason=str(error))
            self.on_event(worker, Event.EXITED)
            return
        asyncio.get_running_loop().add_reader(pidfd, self._on_process_end, worker, child, pidfd)
        self.timers.set(worker, self.settings.start_s, self.on_event, worker, Event.TIMED_OUT)

    def spawn_later(self, worker: Worker) -> None:
        """Start a process after the backoff of a failure."""
        pause_s = backoff_s(worker.failures)
        is_loop = worker.failures >= self.settings.crash_loop
        if is_loop:
            pause_s = BACKOFF_MAX_S
            worker.is_looping = True
            log.worker_crash_loop(worker=worker.index, deaths=worker.failures, pause_s=pause_s)
        has_served = worker.has_been_ready and self.settings.spawn
        worker.is_replacement_pending = has_served and pause_s <= QUEUE_BACKOFF_MAX_S
        self._spawn_in(worker, pause_s)
        if is_loop:
            self.on_event(worker, Event.CRASH_LOOP)

    def spawn_next(self, worker: Worker) -> None:
        """Start a process at once after an orderly exit, or when a lost device has returned."""
        worker.exit_counts["device_lost" if worker.device_error else "replaced"] += 1
        self._spawn_in(worker, 0)

    def count_boot(self, worker: Worker) -> None:
        """Count an exit before the models were loaded."""
        worker.was_loaded = False
        worker.failures += 1
        worker.exit_counts["boot_failure"] += 1
        if worker.loading_title:
            title = worker.loading_title
            worker.load_error = f"model `{title}`: the worker ended during the load"
        detail = f": {worker.load_error}" if worker.load_error else ""
        log.worker_boot_failed(worker=worker.index, failures=worker.failures, detail=detail)

    def count_crash(self, worker: Worker) -> None:
        """Count an unexpected exit after the models were loaded."""
        worker.was_loaded = True
        worker.load_error = ""
        # The model of the batch is isolated or quarantined instead (`quarantine`).
        worker.failures += not worker.ended_in_batch
        worker.exit_counts["hang" if worker.is_hung else "crash"] += 1

    def reset_failures(self, worker: Worker) -> None:
        """End the series of failures after steady service."""
        worker.failures = 0
        worker.is_looping = False

    def _spawn_in(self, worker: Worker, pause_s: float) -> None:
        if self.settings.spawn and self.is_first:
            self.timers.set(worker, pause_s, self.on_event, worker, Event.SPAWN_DUE)
        else:
            self.timers.clear(worker)

    def _adopt_or_spawn(self, worker: Worker, deadline_ns: int) -> None:
        """Start a process once no worker of an earlier gateway holds the slot's lock."""
        if worker.state is not State.ABSENT:
            return
        lock = LockFile(self.folder / f"worker-{worker.index}.lock")
        if not lock.acquire() and now_ns() < deadline_ns:
            self.timers.set(worker, ADOPTION_POLL_S, self._adopt_or_spawn, worker, deadline_ns)
            return
        lock.release()
        self.on_event(worker, Event.SPAWN_DUE)

    def _on_process_end(self, worker: Worker, child: Child, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        is_current = worker.reap(child)
        last_exit = worker.last_exit
        assert last_exit is not None
        if last_exit.code:
            log.worker_process_exited(
                worker_pid=child.pid, exit=str(last_exit), explanation=last_exit.explanation
            )
        self.on_exit(worker, last_exit)
        if not is_current:
            return
        if not worker.has_been_ready and worker.starts >= BOOT_STARTS_MAX:
            text = f"worker {worker.index} ended {worker.starts} times before it was ready"
            self.boot_error = NotReady(f"{text}, the last time {last_exit}{last_exit.explanation}")
        self.on_event(worker, Event.EXITED)
