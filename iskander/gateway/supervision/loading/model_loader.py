"""Model loading: sends each worker one `Load` at a time and validates its answer.

If the first load of a configured model fails, its worker is killed; after other failures the worker
keeps its other models. The files of a served model are checked before and after each load,
so that no two workers serve different files.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from iskander.config.schema import LimitsConfig
from iskander.contract.inputs import require_smallest_request
from iskander.contract.runtime import make_runtime, with_runtime
from iskander.contract.tensors import require_output_space
from iskander.errors import IskanderError, ManifestError
from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.foundation.logs import models as model_log
from iskander.foundation.logs import workers as log
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.budgets import Share, shortage, spec_for
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.loading.file_freshness import FileFreshness
from iskander.gateway.supervision.worker import Worker
from iskander.interprocess.control.messages import (
    Load,
    Loaded,
    LoadFailed,
    LoadStep,
    ToWorker,
    Unload,
    Unloaded,
)

CHANGED = "its files have changed and differ from those of the serving workers"
ACTIVE_STATES = (State.LOADING, State.READY)


@dataclass(eq=False, repr=False)
class ModelLoader:
    """Loads models in workers with output arenas of `output_bytes`.

    `on_event` is called with LOADED, RECYCLE_DUE, or, after `on_load_error`, LOAD_FAILED.
    `send` sends messages to a worker, or ends it. `limits` are those of requests.
    """

    lanes: Mapping[int, Lane]
    workers: Sequence[Worker]
    output_bytes: int
    freshness: FileFreshness
    on_event: Callable[[Worker, Event], None]
    on_load_error: Callable[[Worker, IskanderError], None]
    send: Callable[[Worker, Sequence[ToWorker]], None]
    limits: LimitsConfig = field(default_factory=LimitsConfig)

    def load_missing(self) -> None:
        """Start the next load of every idle ready worker."""
        for worker in self.workers:
            if worker.state is State.READY:
                self.load_next(worker)

    def retry_failed(self) -> None:
        """Retry failed loads whose model files match the served ones again."""
        for worker in self.workers:
            for key in list(worker.load_errors):
                lane = self.lanes.get(key)
                if lane is None:
                    del worker.load_errors[key]
                else:
                    retry = partial(self._retry_if_current, worker, worker.incarnation, lane)
                    self.freshness.check(lane, retry)

    def load_next(self, worker: Worker) -> None:
        """Start the first load that is due, or report LOADED if none is."""
        if worker.loading_key is not None:
            return
        # A build of engines takes minutes, and a worker loads one model at a time.
        for key, lane in sorted(self.lanes.items(), key=_may_build_engines):
            if self._is_due(worker, key, lane):
                if why := self._lack_of_gpu_memory(worker, lane):
                    if self._reject(worker, lane, ManifestError(why)):
                        return
                    continue
                if lane.is_served and lane.workers:
                    self._check_files(worker, lane, self._load_if_current)
                else:
                    self._load(worker, lane)
                return
        if worker.state is State.LOADING:
            self.on_event(worker, Event.LOADED)

    def on_answer(self, worker: Worker, answer: Loaded | LoadFailed | Unloaded) -> None:
        """Process a worker's answer to a load or an unload."""
        if isinstance(answer, Unloaded):
            log.worker_unloaded_model(worker=worker.index, generation=answer.model)
            return
        lane = self.lanes.get(answer.model)
        is_current_load = worker.loading_key == answer.model
        worker.loading_key, worker.loading_title, worker.load_step = None, "", ""
        if lane is None or lane.is_retired:
            if isinstance(answer, Loaded):
                self._unload(worker, answer.model)
        else:
            try:
                if isinstance(answer, LoadFailed):
                    raise IskanderError.from_wire({"code": answer.code, "message": answer.message})
                self._set_or_match_contract(lane, answer)
            except IskanderError as error:
                if isinstance(answer, Loaded):
                    self._unload(worker, answer.model)
                if self._reject(worker, lane, error):
                    return
            else:
                if lane.is_served and is_current_load and worker.state in ACTIVE_STATES:
                    self._check_files(worker, lane, partial(self._accept_if_current, answer))
                    return
                self._accept(worker, lane, answer)
        self._start_next_loads(worker)

    def on_step(self, worker: Worker, message: LoadStep) -> None:
        """Report the progress of a worker's load."""
        if message.model == worker.loading_key:
            worker.load_step = f"{worker.loading_title}: {message.step}, {message.seconds:.0f} s"
            log.worker_load_step(worker=worker.index, step=worker.load_step)

    def on_leaving(self, worker: Worker, *, is_stopping: bool) -> None:
        """Clear the load of a draining worker; others load the model, unless all are stopping."""
        worker.loading_key, worker.loading_title, worker.load_step = None, "", ""
        if not is_stopping:
            self.load_missing()

    def on_lost(self, worker: Worker) -> None:
        """If a lost worker was loading a new model, record that as its load error."""
        lane = self._pending_lane_of(worker)
        if lane is not None:
            lane.refusal = ManifestError(f"worker {worker.index} ended during the load")

    def replace_overdue(self, limit_ns: int) -> None:
        """Recycle ready workers whose load exceeds the limit."""
        for worker in self.workers:
            is_loading = worker.state is State.READY and worker.loading_key is not None
            if is_loading and now_ns() - worker.load_started_ns > limit_ns:
                limit_s = limit_ns // NS_PER_S
                log.worker_load_timed_out(worker=worker.index, limit_s=limit_s)
                lane = self._pending_lane_of(worker)
                if lane is not None and lane.contract is None:
                    text = f"load timeout: worker {worker.index} did not load it in {limit_s} s"
                    lane.refusal = ManifestError(text)
                worker.is_recycling = True
                self.on_event(worker, Event.RECYCLE_DUE)

    def unload(self, lane: Lane) -> None:
        """Unload a model from every worker."""
        for worker in self.workers:
            if lane.model.key in worker.models:
                self._unload(worker, lane.model.key)
            worker.load_errors.pop(lane.model.key, None)
            lane.workers.pop(worker.incarnation, None)

    def _is_due(self, worker: Worker, key: int, lane: Lane) -> bool:
        """Return whether a worker may load a model now."""
        if key in worker.models or key in worker.load_errors or lane.is_retired or lane.refusal:
            return False
        if not lane.is_for(worker):
            return False
        if lane.is_pending and not lane.is_required and lane.contract is None:
            # A new model may end its process: one worker tries first.
            return worker.state is State.READY and all(w.loading_key != key for w in self.workers)
        return True

    def _lack_of_gpu_memory(self, worker: Worker, lane: Lane) -> str:
        """Return why the GPU of a worker has no memory for a model; empty if it has.

        The plan has checked the models of the configuration. Others, and new generations beside the
        old ones, need the rest of the device's budget.
        """
        gpu = worker.plan.gpu
        if gpu is None or not worker.plan.gpu_budget_bytes:
            return ""
        loaded = [
            self.lanes[key]
            for other in self.workers
            if other.plan.gpu == gpu
            for key in {*other.models, other.loading_key}
            if key is not None and key in self.lanes
        ]
        # A model with the whole device is replaced by its own next generation.
        if not lane.model.gpu_memory_bytes and {each.title for each in loaded} <= {lane.title}:
            return ""
        shares = [Share(each.title, each.model.gpu_memory_bytes) for each in (*loaded, lane)]
        why = shortage(shares, worker.plan.gpu_budget_bytes)
        return f"{gpu.description}: {why} (`gpu_memory_bytes`)" if why else ""

    def _load(self, worker: Worker, lane: Lane) -> None:
        worker.loading_title = lane.title
        worker.loading_key, worker.load_started_ns = lane.model.key, now_ns()
        self.send(worker, [Load(spec_for(lane.model, worker.device))])

    def _start_next_loads(self, worker: Worker) -> None:
        """Start the next load of this worker and of all others that are idle and ready."""
        if worker.state in ACTIVE_STATES:
            self.load_next(worker)
        self.load_missing()

    def _check_files(
        self, worker: Worker, lane: Lane, callback: Callable[[Worker, Lane, bool], None]
    ) -> None:
        """Block the worker's loads, check files, and call `callback` unless the worker left."""
        incarnation = worker.incarnation
        worker.loading_key, worker.load_started_ns = lane.model.key, now_ns()

        def on_checked(is_current: bool) -> None:
            is_active = worker.incarnation == incarnation and worker.state in ACTIVE_STATES
            if is_active and worker.loading_key == lane.model.key:
                worker.loading_key = None
                callback(worker, lane, is_current)

        self.freshness.check(lane, on_checked)

    def _load_if_current(self, worker: Worker, lane: Lane, is_current: bool) -> None:
        if not lane.is_retired and is_current:
            self._load(worker, lane)
            return
        if not lane.is_retired:
            worker.load_errors[lane.model.key] = CHANGED
            lane.is_stale = True
        self._start_next_loads(worker)

    def _accept_if_current(
        self, answer: Loaded, worker: Worker, lane: Lane, is_current: bool
    ) -> None:
        """Accept a load, unless other workers may have loaded different files."""
        key = lane.model.key
        if lane.is_retired:
            self._unload(worker, key)
        else:
            lane.is_stale = lane.is_stale or not is_current
            if is_current or not any(key in other.models for other in self.workers):
                self._accept(worker, lane, answer)
            else:
                self._unload(worker, key)
                self._reject(worker, lane, ManifestError(CHANGED))
        self._start_next_loads(worker)

    def _retry_if_current(
        self, worker: Worker, incarnation: int, lane: Lane, is_current: bool
    ) -> None:
        if worker.incarnation == incarnation and lane.model.key in worker.load_errors:
            if is_current:
                del worker.load_errors[lane.model.key]
                self.load_missing()
            else:
                lane.is_stale = lane.is_served

    def _pending_lane_of(self, worker: Worker) -> Lane | None:
        """Return the lane that a worker loads, if it is pending."""
        lane = self.lanes.get(worker.loading_key) if worker.loading_key is not None else None
        return lane if lane is not None and lane.is_pending else None

    def _unload(self, worker: Worker, key: int) -> None:
        worker.models.discard(key)
        if worker.channel is not None:
            self.send(worker, [Unload(key)])

    def _accept(self, worker: Worker, lane: Lane, answer: Loaded) -> None:
        worker.models.add(answer.model)
        runtime = make_runtime(answer.library, answer.providers, answer.threads)
        lane.runtimes = with_runtime(lane.runtimes, runtime)
        log.worker_loaded_model(
            worker=worker.index,
            model=lane.title,
            load_ms=round(answer.load_ms),
            providers=", ".join(answer.providers),
            threads=answer.threads,
        )
        if worker.state is State.READY:
            lane.workers[worker.incarnation] = worker

    def _reject(self, worker: Worker, lane: Lane, error: IskanderError) -> bool:
        """Record a load error; return whether it ended the worker."""
        log.worker_refused_model(worker=worker.index, model=lane.title, reason=error.message)
        if lane.is_pending:
            lane.refusal = error
        elif lane.contract is None:
            worker.load_error = f"model `{lane.title}`: {error.message}"
            self.on_load_error(worker, type(error)(worker.load_error))
            self.on_event(worker, Event.LOAD_FAILED)
            return True
        worker.load_errors[lane.model.key] = error.message
        return False

    def _set_or_match_contract(self, lane: Lane, answer: Loaded) -> None:
        if lane.contract is None:
            require_output_space(answer.contract, lane.model.rows_max, self.output_bytes)
            require_smallest_request(
                answer.contract,
                columns=self.limits.columns,
                batch_bytes=self.limits.bytes,
                result_bytes=self.limits.result_bytes,
            )
            lane.set_contract(answer.contract, answer.rows)
            lane.files_sha256 = answer.files_sha256
            _report_relation(lane)
        elif lane.contract != answer.contract:
            lane.is_stale = True
            raise ManifestError(CHANGED)
        else:
            before = lane.relation
            lane.weaken_relation(answer.rows)
            if lane.relation != before:
                _report_relation(lane)


def _report_relation(lane: Lane) -> None:
    """Log whether requests are combined, and settings that have no effect if they are not."""
    relation, title, config = lane.relation, lane.title, lane.config
    verdict, evidence = relation.verdict, relation.evidence
    if relation.is_combinable:
        by = "measurement" if relation.combine is None else "`combine = true` in its manifest"
        model_log.requests_combined(model=title, by=by, verdict=verdict, evidence=evidence)
        return
    if relation.combine is not None:
        model_log.requests_kept_apart(model=title, verdict=verdict, evidence=evidence)
    else:
        effects = "combined, cut or padded" if relation.is_whole else "combined"
        model_log.requests_not_combined(
            model=title, effects=effects, verdict=verdict, evidence=evidence
        )
    settings = {
        "preferred_batch_rows": config.preferred_batch_rows,
        "linger_us": config.linger_us,
        "pad_to": config.pad_to if relation.is_whole else (),
    }
    if names := ", ".join(f"`lane.{name}`" for name, value in settings.items() if value):
        model_log.lane_settings_without_effect(model=title, settings=names)


def _may_build_engines(item: tuple[int, Lane]) -> bool:
    return item[1].model.execution_providers[0] == "tensorrt"
