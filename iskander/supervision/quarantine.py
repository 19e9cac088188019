"""Quarantine of models whose batches end workers: first a worker of their own, then refusal.

A worker that dies, or hangs and is ended, while it runs a batch of a model is counted for that
model. Above a rate the model leaves the workers that others share and gets one of its own; above
the same rate there, its requests are refused by name for a time that doubles. Other models keep
their workers. A new version of the model's files begins without any of that.

The first of several gateway processes decides, since it starts the workers; the others follow when
the isolated worker attaches to them.

Runs on: gateway loop; `DeathRate` is pure.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from iskander.clock import NS_PER_S, now_ns
from iskander.config.schema import WorkersConfig
from iskander.control.messages import Hello
from iskander.errors import IskanderError
from iskander.memory.heartbeat import model_digest
from iskander.scheduling.lane import Lane, Quarantine
from iskander.supervision.lifecycle import Event, State
from iskander.supervision.model_loader import ModelLoader
from iskander.supervision.worker import ProcessExit, Worker
from iskander.transport.machine_memory import oom_kills

log = logging.getLogger("iskander.supervisor")

ISOLATED_MAX: Final = 4
"""Models with an isolated worker at once; more are refused without one."""
QUARANTINE_MAX_S: Final = 3600.0
TICK_S: Final = 1.0
"""Between two checks for isolated workers whose model is gone."""


class DeathRate:
    """Worker deaths of one model in a sliding window.

    Args:
        limit: Deaths that are too many.
        window_ns: Over which they are counted.

    Attributes:
        quarantines: In a row, without a window free of deaths between them.
    """

    def __init__(self, limit: int, window_ns: int) -> None:
        self._limit = limit
        self._window_ns = window_ns
        self._deaths: deque[int] = deque(maxlen=limit)
        self._released_ns = 0
        self.quarantines = 0

    def note(self, at_ns: int) -> bool:
        """Count a death; return whether there are too many. After a quarantine one is enough."""
        if self.quarantines and at_ns - self._released_ns > self._window_ns:
            self.quarantines = 0
        self._deaths.append(at_ns)
        while at_ns - self._deaths[0] > self._window_ns:
            self._deaths.popleft()
        if len(self._deaths) < self._limit and not self.quarantines:
            return False
        self._deaths.clear()
        return True

    def begin_quarantine(self, first_s: float) -> float:
        """Count a quarantine; return its seconds."""
        self.quarantines += 1
        return min(first_s * 2.0 ** min(self.quarantines - 1, 16), QUARANTINE_MAX_S)

    def release(self, at_ns: int) -> None:
        """The quarantine is over."""
        self._released_ns = at_ns


class Suspect(NamedTuple):
    """The model whose batch a worker ran when it was lost."""

    lane: Lane
    was_hung: bool


class Quarantines:
    """Counts deaths and isolates or refuses models.

    Args:
        lanes: By the key of their model.
        workers: Every place of the plan; isolated ones are added and removed.
        settings: Of the workers.
        is_first: This gateway process starts the workers.
        loading: Gives workers their models.
        refuse_queued: Called with a lane and the error for all that waits in it.
        happened: Called with an event of an isolated worker.
        on_change: Called when what is ready may have changed.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        workers: list[Worker],
        settings: WorkersConfig,
        *,
        is_first: bool,
        loading: ModelLoader,
        refuse_queued: Callable[[Lane, IskanderError], None],
        happened: Callable[[Worker, Event], None],
        on_change: Callable[[], None],
    ) -> None:
        self._lanes = lanes
        self._workers = workers
        self._settings = settings
        self._is_first = is_first
        self._loading = loading
        self._refuse_queued = refuse_queued
        self._happened = happened
        self._on_change = on_change
        self._planned = len(workers)
        self._rates: dict[int, DeathRate] = {}
        self._suspects: dict[int, Suspect] = {}
        self._isolated: dict[int, Worker] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._tick_timer: asyncio.TimerHandle | None = None
        self._oom_kills = oom_kills()

    def suspect(self, worker: Worker) -> None:
        """Note the model that a lost worker was running, while its heartbeat can be read."""
        lane = self._running(worker)
        if lane is None or not self._settings.model_deaths:
            return
        # A process that an operator has stopped hangs by no fault of a model.
        was_hung = worker.is_hung and not worker.was_stopped
        if worker.is_hung and not was_hung:
            return
        self._suspects[worker.index] = Suspect(lane, was_hung)
        if worker.child is None:
            self.on_end(worker, ProcessExit(None, was_killed=False))

    def on_end(self, worker: Worker, end: ProcessExit) -> None:
        """Count the end of a process for the model that it was running."""
        suspect = self._suspects.pop(worker.index, None)
        if suspect is None:
            return
        kills, self._oom_kills = self._oom_kills, oom_kills()
        is_out_of_memory = self._oom_kills > kills
        if end.is_own_doing(was_hung=suspect.was_hung, was_out_of_memory=is_out_of_memory):
            self._on_death(suspect.lane, worker)

    def follow(self, hello: Hello) -> None:
        """Isolate a model for which the first gateway process has started a worker."""
        if self._is_first or not hello.pool or hello.index is None:
            return
        if any(worker.place.pool == hello.pool for worker in self._workers):
            return
        for lane in self._lanes.values():
            if lane.is_served and lane.title == hello.pool and not lane.model.pool:
                self._isolate(lane, hello.index, hello.cpus)
                return

    def close(self) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._tick_timer is not None:
            self._tick_timer.cancel()

    def _running(self, worker: Worker) -> Lane | None:
        """The lane of the batch that a worker runs, maybe for another gateway process."""
        batch_id = worker.last_beat().batch_id
        if batch_id > 0:
            flight = worker.in_flight.get(batch_id)
            return flight.lane if flight is not None else None
        for lane in self._lanes.values() if batch_id else ():
            if lane.is_served and model_digest(lane.model.name, lane.model.version) == -batch_id:
                return lane
        return None

    def _on_death(self, lane: Lane, worker: Worker) -> None:
        settings = self._settings
        lane.counts["worker_deaths"] += 1
        for key in self._rates.keys() - self._lanes.keys():
            del self._rates[key]
        rate = self._rates.get(lane.model.key)
        if rate is None:
            window_ns = int(settings.model_deaths_s * NS_PER_S)
            rate = self._rates[lane.model.key] = DeathRate(settings.model_deaths, window_ns)
        if lane.quarantine is not None or lane.is_over or not rate.note(now_ns()):
            return
        can_isolate = settings.spawn and len(self._isolated) < ISOLATED_MAX
        if lane.model.pool or not can_isolate:
            self._refuse(lane, rate)
        elif self._is_first:
            index = max(self._planned, *(each.index + 1 for each in self._workers))
            self._isolate(lane, index, worker.place.cpus)

    def _isolate(self, lane: Lane, index: int, cpus: tuple[int, ...]) -> None:
        """Move a model from the shared workers to one of its own."""
        log.error(
            "model %s moves to a worker of its own: its batches ended %d workers within %g s "
            "(workers.model_deaths)",
            lane.title,
            self._settings.model_deaths,
            self._settings.model_deaths_s,
        )
        lane.model = msgspec.structs.replace(lane.model, pool=lane.title)
        lane.is_isolated = True
        lane.quorum = 1
        self._loading.unload(lane)
        shared = next(each.place for each in self._workers if not each.place.pool)
        place = msgspec.structs.replace(
            shared, index=index, cpus=cpus or shared.cpus, pool=lane.title
        )
        worker = Worker(place, is_ours=self._is_first)
        worker.is_awaited = True
        self._workers.append(worker)
        self._isolated[lane.model.key] = worker
        if self._is_first:
            self._happened(worker, Event.SPAWN_DUE)
        if self._tick_timer is None:
            self._tick()

    def _refuse(self, lane: Lane, rate: DeathRate) -> None:
        """Refuse a model's requests for a while."""
        key, settings = lane.model.key, self._settings
        pause_s = rate.begin_quarantine(settings.quarantine_s)
        reason = f"its batches ended workers again and again, the last within {pause_s:g} s"
        if rate.quarantines == 1:
            reason = (
                f"its batches ended {settings.model_deaths} workers within "
                f"{settings.model_deaths_s:g} s"
            )
        log.error("requests for model %s are refused for %g s: %s", lane.title, pause_s, reason)
        lane.quarantine = Quarantine(reason, int(pause_s * 1000))
        lane.counts["quarantines"] += 1
        self._refuse_queued(lane, lane.quarantine_error())
        loop = asyncio.get_running_loop()
        self._timers[key] = loop.call_later(pause_s, self._release, lane, rate)
        self._on_change()

    def _release(self, lane: Lane, rate: DeathRate) -> None:
        log.warning("requests for model %s are accepted again", lane.title)
        self._timers.pop(lane.model.key, None)
        lane.quarantine = None
        rate.release(now_ns())
        self._on_change()

    def _tick(self) -> None:
        """Remove isolated workers whose model is gone, or whose first gateway has let them go."""
        self._tick_timer = None
        for key, worker in list(self._isolated.items()):
            if key not in self._lanes and worker.state is not State.STOPPED and self._is_first:
                self._happened(worker, Event.STOP)
            is_gone = worker.state is State.STOPPED and worker.child is None
            if is_gone or (not self._is_first and self._has_left(worker)):
                del self._isolated[key]
                self._workers.remove(worker)
                self._share(self._lanes.get(key))
        if self._isolated:
            self._tick_timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    @staticmethod
    def _has_left(worker: Worker) -> bool:
        """Whether the worker of another gateway process left in order."""
        return worker.state is State.ABSENT and worker.ends["replaced"] > 0

    def _share(self, lane: Lane | None) -> None:
        """Give a model back to the shared workers."""
        if lane is not None and lane.is_isolated:
            lane.model = msgspec.structs.replace(lane.model, pool="")
            lane.is_isolated = False
            self._loading.ask_all()
