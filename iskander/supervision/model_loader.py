"""Models for workers: each is asked for one after the other, and what it loads is taken if it fits.

The next one is asked for when the last is answered, so what is under way to a worker is never more
than a message. A worker that cannot load what others serve, or what is only to come, goes on with
the rest; one without a model of the configuration that nobody has is of no use, and is ended.

What is served is looked at before a worker that comes later is asked for it, and again when the
worker has it: its files may have changed, and no two workers are to hold different ones.

Runs on: gateway loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from iskander.clock import NS_PER_S, now_ns
from iskander.contract.tensors import Contract, require_room
from iskander.control.messages import Load, Loaded, LoadFailed, Unload, Unloaded, encode
from iskander.errors import IskanderError, ManifestError
from iskander.scheduling.lane import Lane
from iskander.supervision.file_freshness import FileFreshness
from iskander.supervision.lifecycle import Event, State
from iskander.supervision.worker import Worker

log = logging.getLogger("iskander.supervisor")

CHANGED = "its files were changed, and are not what is being served"
AT_WORK = (State.LOADING, State.READY)


class ModelLoader:
    """Gives workers their models.

    Args:
        lanes: By the key of their model.
        workers: Every place of the plan.
        output_bytes: That a worker's results may take.
        freshness: Whether a lane's files are still those that it was loaded from.
        happened: Told when a worker has all of them, or cannot have one.
        on_refused: Told what cannot be served, before `happened` is.
    """

    def __init__(
        self,
        lanes: Mapping[int, Lane],
        workers: Sequence[Worker],
        output_bytes: int,
        *,
        freshness: FileFreshness,
        happened: Callable[[Worker, Event], None],
        on_refused: Callable[[Worker, IskanderError], None],
    ) -> None:
        self._lanes = lanes
        self._workers = workers
        self._output_bytes = output_bytes
        self._freshness = freshness
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
                if lane is None:
                    del worker.refused[key]
                else:
                    again = partial(self._on_refused_seen, worker, worker.incarnation, lane)
                    self._freshness.ask(lane, again)

    def ask_next(self, worker: Worker) -> None:
        """Ask for the first model that the worker does not have; with all of them it is loaded."""
        if worker.asked is not None:
            return
        for key, lane in self._lanes.items():
            if self._is_due(worker, key, lane):
                if lane.is_served and lane.workers:
                    self._see(worker, lane, self._on_seen_before)
                else:
                    self._ask(worker, lane)
                return
        if worker.state is State.LOADING:
            self._happened(worker, Event.LOADED)

    def on_answer(self, worker: Worker, answer: Loaded | LoadFailed | Unloaded) -> None:
        """A worker has loaded the model that it was asked for, or cannot; or gave one up."""
        if isinstance(answer, Unloaded):
            log.info("worker %d has given generation %d up", worker.index, answer.model)
            return
        lane = self._lanes.get(answer.model)
        is_asked = worker.asked == answer.model
        worker.asked, worker.loading = None, ""
        if lane is None or lane.is_over:
            if isinstance(answer, Loaded):
                self._unload(worker, answer.model)
        else:
            try:
                if isinstance(answer, LoadFailed):
                    raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
                self._accept(lane, answer.contract)
            except IskanderError as error:
                if isinstance(answer, Loaded):
                    self._unload(worker, answer.model)
                if self._refuse(worker, lane, error):
                    return
            else:
                if lane.is_served and is_asked and worker.state in AT_WORK:
                    self._see(worker, lane, partial(self._on_seen_after, answer))
                    return
                self._take(worker, lane, answer)
        self._go_on(worker)

    def on_leaving(self, worker: Worker, *, is_stopping: bool) -> None:
        """A worker leaves in order: what it was loading is for another, and not held against it.

        Args:
            worker: That leaves.
            is_stopping: All of them do.
        """
        worker.asked, worker.loading = None, ""
        if not is_stopping:
            self.ask_all()

    def on_lost(self, worker: Worker) -> None:
        """A worker is gone; what nobody has loaded yet, and it was loading, is held against it."""
        lane = self._coming_to(worker)
        if lane is not None:
            lane.refusal = ManifestError(f"worker {worker.index} ended while it loaded it")

    def replace_overdue(self, limit_ns: int) -> None:
        """Replace, in order, workers that serve and do not come to the end of a load."""
        for worker in self._workers:
            is_loading = worker.state is State.READY and worker.asked is not None
            if is_loading and now_ns() - worker.asked_ns > limit_ns:
                log.error("worker %d does not come to the end of a load", worker.index)
                lane = self._coming_to(worker)
                if lane is not None and lane.contract is None:
                    text = f"had not loaded it after {limit_ns // NS_PER_S} s"
                    lane.refusal = ManifestError(f"worker {worker.index} {text}")
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
        return True

    def _ask(self, worker: Worker, lane: Lane) -> None:
        assert worker.channel is not None
        worker.loading = lane.title
        worker.asked, worker.asked_ns = lane.model.key, now_ns()
        worker.channel.send(encode([Load(lane.model)]))

    def _go_on(self, worker: Worker) -> None:
        """Ask for the next model, and others for what this worker has shown to load."""
        if worker.state in AT_WORK:
            self.ask_next(worker)
        self.ask_all()

    def _see(self, worker: Worker, lane: Lane, then: Callable[[Worker, Lane, bool], None]) -> None:
        """Look at files before anything else is asked of a worker; told if it is still there."""
        incarnation = worker.incarnation
        worker.asked, worker.asked_ns = lane.model.key, now_ns()

        def on_known(is_current: bool) -> None:
            is_here = worker.incarnation == incarnation and worker.state in AT_WORK
            if is_here and worker.asked == lane.model.key:
                worker.asked = None
                then(worker, lane, is_current)

        self._freshness.ask(lane, on_known)

    def _on_seen_before(self, worker: Worker, lane: Lane, is_current: bool) -> None:
        """Ask for what is served, unless the worker would get something else."""
        if lane.is_over:
            self._go_on(worker)
        elif is_current:
            self._ask(worker, lane)
        else:
            worker.refused[lane.model.key] = CHANGED
            lane.is_stale = True
            self._go_on(worker)

    def _on_seen_after(self, answer: Loaded, worker: Worker, lane: Lane, is_current: bool) -> None:
        """Take what a worker has loaded, unless others may have something else."""
        key = lane.model.key
        if lane.is_over:
            self._unload(worker, key)
        else:
            lane.is_stale = lane.is_stale or not is_current
            if is_current or not any(key in other.models for other in self._workers):
                self._take(worker, lane, answer)
            else:
                self._unload(worker, key)
                self._refuse(worker, lane, ManifestError(CHANGED))
        self._go_on(worker)

    def _on_refused_seen(
        self, worker: Worker, incarnation: int, lane: Lane, is_current: bool
    ) -> None:
        """Let a worker be asked again, or the change be loaded by all."""
        if worker.incarnation == incarnation and lane.model.key in worker.refused:
            if is_current:
                del worker.refused[lane.model.key]
                self.ask_all()
            else:
                lane.is_stale = lane.is_served

    def _coming_to(self, worker: Worker) -> Lane | None:
        """What a worker is loading, where nobody finds it yet."""
        lane = self._lanes.get(worker.asked) if worker.asked is not None else None
        return lane if lane is not None and lane.is_coming else None

    def _unload(self, worker: Worker, key: int) -> None:
        worker.models.discard(key)
        if worker.channel is not None:
            worker.channel.send(encode([Unload(key)]))

    def _take(self, worker: Worker, lane: Lane, answer: Loaded) -> None:
        worker.models.add(answer.model)
        log.info(
            "worker %d loaded %s in %.0f ms: %s, %d threads",
            worker.index,
            lane.title,
            answer.load_ms,
            ", ".join(answer.providers),
            answer.threads,
        )
        if worker.state is State.READY:
            lane.workers[worker.incarnation] = worker

    def _refuse(self, worker: Worker, lane: Lane, error: IskanderError) -> bool:
        """Note that a worker cannot serve a model; whether it is of no use without it."""
        index, text = worker.index, error.message
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
