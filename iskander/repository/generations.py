"""Model versions put in place of one another: loaded beside what is served, then found instead.

What happens next is decided by `stages`; here it is noticed and done. A generation is loaded by one
worker first, and by the others when that one has it. When all that serve have it, they are enough,
and its files are still those that it began with, it is what those who ask find; what it replaces
finishes what it accepted, and is given up.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from iskander.clock import NS_PER_S, now_ns
from iskander.config.models import LaneConfig
from iskander.control.messages import ModelSpec
from iskander.errors import IskanderError, LimitExceeded, ManifestError, ModelMoved, NotReady
from iskander.measurement.recent_values import RecentValues
from iskander.repository.generation_lifecycle import Action, Event, Stage, step
from iskander.repository.models import Failure, Models
from iskander.scheduling.lane import Lane
from iskander.supervision.lifecycle import State
from iskander.supervision.model_loader import AT_WORK, ModelLoader
from iskander.supervision.worker import Worker

log = logging.getLogger("iskander.repository")

GENERATIONS_MAX = 4096
TURN_S = 0.02
CHANGED_MEANWHILE = "its files were changed while it was loaded"


class Generation:
    """One.

    Attributes:
        since_ns: When its stage began.
        loading_ns: For how long it has been loaded, not counting the time behind other models.
        seen_with: Workers that had it when its files were looked at last, by incarnation.
        is_current: Whether that look has found what it began with.
        outcome: Done when it is served, or says why it is not.
    """

    def __init__(self, lane: Lane, stage: Stage) -> None:
        self.lane = lane
        self.stage = stage
        self.since_ns = self.looked_ns = now_ns()
        self.loading_ns = 0
        self.seen_with: frozenset[int] = frozenset()
        self.is_current = False
        self.error: IskanderError | None = None
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def which(self) -> tuple[str, str]:
        """Name and version."""
        return self.lane.model.name, self.lane.model.version


class Generations:
    """All that are.

    Args:
        models: What is served; of the configuration at first.
        loading: Gives workers their models.
        refuse_queued: Answers what waits in lanes with an error.
        load_s: How long a generation may take to be loaded, once workers come to it.
        drain_s: How long one that was replaced may keep requests waiting.
        recent: Where the last latencies are kept.
        on_change: Called when what is served has changed.
    """

    def __init__(
        self,
        models: Models,
        loading: ModelLoader,
        refuse_queued: Callable[[Lane, IskanderError], None],
        *,
        load_s: float,
        drain_s: float,
        recent: RecentValues,
        on_change: Callable[[], None],
    ) -> None:
        self._models = models
        self._loading = loading
        self._refuse_queued = refuse_queued
        self._load_ns, self._drain_ns = int(load_s * NS_PER_S), int(drain_s * NS_PER_S)
        self._recent = recent
        self._on_change = on_change
        self._all = {key: Generation(lane, Stage.SERVING) for key, lane in models.by_key.items()}
        self._next_key = len(self._all)
        self._timer: asyncio.TimerHandle | None = None
        self._is_looking = False
        self._actions: dict[Action, Callable[[Generation], None]] = {
            Action.PUT_IN_PLACE: self._put_in_place,
            Action.TELL: self._tell,
            Action.WITHDRAW: self._withdraw,
            Action.REFUSE_QUEUED: self._refuse_left,
            Action.UNLOAD: self._unload,
        }

    def begin(
        self, spec: ModelSpec, config: LaneConfig, quorum: int, *, is_required: bool
    ) -> Generation:
        """Load a model version, to be served in place of the one of its name and version.

        Args:
            spec: Its key is set here.
            config: Of its lane.
            quorum: Workers that it needs.
            is_required: The server is not ready until it is served.

        Raises:
            LimitExceeded: There are as many as there may be.
        """
        if len(self._all) >= GENERATIONS_MAX:
            raise LimitExceeded(f"{GENERATIONS_MAX} model versions are there, the limit")
        key, self._next_key = self._next_key, self._next_key + 1
        lane = Lane(msgspec.structs.replace(spec, key=key), config, quorum, self._recent)
        lane.is_served, lane.is_required = False, is_required
        for other in list(self._all.values()):
            if other.stage is Stage.LOADING and other.which == (spec.name, spec.version):
                other.error = ModelMoved(f"model `{lane.title}` changed again while it was loaded")
                self._happened(other, Event.RETIRED)
        self._models.by_key[key] = lane
        self._all[key] = generation = Generation(lane, Stage.LOADING)
        log.info("generation %d of %s is being loaded", key, lane.title)
        self._loading.ask_all()
        self.look()
        return generation

    def retire(self, name: str, version: str) -> bool:
        """Serve a model version no longer, nor load it; False where there is none."""
        found = [
            generation
            for generation in self._all.values()
            if generation.which == (name, version)
            and generation.stage in (Stage.LOADING, Stage.SERVING)
        ]
        for generation in found:
            generation.error = ModelMoved(f"model `{name}/{version}` is not to be served any more")
            self._happened(generation, Event.RETIRED)
        self.look()
        return bool(found)

    def look(self) -> None:
        """See what has happened to each; again soon, while one is on its way."""
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self._loading.replace_overdue(self._load_ns)
            for generation in list(self._all.values()):
                event = self._event(generation)
                if event is not None:
                    self._happened(generation, event)
        finally:
            self._is_looking = False
        is_busy = any(each.stage is not Stage.SERVING for each in self._all.values())
        if is_busy and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TURN_S, self._turn)

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._is_looking = True

    def _turn(self) -> None:
        self._timer = None
        self.look()

    def _event(self, generation: Generation) -> Event | None:
        lane, age_ns = generation.lane, now_ns() - generation.since_ns
        if generation.stage is Stage.LOADING:
            return self._event_of_load(generation, age_ns)
        if generation.stage is Stage.DRAINING:
            if lane.is_empty and not self._is_in_flight(lane):
                return Event.EMPTY
            if age_ns > self._drain_ns and lane.queue.requests:
                return Event.OVERDUE
        return None

    def _event_of_load(self, generation: Generation, age_ns: int) -> Event | None:
        lane = generation.lane
        if lane.refusal is not None:
            generation.error = lane.refusal
            return Event.REFUSED
        pool = lane.pool_of(self._models.workers)
        serving = [w for w in pool if w.state is State.READY]
        holders = [w for w in serving if lane.model.key in w.models]
        self._count(generation, pool)
        if len(holders) >= lane.quorum:
            if len(holders) == len(serving) or age_ns > self._load_ns:
                return self._event_of_loaded(generation, holders)
        elif generation.loading_ns > self._load_ns:
            generation.error = NotReady(
                f"{len(holders)} of {lane.quorum} workers had loaded it after "
                f"{self._load_ns // NS_PER_S} s"
            )
            return Event.OVERDUE
        return None

    def _event_of_loaded(self, generation: Generation, holders: list[Worker]) -> Event | None:
        """Accept what the holders have, once its files were looked at after the last had it."""
        held = frozenset(worker.incarnation for worker in holders)
        if generation.seen_with != held:
            generation.seen_with, generation.is_current = held, False

            def on_known(is_current: bool) -> None:
                if generation.seen_with == held:
                    generation.is_current = is_current
                    if not is_current:
                        generation.lane.refusal = ManifestError(CHANGED_MEANWHILE)

            self._models.freshness.ask(generation.lane, on_known)
        return Event.ACCEPTED if generation.is_current else None

    def _count(self, generation: Generation, pool: list[Worker]) -> None:
        """Let time pass for a load, unless all that are to do it are at other models' loads."""
        key, now = generation.lane.model.key, now_ns()
        lacking = [w for w in pool if w.state in AT_WORK and key not in w.models]
        is_behind = bool(lacking) and all(w.asked not in (None, key) for w in lacking)
        if not is_behind:
            generation.loading_ns += now - generation.looked_ns
        generation.looked_ns = now

    def _is_in_flight(self, lane: Lane) -> bool:
        return any(
            flight.lane is lane
            for worker in self._models.workers
            for flight in worker.in_flight.values()
        )

    def _happened(self, generation: Generation, event: Event) -> None:
        before = generation.stage
        generation.stage, actions = step(before, event)
        if generation.stage is not before:
            generation.since_ns = now_ns()
            lane = generation.lane
            log.info(
                "generation %d of %s: %s, was %s, is %s",
                lane.model.key,
                lane.title,
                event,
                before,
                generation.stage,
            )
        for action in actions:
            self._actions[action](generation)
        if actions:
            self._on_change()

    def _put_in_place(self, generation: Generation) -> None:
        lane = generation.lane
        older = self._models.serve(lane)
        self._models.failures.pop(generation.which, None)
        self._models.counts["loaded"] += 1
        if not generation.outcome.done():
            generation.outcome.set_result(None)
        if older is not None:
            self._happened(self._all[older.model.key], Event.RETIRED)

    def _tell(self, generation: Generation) -> None:
        assert generation.error is not None
        error, models = generation.error, self._models
        if not isinstance(error, ModelMoved):
            models.counts["failed"] += 1
            models.failures[generation.which] = Failure(error.message, generation.lane.is_required)
            log.error("%s is not served: %s", generation.lane.title, error.message)
        if not generation.outcome.done():
            generation.outcome.set_exception(error)
            generation.outcome.exception()  # Looked at, also where nobody waits for it.

    def _withdraw(self, generation: Generation) -> None:
        generation.lane.is_over = True
        self._models.withdraw(generation.lane)
        self._models.counts["unloaded"] += 1

    def _refuse_left(self, generation: Generation) -> None:
        title = generation.lane.title
        error = ModelMoved(f"model `{title}` was replaced, and its queue was not done in time")
        self._refuse_queued(generation.lane, error)

    def _unload(self, generation: Generation) -> None:
        lane = generation.lane
        lane.is_over = True
        self._loading.unload(lane)
        del self._models.by_key[lane.model.key], self._all[lane.model.key]
