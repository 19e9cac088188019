"""Observer process of a gateway process: start, restart, hang detection, and end.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, Final

from iskander.config.models import ModelConfig
from iskander.config.schema import Config
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import observation as log
from iskander.gateway.observation.link import Link
from iskander.gateway.observation.messages import start_of
from iskander.gateway.observation.sampler import Sampler
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.supervision.auxiliary_process import AuxiliaryProcess

TICK_S: Final = 1.0
HANG_S: Final = 60
"""Time without a report, which a running process sends every second."""
STEADY_NS: Final = 60 * NS_PER_S
"""Run time after which a series of failures has ended."""
SETTLE_S: Final = 1.0
SETTLE_TURN_S: Final = 0.01
STOP_S: Final = 10.0
"""Timeout for the last files at shutdown; an object store keeps the rest for the next start."""
CONSUMERS_MAX: Final = 8
"""Consumers whose reports are kept; there are fewer."""

Report = dict[str, dict[str, Any]]


class ObserverProcess:
    """The process, and the sampler that feeds it. The loop never waits for it.

    Attributes:
        sampler: Hooks for the dispatcher.
        last_report: Last report of each consumer by name; empty before the first one.
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
        self._config = config
        self._number = 0
        self._counts: dict[str, dict[str, int]] = {}  # Of the processes that have ended.
        self._loop = asyncio.get_running_loop()
        self._process = AuxiliaryProcess(
            "iskander.sampling",
            self._on_start,
            self._on_exit,
            lambda reason: log.observer_not_started(reason=reason),
            kind=socket.SOCK_SEQPACKET,
            ARROW_DEFAULT_MEMORY_POOL="system",
            OMP_NUM_THREADS="1",
        )
        self._link: Link | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def starts(self) -> int:
        """Started processes."""
        return self._process.starts

    def start(self, process: int) -> None:
        """Start the observer of a gateway process with this number."""
        self._number = process
        self._process.start()
        self._tick()

    async def settle(self) -> None:
        """Wait until the last samples are copied, before the workers and their arenas end."""
        deadline_ns = now_ns() + int(SETTLE_S * NS_PER_S)
        while len(self.sampler.holds) and self._link is not None and now_ns() < deadline_ns:
            await asyncio.sleep(SETTLE_TURN_S)

    async def stop(self) -> None:
        """Send the last samples, and let the process complete its files; kill it after `STOP_S`."""
        if self._timer is not None:
            self._timer.cancel()
        self.sampler.flush()
        if await self._process.stop(STOP_S):
            log.observer_killed(stop_s=STOP_S)

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
            "pid": self._process.pid,
            "starts": self.starts,
            "held_requests": len(holds),
            "held_bytes": holds.bytes,
            "samples": dict(self.sampler.counts),
            "report": self.last_report,
        }

    def _on_start(self, connection: socket.socket) -> None:
        self._process.expect_answer(HANG_S)
        self._link = Link(connection)
        self._link.send(start_of(self._config, self._number))
        self.sampler.connect(self._link)

    def _on_exit(self, code: int) -> None:
        self.sampler.disconnect()
        self._link = None
        for consumer in self.last_report:
            self._counts[consumer] = self.counts(consumer)
        self.last_report = {}
        if self._process.is_stopping:
            return
        if self._process.was_killed:
            log.observer_hung(silent_s=HANG_S)
        log.observer_ended(exit_code=code)

    def _tick(self) -> None:
        self.sampler.tick()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _on_report(self, values: Report) -> None:
        self._process.expect_answer(HANG_S)
        if now_ns() - self._process.started_ns > STEADY_NS:
            self._process.reset_backoff()
        for consumer, report in values.items():
            before = self.last_report.get(consumer, {}).get("failure", "")
            failure = report.get("failure", "")
            if failure and not before:
                log.consumer_failing(consumer=consumer, reason=failure)
            elif before and not failure:
                log.consumer_recovered(consumer=consumer)
        known = self.last_report | values
        self.last_report = dict(itertools.islice(known.items(), CONSUMERS_MAX))
