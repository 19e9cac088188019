"""Rows of `iskander top`, from two responses of the action `stats`.

Pure.
"""

from __future__ import annotations

import msgspec

from iskander.foundation.measurement.histogram import percentiles
from iskander.gateway.telemetry.status.stats import GpuStats, LaneStats, Stats, WorkerStats

PERCENTS = (50, 95, 99)


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model version; rates and percentiles of the interval are None if they are unknown.

    `p50_ms` to `p99_ms`: from the arrival of a request to its results.
    """

    name: str
    state: str
    workers: int
    queued: int
    requests_per_s: float | None
    rows_per_s: float | None
    rejected_per_s: float | None
    failed_per_s: float | None
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker slot; `last` is the latest event of its history, and the state after it.

    `gpu`, `gpu_percent` and `gpu_bytes`: number, load and used memory of its GPU; None without one.
    """

    name: str
    state: str
    group: int
    cpus: tuple[int, ...]
    batches_per_s: float | None
    in_flight: int
    resident_bytes: int
    starts: int
    gpu: str | None = None
    gpu_percent: float | None = None
    gpu_bytes: int | None = None
    last: str


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a gateway process, and its rates since the response before.

    `interval_s` is None without one.
    """

    version: str
    process: int
    uptime_s: float
    ready: bool
    reasons: list[str]
    streams: int
    calls: int
    input_leased_bytes: int
    input_capacity_bytes: int
    resident_bytes: int
    interval_s: float | None
    models: list[ModelRow]
    workers: list[WorkerRow]


def compare(before: Stats | None, after: Stats) -> Snapshot:
    """Return the rows of a response; `before` is an earlier one of the same process, if any."""
    if before is not None and (before.pid != after.pid or before.uptime_s >= after.uptime_s):
        before = None
    elapsed_s = None if before is None else after.uptime_s - before.uptime_s
    lanes = {} if before is None else before.lanes
    workers = {} if before is None else {worker.index: worker for worker in before.workers}
    gpus = {gpu.gpu: gpu for gpu in after.gpus}
    return Snapshot(
        version=after.version,
        process=after.process,
        uptime_s=after.uptime_s,
        ready=after.ready,
        reasons=after.reasons,
        streams=after.streams,
        calls=after.calls,
        input_leased_bytes=after.input_arena.leased_bytes,
        input_capacity_bytes=after.input_arena.capacity_bytes,
        resident_bytes=after.resident_bytes,
        interval_s=elapsed_s and round(elapsed_s, 3),
        models=[
            _model(title, lanes.get(title), lane, elapsed_s, after.latency_bounds_ms)
            for title, lane in after.lanes.items()
        ],
        workers=[
            _worker(workers.get(worker.index), worker, gpus.get(worker.gpu or ""), elapsed_s)
            for worker in after.workers
        ],
    )


def _model(
    title: str,
    before: LaneStats | None,
    after: LaneStats,
    elapsed_s: float | None,
    bounds: list[float],
) -> ModelRow:
    counts, earlier = _counts(after), _counts(before) if before is not None else {}
    times: list[float] | list[None] = [None] * len(PERCENTS)
    if before is not None:
        pairs = zip(after.latency_counts["total"], before.latency_counts["total"], strict=True)
        changes = [max(new - old, 0) for new, old in pairs]
        if any(changes):
            times = percentiles(bounds, changes, PERCENTS)
    return ModelRow(
        name=title,
        state=_state(after),
        workers=after.workers,
        queued=after.queue.requests,
        **{f"{key}_per_s": _rate(earlier.get(key), counts[key], elapsed_s) for key in counts},
        **{f"p{n}_ms": time and round(time, 3) for n, time in zip(PERCENTS, times, strict=True)},
    )


def _counts(lane: LaneStats) -> dict[str, int]:
    return {
        "requests": lane.requests,
        "rows": lane.rows,
        "rejected": sum(lane.refused.values()),
        "failed": sum(lane.failed.values()),
    }


def _state(lane: LaneStats) -> str:
    if lane.quarantine:
        return "quarantined"
    state = "ready" if lane.ready else "not ready"
    return f"{state}, isolated" if lane.isolated else state


def _worker(
    before: WorkerStats | None, after: WorkerStats, gpu: GpuStats | None, elapsed_s: float | None
) -> WorkerRow:
    load = gpu.utilization if gpu is not None else None
    return WorkerRow(
        name=str(after.index),
        state=after.shown_state,
        group=after.group,
        cpus=after.cpus,
        batches_per_s=_rate(before.batches if before else None, after.batches, elapsed_s),
        in_flight=after.in_flight,
        resident_bytes=after.resident_bytes,
        starts=after.starts,
        gpu=after.gpu,
        gpu_percent=None if load is None else round(100 * load, 1),
        gpu_bytes=gpu.memory_used_bytes if gpu is not None else None,
        last=after.history[-1].partition(": ")[2] if after.history else "",
    )


def _rate(before: int | None, after: int, elapsed_s: float | None) -> float | None:
    """Rate of a counter; a counter of a reloaded model starts at 0 again."""
    if before is None or elapsed_s is None:
        return None
    return round(max(after - before, 0) / elapsed_s, 3)
