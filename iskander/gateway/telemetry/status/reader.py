"""Derives the status document from the state of a gateway process, in small steps.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from heapq import nlargest
from operator import attrgetter, itemgetter

from msgspec.structs import replace

from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.document import (
    CODES_MAX,
    GPUS_MAX,
    MEMORY_MAX,
    REASONS_MAX,
    WORKERS_MAX,
    MemoryStatus,
    ModelStatus,
    ProcessStatus,
    Status,
    listed,
    plotted,
)
from iskander.gateway.telemetry.status.drift_status import DRIFT_MAX, list_columns
from iskander.gateway.telemetry.status.events import EventLog, shorten
from iskander.gateway.telemetry.status.history import INTERVAL_S, History, complete_tick
from iskander.gateway.telemetry.status.shadow_reader import read_outputs, read_shadow
from iskander.gateway.telemetry.status.shadow_status import OUTPUTS_MAX, SHADOWS_MAX
from iskander.gateway.telemetry.status.stats import (
    GpuStats,
    LaneStats,
    ModelStats,
    Stats,
    WorkerStats,
)
from iskander.gateway.telemetry.status.stats_reader import read_stats

MODELS_PER_STEP = 8

_LATEST = ("requests_per_s", "rows_per_s", "total_p50_ms", "total_p95_ms", "total_p99_ms")
_STATES = {"READY": "serving", "LOADING": "loading", "UNLOADING": "draining"}


class StatusReader:
    """Reads the status of one gateway process."""

    def __init__(self, sources: MetricSources, history: History, events: EventLog) -> None:
        self._sources = sources
        self._history = history
        self._events = events

    async def read(self) -> Status:
        """Return the status."""
        sources = self._sources
        stats = await read_stats(sources, has_times=False)
        models = []
        for index, model in enumerate(models_of(stats)):
            models.append(replace(model, **self._latest(model)))
            if index % MODELS_PER_STEP == 0:
                await asyncio.sleep(0)
        memory = list(memory_of(stats))
        pairs = sorted(sources.shadows(), key=attrgetter("key"))
        outputs = [output for pair in pairs[:SHADOWS_MAX] for output in read_outputs(pair)]
        await asyncio.sleep(0)
        drift = list_columns(sources.drift(), stats.process)
        shown = listed(models)
        await self._add_series(shown)
        return Status(
            version=stats.version,
            build=stats.build,
            started_ms=sources.started_ns // NS_PER_MS,
            uptime_s=round(stats.uptime_s, 1),
            ready=stats.ready,
            reasons=[shorten(reason) for reason in stats.reasons[:REASONS_MAX]],
            interval_s=INTERVAL_S,
            processes=[process_of(stats)],
            models=shown,
            workers=[_worker(worker) for worker in stats.workers[:WORKERS_MAX]],
            gpus=[_gpu(gpu) for gpu in stats.gpus[:GPUS_MAX]],
            memory=memory[:MEMORY_MAX],
            shadows=[read_shadow(pair) for pair in pairs[:SHADOWS_MAX]],
            shadow_outputs=outputs[:OUTPUTS_MAX],
            drift=drift[:DRIFT_MAX],
            events=list(reversed(self._events.events)),
            left_out={
                "reasons": max(len(stats.reasons) - REASONS_MAX, 0),
                "models": len(models) - len(shown),
                "workers": max(len(stats.workers) - WORKERS_MAX, 0),
                "memory": max(len(memory) - MEMORY_MAX, 0),
                "shadows": max(len(pairs) - SHADOWS_MAX, 0),
                "shadow_outputs": max(len(outputs) - OUTPUTS_MAX, 0),
                "drift": max(len(drift) - DRIFT_MAX, 0),
            },
        )

    def _latest(self, model: ModelStatus) -> dict[str, float | None]:
        """The newest sample of a model."""
        history = self._history.models.get((model.name, model.version))
        return {name: history.latest(name) for name in _LATEST} if history is not None else {}

    async def _add_series(self, models: list[ModelStatus]) -> None:
        """Add the series of the models with plots."""
        wanted, tick = plotted(models), complete_tick(now_ns())
        for index, model in enumerate(models):
            key = model.name, model.version
            if key in wanted and (history := self._history.models.get(key)) is not None:
                models[index] = replace(model, series=history.series(tick))
                await asyncio.sleep(0)


def models_of(stats: Stats) -> Iterator[ModelStatus]:
    """Yield the status of each model version, without its history."""
    for model in stats.models:
        yield _model(model, stats.lanes.get(model.lane))


def process_of(stats: Stats) -> ProcessStatus:
    """Return the status of the gateway process."""
    return ProcessStatus(
        process=stats.process,
        state="ready" if stats.ready else "not ready",
        uptime_s=round(stats.uptime_s, 1),
        loop_lag_p50_ms=stats.loop_lag_ms.p50,
        loop_lag_p99_ms=stats.loop_lag_ms.p99,
        resident_bytes=stats.resident_bytes,
        streams=stats.streams,
        calls=stats.calls,
    )


def memory_of(stats: Stats) -> Iterator[MemoryStatus]:
    """Yield the memories of the process: those of all processes, and the arenas of the workers."""
    arena, process = stats.input_arena, stats.process
    yield MemoryStatus(
        name="input arena",
        process=process,
        used_bytes=arena.leased_bytes,
        count=arena.leases,
        limit_bytes=arena.capacity_bytes,
        huge_bytes=arena.huge_bytes,
        locked=arena.locked,
    )
    yield MemoryStatus(
        name="received messages",
        process=process,
        used_bytes=stats.receive.used_bytes,
        limit_bytes=stats.receive.limit_bytes,
    )
    yield MemoryStatus(
        name="shared-memory regions",
        process=process,
        used_bytes=stats.shared_memory.lent_bytes,
        count=stats.shared_memory.regions,
    )
    for worker in stats.workers:
        if worker.incarnation:
            yield MemoryStatus(
                name=f"output arena of worker {worker.index}",
                process=process,
                used_bytes=worker.output_leased_bytes,
                count=worker.output_leases,
                limit_bytes=worker.output_capacity_bytes,
                huge_bytes=worker.output_huge_bytes,
                locked=worker.output_locked,
            )


def _model(model: ModelStats, lane: LaneStats | None) -> ModelStatus:
    name, version, reason = model.name, model.version, shorten(model.reason)
    if lane is None:
        state = _STATES.get(model.state, "failed")
        return ModelStatus(name=name, version=version, state=state, reason=reason)
    return ModelStatus(
        name=name,
        version=version,
        state="quarantined" if lane.quarantine else _STATES.get(model.state, "not ready"),
        reason=reason,
        isolated=lane.isolated,
        row_relation=shorten(lane.row_relation.summary) if lane.row_relation else "",
        workers=lane.workers,
        queue_requests=lane.queue.requests,
        queue_rows=lane.queue.rows,
        queue_bytes=lane.queue.bytes,
        oldest_s=lane.queue.oldest_s,
        batches=lane.batch_rows.count,
        batch_rows=lane.batch_rows.mean,
        refusals=_most(lane.refused),
        failures=_most(lane.failed),
    )


def _worker(worker: WorkerStats) -> WorkerStats:
    """Shorten the texts of a worker, and name its crash loop as its state."""
    return replace(
        worker,
        state=worker.shown_state,
        device_error=shorten(worker.device_error),
        notices=tuple(map(shorten, worker.notices)),
    )


def _gpu(gpu: GpuStats) -> GpuStats:
    return replace(gpu, reason=shorten(gpu.reason))


def _most(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the highest counts."""
    return dict(nlargest(CODES_MAX, counts.items(), key=itemgetter(1)))
