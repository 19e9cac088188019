"""Quarantine of models whose batches end workers: isolation, then rejection.

The death or hang of a worker counts for the model of its running batch. At the first one the model
moves from the shared workers to one of its own, which runs the batch's requests again; the shared
worker restarts without it. Until the exit of the worker is known, the model's requests are held.
After a time without deaths the model returns. After `workers.model_deaths` deaths of its own
worker, its requests are rejected for a time that doubles. Deaths by requests of one source count
once there, because requests of that source are rejected for a pause (`scheduling.offenders`). New
model files reset the counts.

The first of several gateway processes decides, because it starts the workers. The others follow
when the isolated worker attaches to them.

Runs on: gateway loop; `DeathRate` is pure.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from iskander.config.schema import WorkersConfig
from iskander.errors import IskanderError
from iskander.foundation.backoff import backoff
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import models as log
from iskander.foundation.machine_memory import oom_kills
from iskander.gateway.scheduling.lanes.lane import Lane, Quarantine
from iskander.gateway.scheduling.lanes.offenders import Party
from iskander.gateway.supervision.lifecycle import ENDING, Event, State
from iskander.gateway.supervision.loading.model_loader import ModelLoader
from iskander.gateway.supervision.worker import ProcessExit, Worker
from iskander.interprocess.control.messages import Hello
from iskander.interprocess.memory.heartbeat import model_digest

ISOLATED_MAX: Final = 4
"""Limit of isolated workers; further models are quarantined without one."""
QUARANTINE_MAX_S: Final = 3600.0
TICK_S: Final = 1.0
"""Interval of checks for isolated workers whose model is gone, or may return."""
RETURN_DOUBLINGS_MAX: Final = 8
"""Limit of the doublings of the time without deaths after which a model returns."""
HOLD_S: Final = 2.0
"""Longest time for which a model's requests are held, if no exit or isolated worker is seen."""
FOREIGN: Final = "another gateway process"
"""Party of the batches of other gateway processes."""


class _Suspicion(NamedTuple):
    """The model of a batch that ran when its worker ended, and who sent the batch."""

    lane: Lane
    was_hung: bool
    party: Party | None


class DeathRate:
    """Worker deaths of one model in a sliding window, and its consecutive quarantines.

    The owner sets `released_ns` at the end of a quarantine.

    Attributes:
        isolations: Times that the model was moved to a worker of its own.
        can_isolate: False after an isolated worker could not load the model.
        last_ns: Time of the last death.
    """

    def __init__(self, limit: int, window_ns: int) -> None:
        self._limit = limit
        self._window_ns = window_ns
        # Time and party of each death; a death without a party counts by itself.
        self._deaths: deque[tuple[int, Party | None]] = deque(maxlen=limit)
        self.released_ns = self.last_ns = 0
        self.quarantines = self.isolations = 0
        self.can_isolate = True

    def set_limit(self, limit: int, window_ns: int) -> None:
        """Change the limit; counted deaths within the window stay."""
        self._limit, self._window_ns = limit, window_ns
        self._deaths = deque(self._deaths, maxlen=limit)

    def note(self, at_ns: int, party: Party | None = None) -> bool:
        """Count a death; return whether the limit is reached. After a quarantine it is 1.

        Deaths by requests of one party count as one.
        """
        if self.quarantines and at_ns - self.released_ns > self._window_ns:
            self.quarantines = 0
        if party is not None:
            others = (each for each in self._deaths if each[1] != party)
            self._deaths = deque(others, maxlen=self._limit)
        self._deaths.append((at_ns, party))
        while at_ns - self._deaths[0][0] > self._window_ns:
            self._deaths.popleft()
        if len(self._deaths) < self._limit and not self.quarantines:
            return False
        self._deaths.clear()
        return True

    def may_return(self, now_ns: int) -> bool:
        """Whether an isolated model may return, after a time without deaths.

        The time is one window at the first isolation, two at the second, then four, and so on.
        """
        longest_ns = self._window_ns << RETURN_DOUBLINGS_MAX
        quiet_ns = backoff(self.isolations, self._window_ns, longest_ns)
        return now_ns - self.last_ns > quiet_ns

    def begin_quarantine(self, first_s: float) -> float:
        """Count a quarantine; return its duration in seconds."""
        self.quarantines += 1
        return backoff(self.quarantines, first_s, QUARANTINE_MAX_S)


@dataclass(eq=False, repr=False)
class Quarantines:
    """Counts deaths and isolates or quarantines models.

    Attributes:
        workers: All worker slots; slots of isolated workers are added and removed.
        is_first: This gateway process starts the workers.
        on_change: Called when readiness may have changed.
        on_release: Called when held requests may be sent.
    """

    lanes: Mapping[int, Lane]
    workers: list[Worker]
    settings: WorkersConfig
    is_first: bool
    loader: ModelLoader
    reject_queued: Callable[[Lane, IskanderError], None]
    on_event: Callable[[Worker, Event], None]
    on_change: Callable[[], None]
    on_release: Callable[[], None]

    def __post_init__(self) -> None:
        self._planned = len(self.workers)
        self._rates: dict[int, DeathRate] = {}
        self._suspected: dict[int, _Suspicion] = {}
        self._isolated: dict[int, Worker] = {}
        self._quorums: dict[int, int] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._holds: dict[int, asyncio.TimerHandle] = {}
        self._tick_timer: asyncio.TimerHandle | None = None
        self._oom_kills = oom_kills()

    def configure(self, settings: WorkersConfig) -> None:
        """Apply the limits; a quarantine in progress keeps its duration."""
        self.settings = settings
        for rate in self._rates.values():
            rate.set_limit(settings.model_deaths, int(settings.model_deaths_s * NS_PER_S))
        if not settings.model_deaths:
            self._suspected.clear()

    def record_running_model(self, worker: Worker) -> None:
        """Record the model that a lost worker was running; its heartbeat must still be mapped.

        The model's requests are held, so that no other shared worker runs the same batch.
        """
        lane = self._running_lane(worker)
        # A hang caused by SIGSTOP is not a fault of the model.
        was_paused = worker.is_hung and worker.was_stopped
        if lane is None or not self.settings.model_deaths or was_paused:
            return
        self._suspected[worker.index] = _Suspicion(lane, worker.is_hung, _party_of(worker))
        worker.ended_in_batch = True
        if self.settings.spawn and not lane.model.pool:
            self._hold(lane)
        if worker.child is None:
            self.on_exit(worker, ProcessExit(None, was_killed=False))

    def on_exit(self, worker: Worker, end: ProcessExit) -> None:
        """Count a process exit for the model that the process was running."""
        if worker.index not in self._suspected:
            return
        lane, was_hung, party = self._suspected.pop(worker.index)
        kills, self._oom_kills = self._oom_kills, oom_kills()
        is_fault = end.is_model_fault(was_hung=was_hung, was_out_of_memory=self._oom_kills > kills)
        if is_fault:
            self._on_death(lane, worker, party)
        elif worker.ended_in_batch:
            worker.failures += 1  # Not explained by the batch: it counts for a crash loop.
        if self.is_first or not is_fault:
            self._end_hold(lane)

    def follow_isolation(self, hello: Hello) -> None:
        """Isolate a model for which the first gateway process has started a worker."""
        if self.is_first or not hello.pool or hello.index is None:
            return
        if any(worker.plan.pool == hello.pool for worker in self.workers):
            return
        for lane in self.lanes.values():
            if lane.is_served and lane.title == hello.pool and not lane.model.pool:
                self._isolate(lane, hello.index, hello.cpus)
                self._end_hold(lane)
                return

    def close(self) -> None:
        """Cancel all timers."""
        for timer in (*self._timers.values(), *self._holds.values()):
            timer.cancel()
        self._timers.clear()
        self._holds.clear()
        if self._tick_timer is not None:
            self._tick_timer.cancel()

    def _running_lane(self, worker: Worker) -> Lane | None:
        """Return the lane of a worker's running batch, possibly of another gateway process."""
        batch_id = worker.last_beat().batch_id
        if batch_id > 0:
            batch = worker.in_flight.get(batch_id)
            return batch.lane if batch is not None else None
        for lane in self.lanes.values() if batch_id else ():
            if lane.is_served and model_digest(lane.model.name, lane.model.version) == -batch_id:
                return lane
        return None

    def _on_death(self, lane: Lane, worker: Worker, party: Party | None) -> None:
        """Count a death, and isolate or quarantine the model if necessary."""
        settings = self.settings
        lane.counts["worker_deaths"] += 1
        for key in self._rates.keys() - self.lanes.keys():
            del self._rates[key]
        new = DeathRate(settings.model_deaths, int(settings.model_deaths_s * NS_PER_S))
        rate = self._rates.setdefault(lane.model.key, new)
        rate.last_ns = now_ns()
        if lane.quarantine is not None or lane.is_retired:
            return
        has_room = len(self._isolated) < ISOLATED_MAX or lane.model.key in self._isolated
        can_isolate = settings.spawn and rate.can_isolate and has_room
        if lane.model.pool:
            if rate.note(rate.last_ns, party):
                self._quarantine(lane, rate)
        elif not can_isolate:
            # The model ends workers that serve other models too: its first death is enough. A
            # gateway that starts no workers counts deaths without parties up to the limit.
            if rate.note(rate.last_ns) or settings.spawn:
                self._quarantine(lane, rate)
        elif self.is_first:
            rate.isolations += 1
            self._isolate(lane, self._next_index(), worker.plan.cpus)

    def _next_index(self) -> int:
        return max((self._planned, *(each.index + 1 for each in self.workers)))

    def _hold(self, lane: Lane) -> None:
        """Send no batch of a model until the exit of its worker is known, at most for `HOLD_S`."""
        lane.is_held = True
        key = lane.model.key
        if key in self._holds:
            self._holds.pop(key).cancel()
        self._holds[key] = asyncio.get_running_loop().call_later(HOLD_S, self._end_hold, lane)

    def _end_hold(self, lane: Lane) -> None:
        timer = self._holds.pop(lane.model.key, None)
        if timer is not None:
            timer.cancel()
        if lane.is_held:
            lane.is_held = False
            self.on_release()

    def _isolate(self, lane: Lane, index: int, cpus: tuple[int, ...]) -> None:
        """Move a model from the shared workers to one of its own."""
        log.model_isolated(model=lane.title)
        lane.model = msgspec.structs.replace(lane.model, pool=lane.title)
        lane.is_isolated = True
        self._quorums.setdefault(lane.model.key, lane.quorum)
        lane.quorum = 1
        self.loader.unload(lane)
        if lane.model.key in self._isolated:
            # Its worker was about to stop, because the model had returned. If it stops already,
            # `_tick` starts another one.
            self.loader.load_missing()
            return
        self._start_isolated(lane, index, cpus)

    def _start_isolated(self, lane: Lane, index: int, cpus: tuple[int, ...]) -> None:
        """Add a worker slot for an isolated model; the first gateway process starts it."""
        plans = [w.plan for w in self.workers if not w.plan.pool and w.device in lane.model.devices]
        shared = next((each for each in plans if each.cpus == cpus), plans[0])
        cpus = cpus or shared.cpus
        plan = msgspec.structs.replace(shared, index=index, cpus=cpus, pool=lane.title)
        worker = Worker(plan, is_ours=self.is_first)
        worker.is_replacement_pending = True
        self.workers.append(worker)
        self._isolated[lane.model.key] = worker
        if self.is_first:
            self.on_event(worker, Event.SPAWN_DUE)
        if self._tick_timer is None:
            self._tick()

    def _quarantine(self, lane: Lane, rate: DeathRate) -> None:
        """Reject a model's requests for a time that doubles with each quarantine."""
        settings = self.settings
        pause_s = rate.begin_quarantine(settings.quarantine_s)
        reason = f"its batches ended workers repeatedly, the last within {pause_s:g} s"
        if rate.quarantines == 1:
            deaths, window_s = settings.model_deaths, settings.model_deaths_s
            reason = f"its batches ended {deaths} workers within {window_s:g} s"
        log.model_quarantined(model=lane.title, pause_s=pause_s, reason=reason)
        lane.quarantine = Quarantine(reason, int(pause_s * 1000))
        lane.counts["quarantines"] += 1
        self.reject_queued(lane, lane.quarantine_error())
        timer = asyncio.get_running_loop().call_later(pause_s, self._end_quarantine, lane, rate)
        self._timers[lane.model.key] = timer
        self.on_change()

    def _end_quarantine(self, lane: Lane, rate: DeathRate) -> None:
        log.model_quarantine_ended(model=lane.title)
        self._timers.pop(lane.model.key, None)
        lane.quarantine = None
        rate.released_ns = now_ns()
        self.on_change()

    def _tick(self) -> None:
        """Remove isolated workers whose model is gone, or that the first gateway drained."""
        self._tick_timer = None
        for key, worker in list(self._isolated.items()):
            self._consider_return(key, worker)
            if key not in self.lanes and worker.state is not State.STOPPED and self.is_first:
                self.on_event(worker, Event.STOP)
            is_gone = worker.state is State.STOPPED and worker.child is None
            was_drained = worker.state is State.ABSENT and worker.exit_counts["replaced"] > 0
            if is_gone or (was_drained and not self.is_first):
                del self._isolated[key]
                self.workers.remove(worker)
                lane = self.lanes.get(key)
                if lane is not None and lane.is_isolated and self._is_running:
                    self._start_isolated(lane, self._next_index(), worker.plan.cpus)
                else:
                    self._return_to_shared(lane)
        if self._isolated:
            self._tick_timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _consider_return(self, key: int, isolated: Worker) -> None:
        """Return a model after a time without deaths.

        Its own worker serves it until a shared worker does.
        """
        lane, rate = self.lanes.get(key), self._rates.get(key)
        if not self.is_first or lane is None or rate is None:
            return
        if lane.is_isolated and key in isolated.load_errors:
            # Its own worker cannot load it, such as on a GPU without memory for a second copy.
            rate.can_isolate = False
            self._return_to_shared(lane)
        if lane.is_isolated and lane.quarantine is None and rate.may_return(now_ns()):
            log.model_returned(model=lane.title)
            self._return_to_shared(lane)
        if not lane.is_isolated and any(each is not isolated for each in lane.workers.values()):
            self.on_event(isolated, Event.STOP)

    @property
    def _is_running(self) -> bool:
        """Whether this gateway process starts workers now, and is not being stopped."""
        return self.is_first and any(worker.state not in ENDING for worker in self.workers)

    def _return_to_shared(self, lane: Lane | None) -> None:
        """Move a model back to the shared workers."""
        if lane is not None and lane.is_isolated:
            lane.model = msgspec.structs.replace(lane.model, pool="")
            lane.is_isolated = False
            lane.quorum = self._quorums.pop(lane.model.key, lane.quorum)
            self.loader.load_missing()


def _party_of(worker: Worker) -> Party | None:
    """Return the party that sent the running batch of a worker; None for rows of several parties.

    All batches of another gateway process have one party, because that process counts them too.
    """
    batch = worker.in_flight.get(worker.last_beat().batch_id)
    if batch is None:
        return FOREIGN
    parties = {part.request.terms.source.party for part in batch.parts}
    return parties.pop() if len(parties) == 1 else None
