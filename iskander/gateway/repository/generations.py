"""Hot reload of model versions: load next to the serving generation, then replace it.

One worker loads a generation first, the others follow. When all serving workers
have it, they reach the quorum, and its files are unchanged, it replaces the serving generation,
which drains and unloads.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from iskander.config.models import LaneConfig
from iskander.config.schema import Config
from iskander.errors import IskanderError, LimitExceeded, ManifestError, ModelMoved, NotReady
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import models as log
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.repository.generation_lifecycle import Action, Event, Stage, step
from iskander.gateway.repository.models import Failure, Models
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.supervision.loading.model_loader import ACTIVE_STATES, ModelLoader
from iskander.gateway.supervision.worker import Worker
from iskander.interprocess.control.messages import ModelSpec

GENERATIONS_MAX = 4096
TURN_S = 0.02
COLLECT_S = 1.0
"""Delay of the garbage collection after unloads. The objects of a lane refer to each other: some
30 kB that Python may keep for hours. The collection does not scan objects of the startup."""
FILES_CHANGED = "its files changed during the load"


class Generation:
    """One generation of a model version.

    Attributes:
        since_ns: Start of its stage.
        loading_ns: Load time, without the time during which all its workers load other models.
        checked_with: Incarnations of the workers that had it at the last check of its files.
        is_current: Whether that check found the files unchanged.
        outcome: Completes when it serves, or fails with the reason.
    """

    def __init__(self, lane: Lane, stage: Stage) -> None:
        self.lane, self.stage = lane, stage
        self.model_version = lane.model.name, lane.model.version
        self.since_ns = self.updated_ns = now_ns()
        self.loading_ns = 0
        self.checked_with: frozenset[int] = frozenset()
        self.is_current = False
        self.error: IskanderError | None = None
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()


@dataclass(eq=False, repr=False)
class Generations:
    """All generations of the gateway; initially those of the configured models.

    `reject_queued` rejects the queued requests of a lane.
    """

    config: Config
    models: Models
    loading: ModelLoader
    reject_queued: Callable[[Lane, IskanderError], None]
    recent: RecentValues
    on_change: Callable[[], None]

    def __post_init__(self) -> None:
        self._load_ns = int(self.config.workers.start_s * NS_PER_S)
        lanes = self.models.by_key.items()
        self._all = {key: Generation(lane, Stage.SERVING) for key, lane in lanes}
        self._next_key = len(self._all)
        self._timer: asyncio.TimerHandle | None = None
        self._collection: asyncio.TimerHandle | None = None
        self._is_updating = False
        self._actions: dict[Action, Callable[[Generation], None]] = {
            Action.SERVE: self._serve,
            Action.REPORT_FAILURE: self._report_failure,
            Action.WITHDRAW: self._withdraw,
            Action.REJECT_QUEUED: self._reject_queued,
            Action.UNLOAD: self._unload,
        }

    def begin(
        self, spec: ModelSpec, config: LaneConfig, quorum: int, *, is_required: bool
    ) -> Generation:
        """Start to load a model version, with a new key; it will replace the serving generation."""
        if len(self._all) >= GENERATIONS_MAX:
            raise LimitExceeded(f"{len(self._all)} model versions exist, limit {GENERATIONS_MAX}")
        key, self._next_key = self._next_key, self._next_key + 1
        lane = Lane(msgspec.structs.replace(spec, key=key), config, quorum, self.recent)
        lane.is_served, lane.is_required = False, is_required
        for other in list(self._all.values()):
            if other.stage is Stage.LOADING and other.model_version == (spec.name, spec.version):
                other.error = ModelMoved(f"model `{lane.title}` changed again during its load")
                self._apply(other, Event.RETIRED)
        self.models.by_key[key] = lane
        self._all[key] = generation = Generation(lane, Stage.LOADING)
        log.generation_loading(generation=key, model=lane.title)
        self.loading.load_missing()
        self.update()
        return generation

    def retire(self, name: str, version: str) -> None:
        """Stop loading and serving a model version."""
        for generation in list(self._all.values()):
            is_active = generation.stage in (Stage.LOADING, Stage.SERVING)
            if is_active and generation.model_version == (name, version):
                generation.error = ModelMoved(f"model `{name}/{version}` is no longer served")
                self._apply(generation, Event.RETIRED)
        self.update()

    def update(self) -> None:
        """Apply pending events; repeat every `TURN_S` while a generation loads or drains."""
        if self._is_updating:
            return
        self._is_updating = True
        try:
            self.loading.replace_overdue(self._load_ns)
            for generation in list(self._all.values()):
                if event := self._next_event(generation):
                    self._apply(generation, event)
        finally:
            self._is_updating = False
        is_busy = any(each.stage is not Stage.SERVING for each in self._all.values())
        if is_busy and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self._on_timer)

    def close(self) -> None:
        """Stop updates."""
        for timer in (self._timer, self._collection):
            if timer is not None:
                timer.cancel()
        self._is_updating = True

    def _on_timer(self) -> None:
        self._timer = None
        self.update()

    def _next_event(self, generation: Generation) -> Event | None:
        lane, age_ns = generation.lane, now_ns() - generation.since_ns
        if generation.stage is Stage.LOADING:
            return self._event_of_load(generation, age_ns)
        if generation.stage is Stage.DRAINING:
            in_flight = (each for w in self.models.workers for each in w.in_flight.values())
            if lane.is_empty and not any(each.lane is lane for each in in_flight):
                return Event.DRAINED
            if age_ns > self.config.server.drain_s * NS_PER_S and lane.queue.requests:
                return Event.TIMED_OUT
        return None

    def _event_of_load(self, generation: Generation, age_ns: int) -> Event | None:
        lane = generation.lane
        if lane.refusal is not None:
            generation.error = lane.refusal
            return Event.LOAD_FAILED
        pool = lane.pool_workers(self.models.workers)
        if not pool:
            kinds = " or ".join(lane.model.devices)
            text = f"no worker can load it: it runs on {kinds}, and no group of that kind is in"
            generation.error = ManifestError(f"{text} `workers.groups`")
            return Event.LOAD_FAILED
        serving = [w for w in pool if w.state is State.READY]
        holders = [w for w in serving if lane.model.key in w.models]
        self._measure_load(generation, pool)
        if len(holders) >= lane.quorum:
            if len(holders) == len(serving) or age_ns > self._load_ns:
                return self._event_of_loaded(generation, holders)
        elif generation.loading_ns > self._load_ns:
            generation.error = NotReady(
                f"load timeout: {len(holders)} of {lane.quorum} workers loaded it in "
                f"{self._load_ns // NS_PER_S} s (`workers.start_s`)"
            )
            return Event.TIMED_OUT
        return None

    def _event_of_loaded(self, generation: Generation, holders: list[Worker]) -> Event | None:
        """Accept the generation after a check of its files that follows the last load."""
        incarnations = frozenset(worker.incarnation for worker in holders)
        if generation.checked_with != incarnations:
            generation.checked_with, generation.is_current = incarnations, False

            def on_checked(is_current: bool) -> None:
                if generation.checked_with == incarnations:
                    generation.is_current = is_current
                    if not is_current:
                        generation.lane.refusal = ManifestError(FILES_CHANGED)

            self.models.freshness.check(generation.lane, on_checked)
        return Event.LOADED if generation.is_current else None

    def _measure_load(self, generation: Generation, pool: list[Worker]) -> None:
        """Count load time, unless all workers that lack the model are loading other models."""
        key, now = generation.lane.model.key, now_ns()
        lacking = [w for w in pool if w.state in ACTIVE_STATES and key not in w.models]
        if not lacking or any(w.loading_key in (None, key) for w in lacking):
            generation.loading_ns += now - generation.updated_ns
        generation.updated_ns = now

    def _apply(self, generation: Generation, event: Event) -> None:
        before, lane = generation.stage, generation.lane
        generation.stage, actions = step(before, event)
        if generation.stage is not before:
            generation.since_ns = now_ns()
            log.generation_changed(
                generation=lane.model.key,
                model=lane.title,
                change=event,
                before=before,
                after=generation.stage,
            )
        for action in actions:
            self._actions[action](generation)
        if actions:
            self.on_change()

    def _serve(self, generation: Generation) -> None:
        older = self.models.serve(generation.lane)
        self.models.failures.pop(generation.model_version, None)
        self.models.counts["loaded"] += 1
        if not generation.outcome.done():
            generation.outcome.set_result(None)
        if older is not None:
            self._apply(self._all[older.model.key], Event.RETIRED)

    def _report_failure(self, generation: Generation) -> None:
        assert generation.error is not None
        error, models = generation.error, self.models
        if not isinstance(error, ModelMoved):
            models.counts["failed"] += 1
            models.failures[generation.model_version] = Failure(
                error.message, generation.lane.is_required
            )
            log.model_not_served(model=generation.lane.title, reason=error.message)
        if not generation.outcome.done():
            generation.outcome.set_exception(error)
            generation.outcome.exception()  # Marks it as retrieved: there may be no waiter.

    def _withdraw(self, generation: Generation) -> None:
        generation.lane.is_retired = True
        self.models.withdraw(generation.lane)
        self.models.counts["unloaded"] += 1

    def _reject_queued(self, generation: Generation) -> None:
        lane, drain_s = generation.lane, self.config.server.drain_s
        late = f"its queue did not drain in {drain_s:g} s (`server.drain_s`)"
        self.reject_queued(lane, ModelMoved(f"model `{lane.title}` was replaced; {late}"))

    def _unload(self, generation: Generation) -> None:
        lane = generation.lane
        lane.is_retired = True
        self.loading.unload(lane)
        del self.models.by_key[lane.model.key], self._all[lane.model.key]
        if self._collection is None:
            loop = asyncio.get_running_loop()
            self._collection = loop.call_later(COLLECT_S, self._collect)

    def _collect(self) -> None:
        self._collection = None
        gc.collect()
