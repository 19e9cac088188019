"""Reads the status document from the live objects of a gateway process, in small steps.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from heapq import nlargest
from operator import attrgetter, itemgetter

from msgspec.structs import replace

from iskander import __version__
from iskander.foundation.build_info import BUILD
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, now_ns
from iskander.foundation.measurement.histogram import Histogram
from iskander.foundation.measurement.process_usage import resident_bytes
from iskander.gateway.repository.models import ModelStatus as ModelEntry
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.health import GpuState
from iskander.gateway.supervision.gpus.readings import GpuReading
from iskander.gateway.supervision.placement.topology import render_cpu_list
from iskander.gateway.supervision.worker import Worker
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.document import (
    CODES_MAX,
    GPUS_MAX,
    MEMORY_MAX,
    REASONS_MAX,
    WORKERS_MAX,
    GpuStatus,
    MemoryStatus,
    ModelStatus,
    ProcessStatus,
    Status,
    WorkerStatus,
    listed,
    plotted,
)
from iskander.gateway.telemetry.status.drift_status import DRIFT_MAX, list_columns
from iskander.gateway.telemetry.status.events import EventLog, shorten
from iskander.gateway.telemetry.status.history import INTERVAL_S, History, complete_tick
from iskander.gateway.telemetry.status.shadow_reader import read_outputs, read_shadow
from iskander.gateway.telemetry.status.shadow_status import OUTPUTS_MAX, SHADOWS_MAX

MODELS_PER_STEP = 8
WORKERS_PER_STEP = 8

_LATEST = ("requests_per_s", "rows_per_s", "total_p50_ms", "total_p95_ms", "total_p99_ms")
_STATES = {"READY": "serving", "LOADING": "loading", "UNLOADING": "draining"}


class StatusReader:
    """Reads the status of one gateway process; `process` is its number."""

    def __init__(
        self, sources: MetricSources, history: History, events: EventLog, process: int
    ) -> None:
        self._sources = sources
        self._history = history
        self._events = events
        self._process = process

    async def read(self) -> Status:
        """Return the status."""
        sources = self._sources
        reasons = sources.models.reasons()
        entries = list(sources.models.index())
        models = []
        for index, entry in enumerate(entries):
            models.append(self._model(entry))
            if index % MODELS_PER_STEP == 0:
                await asyncio.sleep(0)
        slots = sources.models.workers
        workers = []
        for index, worker in enumerate(slots[:WORKERS_MAX]):
            workers.append(_worker(worker, now_ns()))
            if index % WORKERS_PER_STEP == 0:
                await asyncio.sleep(0)
        memory = list(self._memory())
        pairs = sorted(sources.shadows(), key=attrgetter("key"))
        outputs = [output for pair in pairs[:SHADOWS_MAX] for output in read_outputs(pair)]
        await asyncio.sleep(0)
        drift = list_columns(sources.drift(), self._process)
        shown = listed(models)
        await self._add_series(shown)
        return Status(
            version=__version__,
            build=BUILD,
            started_ms=sources.started_ns // NS_PER_MS,
            uptime_s=round(sources.uptime_s, 1),
            ready=not reasons,
            reasons=[shorten(reason) for reason in reasons[:REASONS_MAX]],
            interval_s=INTERVAL_S,
            processes=[self._own_process(is_ready=not reasons)],
            models=shown,
            workers=workers,
            gpus=[_gpu(state) for state in sources.gpus[:GPUS_MAX]],
            memory=memory[:MEMORY_MAX],
            shadows=[read_shadow(pair) for pair in pairs[:SHADOWS_MAX]],
            shadow_outputs=outputs[:OUTPUTS_MAX],
            drift=drift[:DRIFT_MAX],
            events=list(reversed(self._events.events)),
            left_out={
                "reasons": max(len(reasons) - REASONS_MAX, 0),
                "models": len(models) - len(shown),
                "workers": len(slots) - len(workers),
                "memory": max(len(memory) - MEMORY_MAX, 0),
                "shadows": max(len(pairs) - SHADOWS_MAX, 0),
                "shadow_outputs": max(len(outputs) - OUTPUTS_MAX, 0),
                "drift": max(len(drift) - DRIFT_MAX, 0),
            },
        )

    def _own_process(self, *, is_ready: bool) -> ProcessStatus:
        sources = self._sources
        return ProcessStatus(
            process=self._process,
            state="ready" if is_ready else "not ready",
            uptime_s=round(sources.uptime_s, 1),
            loop_lag_p50_ms=_percentile_ms(sources.loop_lag_ns, 50),
            loop_lag_p99_ms=_percentile_ms(sources.loop_lag_ns, 99),
            resident_bytes=resident_bytes(os.getpid()),
            streams=len(sources.streams),
            calls=len(sources.calls),
        )

    def _model(self, entry: ModelEntry) -> ModelStatus:
        lane = entry.lane
        if lane is None:
            state = _STATES.get(entry.state, "failed")
            return ModelStatus(
                name=entry.name, version=entry.version, state=state, reason=shorten(entry.reason)
            )
        queue, rows, counts = lane.queue, lane.metrics.batch_rows, lane.counts
        oldest = next(queue.oldest_first(0), None)
        status = ModelStatus(
            name=entry.name,
            version=entry.version,
            state="quarantined" if lane.quarantine else _STATES.get(entry.state, "not ready"),
            reason=shorten(entry.reason),
            isolated=lane.is_isolated,
            row_relation=shorten(lane.relation.summary) if lane.contract is not None else "",
            workers=len(lane.ready),
            queue_requests=queue.requests,
            queue_rows=queue.rows,
            queue_bytes=queue.bytes,
            oldest_s=_age_s(oldest.arrived_ns) if oldest is not None else 0.0,
            batches=len(rows),
            batch_rows=round(rows.mean, 1),
            refusals=_codes(counts, "refused."),
            failures=_codes(counts, "failed."),
        )
        return replace(status, **self._latest(lane))

    def _latest(self, lane: Lane) -> dict[str, float | None]:
        """The newest sample of a lane."""
        history = self._history.models.get((lane.model.name, lane.model.version))
        return {name: history.latest(name) for name in _LATEST} if history is not None else {}

    async def _add_series(self, models: list[ModelStatus]) -> None:
        """Add the series of the models with plots."""
        wanted, tick = plotted(models), complete_tick(now_ns())
        for index, model in enumerate(models):
            key = model.name, model.version
            if key in wanted and (history := self._history.models.get(key)) is not None:
                models[index] = replace(model, series=history.series(tick))
                await asyncio.sleep(0)

    def _memory(self) -> Iterator[MemoryStatus]:
        sources, process = self._sources, self._process
        yield MemoryStatus(
            name="input arena",
            process=process,
            used_bytes=sources.input_arena.leased_bytes,
            count=len(sources.input_arena),
            limit_bytes=sources.input_arena.capacity_bytes,
            huge_bytes=sources.input_backing.huge_bytes,
            locked=sources.input_backing.is_locked,
        )
        yield MemoryStatus(
            name="received messages",
            process=process,
            used_bytes=sources.budget.used_bytes,
            limit_bytes=sources.budget.limit_bytes,
        )
        yield MemoryStatus(
            name="shared-memory regions",
            process=process,
            used_bytes=sum(sources.regions.values()),
            count=len(sources.regions),
        )
        for worker in sources.models.workers:
            if worker.incarnation:
                yield MemoryStatus(
                    name=f"output arena of worker {worker.index}",
                    process=process,
                    used_bytes=worker.output_arena.leased_bytes,
                    count=len(worker.output_arena),
                    limit_bytes=worker.output_arena.capacity_bytes,
                    huge_bytes=worker.backing.huge_bytes,
                    locked=worker.backing.is_locked,
                )


def _worker(worker: Worker, now: int) -> WorkerStatus:
    beat_ns = worker.last_beat().at_ns
    return WorkerStatus(
        index=worker.index,
        group=worker.plan.group,
        pool=worker.plan.pool,
        cpus=render_cpu_list(worker.plan.cpus),
        state="crash loop" if worker.is_looping else worker.state.value,
        incarnation=worker.incarnation,
        starts=worker.starts,
        ends=dict(worker.exit_counts),
        batches=worker.batches,
        in_flight=len(worker.in_flight),
        resident_bytes=resident_bytes(worker.pid) if worker.pid else 0,
        heartbeat_s=round(max(now - beat_ns, 0) / NS_PER_S, 1) if beat_ns else None,
        gpu="" if worker.plan.gpu is None else worker.plan.gpu.number,
        notices=shorten(
            "; ".join(filter(None, (worker.device_error, worker.load_step, *worker.notices)))
        ),
    )


def _gpu(state: GpuState) -> GpuStatus:
    reading, age_s = state.reading or GpuReading(state.gpu.uuid), state.age_s
    used = reading.utilization
    return GpuStatus(
        gpu=state.gpu.number,
        name=" ".join(filter(None, (state.gpu.name, state.gpu.profile))),
        state=state.state,
        reason=shorten(state.reason),
        utilization_percent=None if used is None else round(100 * used, 1),
        memory_used_bytes=reading.memory_used_bytes,
        memory_total_bytes=reading.memory_total_bytes,
        temperature_c=reading.temperature_c,
        power_w=reading.power_w,
        ecc_corrected=reading.ecc_corrected,
        ecc_uncorrected=reading.ecc_uncorrected,
        xids=dict(state.xids),
        pcie_replays=reading.pcie_replays,
        age_s=None if age_s is None else round(age_s, 1),
    )


def _codes(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    """The highest counts of a key prefix, by the rest of the key."""
    found = [
        (key.removeprefix(prefix), count) for key, count in counts.items() if key.startswith(prefix)
    ]
    return dict(nlargest(CODES_MAX, found, key=itemgetter(1)))


def _percentile_ms(histogram: Histogram, percent: int) -> float:
    return round(histogram.percentile(percent) / NS_PER_MS, 3)


def _age_s(since_ns: int) -> float:
    return round(max(now_ns() - since_ns, 0) / NS_PER_S, 3)
