"""Observer process of a gateway process: start, restart, hang detection, and end.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

from iskander.clock import NS_PER_S, now_ns
from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.logs import observation as log
from iskander.observation.link import Link
from iskander.observation.messages import start_of
from iskander.observation.sampler import Sampler
from iskander.scheduling.input_arena import InputArena
from iskander.supervision.lifecycle import backoff_s
from iskander.supervision.worker import Child, start_process

TICK_S: Final = 1.0
HANG_NS: Final = 60 * NS_PER_S
"""Time without a report, which a running process sends every second."""
STEADY_NS: Final = 60 * NS_PER_S
"""Run time after which an exit is not one of a series."""
SETTLE_S: Final = 1.0
SETTLE_TURN_S: Final = 0.01
STOP_S: Final = 10.0
"""Timeout for the last files at shutdown; an object store keeps the rest for the next start."""

Report = dict[str, dict[str, Any]]


class ObserverProcess:
    """The process, and the sampler that feeds it. The loop never waits for it.

    Attributes:
        sampler: Hooks for the dispatcher.
        last_report: Last report of each consumer by name; empty before the first one.
        starts: Started processes.
    """

    def __init__(
        self,
        config: Config,
        input_arena: InputArena,
        settings_of: Callable[[str, str], ModelConfig | None],
    ) -> None:
        self.sampler = Sampler(config.observation, input_arena, settings_of)
        self.sampler.on_report = self._on_report
        self.last_report: Report = {}
        self.starts = 0
        self._config = config
        self._process = 0
        self._counts: dict[str, dict[str, int]] = {}  # Of the processes that have ended.
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._pidfd = -1
        self._link: Link | None = None
        self._failures = 0
        self._started_ns = self._reported_ns = 0
        self._is_stopping = False
        self._ended = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self, process: int) -> None:
        """Start the observer of a gateway process with this number."""
        self._process = process
        self._launch()
        self._tick()

    async def settle(self) -> None:
        """Wait until the last samples are copied, before the workers and their arenas end."""
        deadline_ns = now_ns() + int(SETTLE_S * NS_PER_S)
        while len(self.sampler.holds) and self._link is not None and now_ns() < deadline_ns:
            await asyncio.sleep(SETTLE_TURN_S)

    async def stop(self) -> None:
        """Send the last samples, and let the process complete its files; kill it after `STOP_S`."""
        self._is_stopping = True
        for timer in self._timers.values():
            timer.cancel()
        if self._link is None or self._child is None:
            return
        self.sampler.flush()
        self._link.end()
        try:
            async with asyncio.timeout(STOP_S):
                await self._ended.wait()
        except TimeoutError:
            log.observer_killed(stop_s=STOP_S)
            self._child.kill()
            await self._ended.wait()

    def count(self, consumer: str, name: str) -> int:
        """Return a counter of a consumer's report, over all processes so far."""
        ended = self._counts.get(consumer, {}).get(name, 0)
        current = self.last_report.get(consumer, {}).get("counts", {}).get(name, 0)
        return ended + int(current)

    def counts(self, consumer: str) -> dict[str, int]:
        """Return all counters of a consumer."""
        names = self._counts.get(consumer, {}).keys()
        names |= self.last_report.get(consumer, {}).get("counts", {}).keys()
        return {name: self.count(consumer, name) for name in sorted(names)}

    def stats(self) -> dict[str, Any]:
        """Return the state for `stats`."""
        holds = self.sampler.holds
        return {
            "pid": 0 if self._child is None else self._child.pid,
            "starts": self.starts,
            "held_requests": len(holds),
            "held_bytes": holds.bytes,
            "samples": dict(self.sampler.counts),
            "report": self.last_report,
        }

    def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(os.environ, ARROW_DEFAULT_MEMORY_POOL="system", OMP_NUM_THREADS="1")
        environment.pop("NOTIFY_SOCKET", None)
        command = [sys.executable, "-P", "-m", "iskander.observer"]
        try:
            self._child, self._pidfd = start_process(command, environment, theirs.fileno())
        except OSError as error:
            ours.close()
            log.observer_not_started(reason=error.strerror or str(error))
            self._launch_later()
        else:
            self.starts += 1
            self._started_ns = self._reported_ns = now_ns()
            self._ended.clear()
            self._link = Link(ours)
            self._link.send(start_of(self._config, self._process))
            self.sampler.connect(self._link)
            self._loop.add_reader(self._pidfd, self._on_exit)
        finally:
            theirs.close()

    def _launch_later(self) -> None:
        self._failures += 1
        delay_s = backoff_s(self._failures)
        self._timers["launch"] = self._loop.call_later(delay_s, self._launch)

    def _on_exit(self) -> None:
        assert self._child is not None and self._link is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self._child.wait()
        self.sampler.disconnect()
        self._link.close()
        self._child = self._link = None
        for consumer in self.last_report:
            self._counts[consumer] = self.counts(consumer)
        self.last_report = {}
        self._ended.set()
        if self._is_stopping:
            return
        if now_ns() - self._started_ns > STEADY_NS:
            self._failures = 0
        log.observer_ended(exit_code=code)
        self._launch_later()

    def _tick(self) -> None:
        self.sampler.tick()
        if self._child is not None and now_ns() - self._reported_ns > HANG_NS:
            log.observer_hung(silent_s=HANG_NS // NS_PER_S)
            self._reported_ns = now_ns()
            self._child.kill()
        self._timers["tick"] = self._loop.call_later(TICK_S, self._tick)

    def _on_report(self, values: Report) -> None:
        self._reported_ns = now_ns()
        for consumer, report in values.items():
            before = self.last_report.get(consumer, {}).get("failure", "")
            failure = report.get("failure", "")
            if failure and not before:
                log.consumer_failing(consumer=consumer, reason=failure)
            elif before and not failure:
                log.consumer_recovered(consumer=consumer)
        self.last_report = values
