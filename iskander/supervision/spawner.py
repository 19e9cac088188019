"""Processes for the places of the plan: started, and started again when one has ended.

After a failure with a pause that doubles, after an end in order at once. A process that ends before
it has its models is a boot failure, one that ends later a crash; many in a row, of either kind, are
a crash loop.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVarTuple, Unpack

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import WorkersConfig
from iskander.control.attach import LockFile
from iskander.control.runtime_directory import ATTACH_SOCKET
from iskander.errors import IskanderError, NotReady
from iskander.supervision.lifecycle import BACKOFF_MAX_S, Event, State, backoff_s
from iskander.supervision.worker import Child, ProcessExit, Worker

Arguments = TypeVarTuple("Arguments")


class Timers:
    """The timers, by place."""

    def __init__(self) -> None:
        self._handles: dict[int, asyncio.TimerHandle] = {}

    def set(
        self,
        worker: Worker,
        delay_s: float,
        callback: Callable[[Unpack[Arguments]], object],
        *arguments: *Arguments,
    ) -> None:
        """Call back later, instead of whatever was to happen."""
        self.clear(worker)
        self._handles[worker.index] = asyncio.get_running_loop().call_later(
            delay_s, callback, *arguments
        )

    def clear(self, worker: Worker) -> None:
        """Nothing is to happen by itself."""
        handle = self._handles.pop(worker.index, None)
        if handle is not None:
            handle.cancel()

    def close(self) -> None:
        """Nothing anywhere."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()


log = logging.getLogger("iskander.supervisor")

ADOPTION_TURN_S = 0.1
"""How often a worker of an earlier gateway, perhaps busy, is looked for again."""
BOOT_STARTS_MAX = 3
AWAITED_PAUSE_S = 2.0
"""The longest pause after a failure in which requests wait for the next process."""


class Spawner:
    """Starts processes, and counts how they end.

    Args:
        settings: Of the workers.
        folder: The runtime directory.
        is_first: This gateway process starts the workers; others only wait for them.
        timers: One for each place.
        happened: Told what happens.
        ended: Called with a worker and how its process ended.

    Attributes:
        boot_error: Why a place cannot be filled for the first time, once that is clear.
    """

    def __init__(
        self,
        settings: WorkersConfig,
        folder: Path,
        *,
        is_first: bool,
        timers: Timers,
        happened: Callable[[Worker, Event], None],
        ended: Callable[[Worker, ProcessExit], None],
    ) -> None:
        self._ended = ended
        self._is_first = is_first
        self._settings = settings
        self._folder = folder
        self._timers = timers
        self._happened = happened
        self._loop = asyncio.get_running_loop()
        self.boot_error: IskanderError | None = None

    def fill(self, workers: list[Worker]) -> None:
        """Start a process in each place where none of an earlier gateway lives."""
        deadline_ns = now_ns() + int(self._settings.start_s * NS_PER_S / 2)
        for worker in workers:
            self._adopt_or_spawn(worker, deadline_ns)

    def spawn(self, worker: Worker) -> None:
        """Start a process now."""
        try:
            child, pidfd = worker.spawn(self._folder / ATTACH_SOCKET)
        except OSError as error:
            log.error("worker %d cannot be started: %s", worker.index, error)
            self._happened(worker, Event.EXITED)
            return
        self._loop.add_reader(pidfd, self._on_exit, worker, child, pidfd)
        self._timers.set(worker, self._settings.start_s, self._happened, worker, Event.TIMED_OUT)

    def spawn_later(self, worker: Worker) -> None:
        """Start one after a failure, once the pause is over."""
        pause_s = backoff_s(worker.failures)
        is_loop = worker.failures >= self._settings.crash_loop
        if is_loop:
            pause_s = BACKOFF_MAX_S
            worker.is_looping = True
            log.error(
                "worker %d is in a crash loop: %d deaths in a row; the next start is in %g s",
                worker.index,
                worker.failures,
                pause_s,
            )
        has_served = worker.has_been_ready and self._settings.spawn
        worker.is_awaited = has_served and pause_s <= AWAITED_PAUSE_S
        self._spawn_in(worker, pause_s)
        if is_loop:
            self._happened(worker, Event.LOOPED)

    def spawn_next(self, worker: Worker) -> None:
        """Start one after an end in order."""
        worker.ends["replaced"] += 1
        self._spawn_in(worker, 0)

    def count_boot(self, worker: Worker) -> None:
        """A process ended before it had its models."""
        worker.was_loaded = False
        worker.failures += 1
        worker.ends["boot_failure"] += 1
        if worker.loading:
            worker.complaint = f"model `{worker.loading}`: its process ended while it loaded it"
        log.error(
            "worker %d ended before it had loaded its models: failure %d in a row%s",
            worker.index,
            worker.failures,
            f": {worker.complaint}" if worker.complaint else "",
        )

    def count_crash(self, worker: Worker) -> None:
        """A process ended that had its models, and nobody had asked it to."""
        worker.was_loaded = True
        worker.complaint = ""
        worker.failures += 1
        worker.ends["hang" if worker.is_hung else "crash"] += 1

    def forgive(self, worker: Worker) -> None:
        """A process has been steady: what failed before it is forgotten."""
        worker.failures = 0
        worker.is_looping = False

    def _spawn_in(self, worker: Worker, pause_s: float) -> None:
        if self._settings.spawn and self._is_first:
            self._timers.set(worker, pause_s, self._happened, worker, Event.SPAWN_DUE)
        else:
            self._timers.clear(worker)

    def _adopt_or_spawn(self, worker: Worker, deadline_ns: int) -> None:
        """Wait while a worker of an earlier gateway lives in this place; else start one."""
        if worker.state is not State.ABSENT:
            return
        lock = LockFile(self._folder / f"worker-{worker.index}.lock")
        if not lock.take() and now_ns() < deadline_ns:
            self._timers.set(worker, ADOPTION_TURN_S, self._adopt_or_spawn, worker, deadline_ns)
            return
        lock.release()
        self._happened(worker, Event.SPAWN_DUE)

    def _on_exit(self, worker: Worker, child: Child, pidfd: int) -> None:
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        is_current = worker.reap(child)
        end = worker.last_end
        assert end is not None
        if end.code:
            log.warning("worker process %d ended %s%s", child.pid, end, end.explanation)
        self._ended(worker, end)
        if not is_current:
            return
        if not worker.has_been_ready and worker.starts >= BOOT_STARTS_MAX:
            self.boot_error = NotReady(
                f"worker {worker.index} ended {worker.starts} times before it was ready, "
                f"the last time {end}{end.explanation}"
            )
        self._happened(worker, Event.EXITED)
