"""Models for workers: each is asked for one after the other, and what it loads is taken if it fits.

The next one is asked for when the last is answered, so what is under way to a worker is never more
than a message. A worker that cannot load what others serve, or what is only to come, goes on with
the rest; one without a model of the configuration that nobody has is of no use, and is ended.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from iskander.clock import now_ns
from iskander.contract.tensors import Contract, require_room
from iskander.errors import IskanderError, ManifestError
from iskander.gateway.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.workers import Worker
from iskander.wire.messages import Load, Loaded, LoadFailed, Unload, Unloaded, encode

log = logging.getLogger("iskander.supervisor")

CHANGED = "its files were changed, and are not what is being served"


class Loading:
    """Gives workers their models.

    Args:
        lanes: By the key of their model.
        workers: Every place of the plan.
        output_bytes: That a worker's results may take.
        is_current: Whether a lane's files are still those that it was loaded from.
        happened: Told when a worker has all of them, or cannot have one.
        on_refused: Told what cannot be served, before `happened` is.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        workers: Sequence[Worker],
        output_bytes: int,
        *,
        is_current: Callable[[Lane], bool],
        happened: Callable[[Worker, Event], None],
        on_refused: Callable[[Worker, IskanderError], None],
    ) -> None:
        self._lanes = lanes
        self._workers = workers
        self._output_bytes = output_bytes
        self._is_current = is_current
        self._happened = happened
        self._on_refused = on_refused

    def ask_all(self) -> None:
        """Ask every worker that serves, and has nothing to load, for what it does not have."""
        for worker in self._workers:
            if worker.state is State.READY:
                self.ask_next(worker)

    def ask_again(self) -> None:
        """Ask workers for what they could not load, where its files are what is served again."""
        for worker in self._workers:
            for key in list(worker.refused):
                lane = self._lanes.get(key)
                if lane is None or self._is_current(lane):
                    del worker.refused[key]
                else:
                    lane.is_stale = lane.is_served
        self.ask_all()

    def ask_next(self, worker: Worker) -> None:
        """Ask for the first model that the worker does not have; with all of them it is loaded."""
        if worker.asked is not None:
            return
        assert worker.channel is not None
        for key, lane in self._lanes.items():
            if self._is_due(worker, key, lane):
                worker.loading = lane.title
                worker.asked, worker.asked_ns = key, now_ns()
                worker.channel.send(encode([Load(lane.model)]))
                return
        if worker.state is State.LOADING:
            self._happened(worker, Event.LOADED)

    def on_answer(self, worker: Worker, answer: Loaded | LoadFailed | Unloaded) -> None:
        """A worker has loaded the model that it was asked for, or cannot; or gave one up."""
        if isinstance(answer, Unloaded):
            log.info("worker %d has given generation %d up", worker.place.index, answer.model)
            return
        worker.asked, worker.loading = None, ""
        lane = self._lanes.get(answer.model)
        if lane is None or lane.is_over:
            if isinstance(answer, Loaded):
                self._unload(worker, answer.model)
        else:
            try:
                if isinstance(answer, LoadFailed):
                    raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
                self._accept(lane, answer.contract)
            except IskanderError as error:
                if self._refuse(worker, lane, error):
                    return
            else:
                self._take(worker, lane, answer)
        if worker.state in (State.LOADING, State.READY):
            self.ask_next(worker)
        # What one worker has shown to load, the others may.
        self.ask_all()

    def on_lost(self, worker: Worker) -> None:
        """A worker is gone; what nobody has loaded yet, and it was loading, is held against it."""
        lane = self._lanes.get(worker.asked) if worker.asked is not None else None
        if lane is not None and lane.is_coming:
            lane.refusal = ManifestError(f"worker {worker.place.index} ended while it loaded it")

    def replace_overdue(self, limit_ns: int) -> None:
        """Replace, in order, workers that serve and do not come to the end of a load."""
        for worker in self._workers:
            is_loading = worker.state is State.READY and worker.asked is not None
            if is_loading and now_ns() - worker.asked_ns > limit_ns:
                log.error("worker %d does not come to the end of a load", worker.place.index)
                worker.is_due = True
                self._happened(worker, Event.RECYCLE_DUE)

    def unload(self, lane: Lane) -> None:
        """Let every worker that has a model give it up."""
        for worker in self._workers:
            if lane.model.key in worker.models:
                self._unload(worker, lane.model.key)
            worker.refused.pop(lane.model.key, None)
            lane.workers.pop(worker.incarnation, None)

    def _is_due(self, worker: Worker, key: int, lane: Lane) -> bool:
        """Whether a worker is to load a model next."""
        if key in worker.models or key in worker.refused or lane.is_over or lane.refusal:
            return False
        if lane.model.pool != worker.place.pool:
            return False
        if lane.is_coming and not lane.is_required and lane.contract is None:
            # Nobody knows yet whether it can be loaded, or ends who tries: one worker finds out.
            return worker.state is State.READY and all(w.asked != key for w in self._workers)
        if lane.is_served and lane.workers and not self._is_current(lane):
            worker.refused[key] = CHANGED
            lane.is_stale = True
            return False
        return True

    def _unload(self, worker: Worker, key: int) -> None:
        worker.models.discard(key)
        if worker.channel is not None:
            worker.channel.send(encode([Unload(key)]))

    def _take(self, worker: Worker, lane: Lane, answer: Loaded) -> None:
        worker.models.add(answer.model)
        log.info(
            "worker %d loaded %s in %.0f ms: %s, %d threads",
            worker.place.index,
            lane.title,
            answer.load_ms,
            ", ".join(answer.providers),
            answer.threads,
        )
        if worker.state is State.READY:
            lane.workers[worker.incarnation] = worker

    def _refuse(self, worker: Worker, lane: Lane, error: IskanderError) -> bool:
        """Note that a worker cannot serve a model; whether it is of no use without it."""
        index, text = worker.place.index, error.message
        log.error("worker %d cannot serve %s: %s", index, lane.title, text)
        if lane.is_coming:
            lane.refusal = error
        elif lane.contract is None:
            worker.complaint = f"model `{lane.title}`: {text}"
            self._on_refused(worker, ManifestError(worker.complaint))
            self._happened(worker, Event.LOAD_FAILED)
            return True
        worker.refused[lane.model.key] = text
        return False

    def _accept(self, lane: Lane, contract: Contract) -> None:
        if lane.contract is None:
            require_room(contract, lane.model.rows_max, self._output_bytes)
            lane.set_contract(contract)
        elif lane.contract != contract:
            lane.is_stale = True
            raise ManifestError(CHANGED)
