"""Reads the state of a gateway process from its live objects, in small steps.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from heapq import nlargest

from iskander import __version__
from iskander.contract.processing.row_relation import RowRelation
from iskander.foundation.build_info import BUILD
from iskander.foundation.clock import NS_PER_MS, NS_PER_S, NS_PER_US, now_ns
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, Histogram
from iskander.foundation.measurement.process_usage import cpu_s, resident_bytes
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.health import GpuState
from iskander.gateway.supervision.gpus.readings import GpuReading, GpuValues
from iskander.gateway.supervision.worker import Worker
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.stats import (
    ArenaStats,
    BatchRowsStats,
    CadenceStats,
    CostStats,
    GpuStats,
    LaneStats,
    LatencyStats,
    ModelStats,
    QueueStats,
    ReceiveStats,
    RegionStats,
    RowRelationStats,
    Stats,
    WorkerStats,
)

CADENCES_MAX = 20
"""Limit of listed clients of a lane; the clients with the most samples."""

_COUNTS = ("requests", "rows", "batches", "completed", "withdrawn", "retried", "worker_deaths")


async def read_stats(sources: MetricSources, *, has_times: bool = True) -> Stats:
    """Return the state; each lane and each worker is a step.

    The page reads it every second and has times of its own (`history`). `has_times` is then false,
    and `latency_ms`, `latency_counts` and `steps_ms` are empty: they are most of the cost.
    """
    models, lanes = [], {}
    entries = list(sources.models.index())
    await asyncio.sleep(0)
    for entry in entries:
        lane = entry.lane
        if lane is not None:
            lanes[lane.title] = _lane(lane, sources.models.is_lane_ready(lane), has_times)
            await asyncio.sleep(0)
        title = "" if lane is None else lane.title
        models.append(
            ModelStats(
                name=entry.name,
                version=entry.version,
                state=entry.state,
                reason=entry.reason,
                lane=title,
            )
        )
    workers = await read_workers(sources)
    reasons = sources.models.reasons()
    await asyncio.sleep(0)
    arena, backing = sources.input_arena, sources.input_backing
    return Stats(
        version=__version__,
        build=BUILD,
        pid=os.getpid(),
        process=sources.process,
        uptime_s=round(sources.uptime_s, 3),
        ready=not reasons,
        reasons=reasons,
        streams=len(sources.streams),
        calls=len(sources.calls),
        late_messages=sources.counts["late_messages"],
        resident_bytes=resident_bytes(os.getpid()),
        loop_lag_ms=_latency(sources.loop_lag_ns),
        latency_bounds_ms=[bound_ns / NS_PER_MS for bound_ns in LATENCY_BOUNDS_NS],
        input_arena=ArenaStats(
            capacity_bytes=arena.capacity_bytes,
            leased_bytes=arena.leased_bytes,
            leases=len(arena),
            huge_bytes=backing.huge_bytes,
            locked=backing.is_locked,
            notices=backing.notices,
        ),
        receive=ReceiveStats(
            used_bytes=sources.budget.used_bytes, limit_bytes=sources.budget.limit_bytes
        ),
        shared_memory=RegionStats(
            regions=len(sources.regions), lent_bytes=sum(sources.regions.values())
        ),
        models=models,
        lanes=lanes,
        workers=workers,
        gpus=read_gpus(sources),
    )


async def read_workers(sources: MetricSources) -> list[WorkerStats]:
    """Return the state of each worker slot; each is a step."""
    workers = []
    for worker in list(sources.models.workers):
        workers.append(_worker(worker, now_ns()))
        await asyncio.sleep(0)
    return workers


def read_gpus(sources: MetricSources) -> list[GpuStats]:
    """Return the state of each GPU."""
    return [_gpu(state) for state in sources.gpus]


def oldest_s(lane: Lane) -> float:
    """Return the time for which the oldest queued request has waited; 0 for an empty queue."""
    oldest = next(lane.queue.oldest_first(0), None)
    return 0.0 if oldest is None else max(now_ns() - oldest.queued_ns, 0) / NS_PER_S


def _lane(lane: Lane, is_ready: bool, has_times: bool) -> LaneStats:
    counts, queue, metrics, rows = lane.counts, lane.queue, lane.metrics, lane.metrics.batch_rows
    times, steps = {}, {}
    if has_times:
        times = {"wait": metrics.wait_ns, "run": metrics.run_ns, "total": metrics.total_ns}
        steps = metrics.steps_ns
    return LaneStats(
        ready=is_ready,
        workers=len(lane.ready),
        isolated=lane.is_isolated,
        row_relation=_row_relation(lane.relation) if lane.contract is not None else None,
        quarantine=lane.quarantine.reason if lane.quarantine is not None else "",
        outage=lane.outage,
        queued=queue.requests,
        queue=QueueStats(
            requests=queue.requests,
            rows=queue.rows,
            bytes=queue.bytes,
            oldest_s=round(oldest_s(lane), 3),
        ),
        run_ms=round(metrics.run_ns.sum / NS_PER_MS, 3),
        latency_ms={name: _latency(ns) for name, ns in times.items()},
        latency_counts={name: ns.counts for name, ns in times.items()},
        steps_ms={name: _latency(ns) for name, ns in steps.items()},
        batch_rows=BatchRowsStats(
            count=len(rows),
            mean=round(rows.mean, 1),
            min=rows.min,
            max=rows.max,
            up_to=_ranges(rows),
        ),
        closed=_counts(counts, "closed."),
        refused=_counts(counts, "refused."),
        failed=_counts(counts, "failed."),
        deadlines={"hit": counts["deadline.hit"], "missed": counts["deadline.missed"]},
        cost={
            str(index): CostStats(
                row_us=round(cost.row_ns / NS_PER_US, 4),
                base_us=round(cost.base_ns / NS_PER_US, 1),
                samples=cost.samples,
            )
            for index, cost in lane.costs.items()
        },
        cadence_clients=len(lane.arrivals),
        cadence=[
            CadenceStats(client=client, period_ms=round(ns / NS_PER_MS, 3), samples=samples)
            for client, ns, samples in nlargest(
                CADENCES_MAX, lane.arrivals.clients(), key=lambda client: client[2]
            )
        ],
        **{name: counts[name] for name in _COUNTS},
    )


def _row_relation(relation: RowRelation) -> RowRelationStats:
    names = RowRelationStats.__struct_fields__
    return RowRelationStats(**{name: getattr(relation, name) for name in names})


def _worker(worker: Worker, now: int) -> WorkerStats:
    plan, arena, backing = worker.plan, worker.output_arena, worker.backing
    beat_ns = worker.last_beat().at_ns
    return WorkerStats(
        index=worker.index,
        group=plan.group,
        pool=plan.pool,
        cpus=plan.cpus,
        cores=plan.cores,
        domains=plan.domains,
        node=plan.node,
        gpu=None if plan.gpu is None else plan.gpu.number,
        device_error=worker.device_error,
        load_step=worker.load_step,
        state=worker.state.value,
        incarnation=worker.incarnation,
        pid=worker.pid,
        batches=worker.batches,
        in_flight=len(worker.in_flight),
        credits=worker.credits,
        starts=worker.starts,
        failures=worker.failures,
        ends=dict(worker.exit_counts),
        copied_bytes=dict(worker.copied_bytes),
        looping=worker.is_looping,
        output_capacity_bytes=arena.capacity_bytes,
        output_leased_bytes=arena.leased_bytes,
        output_leases=len(arena),
        output_huge_bytes=backing.huge_bytes,
        output_locked=backing.is_locked,
        output_locked_bytes=backing.locked_bytes,
        output_node=backing.node,
        notices=tuple(worker.notices),
        resident_bytes=resident_bytes(worker.pid) if worker.pid else 0,
        cpu_s=cpu_s(worker.pid) if worker.pid else 0.0,
        heartbeat_s=round(max(now - beat_ns, 0) / NS_PER_S, 3) if beat_ns else None,
        history=tuple(
            f"{(now - at_ns) // NS_PER_MS} ms ago: {event}, {state}"
            for at_ns, event, state in worker.history
        ),
    )


def _gpu(state: GpuState) -> GpuStats:
    gpu, reading, age_s = state.gpu, state.reading or GpuReading(state.gpu.uuid), state.age_s
    values = {name: getattr(reading, name) for name in GpuValues.__struct_fields__}
    return GpuStats(
        gpu=gpu.number,
        uuid=gpu.uuid,
        pci=gpu.pci,
        name=gpu.name,
        profile=gpu.profile,
        state=state.state,
        reason=state.reason,
        age_s=None if age_s is None else round(age_s, 3),
        **values | {"xids": dict(state.xids)},
    )


def _latency(histogram: Histogram) -> LatencyStats:
    """Summarize a histogram in milliseconds."""
    p50, p95, p99 = histogram.percentiles((50, 95, 99))
    ns = {"mean": histogram.mean, "p50": p50, "p95": p95, "p99": p99, "max": histogram.max}
    return LatencyStats(
        count=len(histogram), **{name: round(value / NS_PER_MS, 3) for name, value in ns.items()}
    )


def _ranges(histogram: Histogram) -> dict[str, int]:
    """Return the nonzero counts by upper bound."""
    counts = zip((*map(str, histogram.bounds), "more"), histogram.counts, strict=True)
    return {bound: count for bound, count in counts if count}


def _counts(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        key.removeprefix(prefix): count for key, count in counts.items() if key.startswith(prefix)
    }
