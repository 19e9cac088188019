"""Response of the action `stats`: one JSON object of plain numbers, for people and tests.

Percentiles and counts are since the start; the action `metrics` covers recent values.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from heapq import nlargest
from typing import Any

import msgspec

from iskander import __version__
from iskander.foundation.build_info import BUILD
from iskander.foundation.clock import NS_PER_MS, NS_PER_US, now_ns
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, Histogram
from iskander.foundation.measurement.process_usage import resident_bytes
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.health import GpuState
from iskander.gateway.supervision.gpus.readings import GpuReading
from iskander.gateway.supervision.worker import Worker
from iskander.gateway.telemetry.metrics.sources import MetricSources

CADENCES_MAX = 20
"""Limit of listed clients of a lane; the clients with the most samples."""


async def collect(sources: MetricSources) -> dict[str, Any]:
    """Return counters of lanes, workers and memory; each lane and worker is a step."""
    models = sources.models
    lanes: dict[str, msgspec.Raw] = {}
    for lane in list(models):
        counts = _lane(lane, models.is_lane_ready(lane))
        lanes[lane.title] = msgspec.Raw(msgspec.json.encode(counts))
        await asyncio.sleep(0)
    workers = []
    for worker in list(models.workers):
        workers.append(msgspec.Raw(msgspec.json.encode(_worker(worker, now_ns()))))
        await asyncio.sleep(0)
    reasons = models.reasons()
    arena, backing = sources.input_arena, sources.input_backing
    return {
        "version": __version__,
        "build": BUILD,
        "pid": os.getpid(),
        "uptime_s": round(sources.uptime_s, 3),
        "ready": not reasons,
        "reasons": reasons,
        "streams": len(sources.streams),
        "calls": len(sources.calls),
        "late_messages": sources.counts["late_messages"],
        "resident_bytes": resident_bytes(os.getpid()),
        "loop_lag_ms": _latency(sources.loop_lag_ns),
        "latency_bounds_ms": [bound_ns / NS_PER_MS for bound_ns in LATENCY_BOUNDS_NS],
        "input_arena": {
            "capacity_bytes": arena.capacity_bytes,
            "leased_bytes": arena.leased_bytes,
            "leases": len(arena),
            "huge_bytes": backing.huge_bytes,
            "locked": backing.is_locked,
            "notices": backing.notices,
        },
        "shared_memory": {
            "regions": len(sources.regions),
            "lent_bytes": sum(sources.regions.values()),
        },
        "lanes": lanes,
        "workers": workers,
        "gpus": [_gpu(state) for state in sources.gpus],
    }


def _lane(lane: Lane, is_ready: bool) -> dict[str, Any]:
    counts, queue, rows = lane.counts, lane.queue, lane.metrics.batch_rows
    return {
        "ready": is_ready,
        "workers": len(lane.ready),
        "isolated": lane.is_isolated,
        "row_relation": lane.relation.to_wire() if lane.contract is not None else None,
        "quarantine": lane.quarantine.reason if lane.quarantine is not None else "",
        "outage": lane.outage,
        "queued": queue.requests,
        "queue": {"requests": queue.requests, "rows": queue.rows, "bytes": queue.bytes},
        "run_ms": round(lane.metrics.run_ns.sum / NS_PER_MS, 3),
        "latency_ms": {
            "wait": _latency(lane.metrics.wait_ns),
            "run": _latency(lane.metrics.run_ns),
            "total": _latency(lane.metrics.total_ns),
        },
        "latency_counts": {
            "wait": lane.metrics.wait_ns.counts,
            "run": lane.metrics.run_ns.counts,
            "total": lane.metrics.total_ns.counts,
        },
        "steps_ms": {name: _latency(ns) for name, ns in lane.metrics.steps_ns.items()},
        "batch_rows": {
            "count": len(rows),
            "mean": round(rows.mean, 1),
            "min": rows.min,
            "max": rows.max,
            "up_to": _ranges(rows),
        },
        "closed": _counts(counts, "closed."),
        "refused": _counts(counts, "refused."),
        "failed": _counts(counts, "failed."),
        "deadlines": {"hit": counts["deadline.hit"], "missed": counts["deadline.missed"]},
        "cost": {
            str(index): {
                "row_us": round(cost.row_ns / NS_PER_US, 4),
                "base_us": round(cost.base_ns / NS_PER_US, 1),
                "samples": cost.samples,
            }
            for index, cost in lane.costs.items()
        },
        "cadence_clients": len(lane.arrivals),
        "cadence": [
            {"client": client, "period_ms": round(period_ns / NS_PER_MS, 3), "samples": samples}
            for client, period_ns, samples in nlargest(
                CADENCES_MAX, lane.arrivals.clients(), key=lambda client: client[2]
            )
        ],
        **counts,
    }


def _worker(worker: Worker, now: int) -> dict[str, Any]:
    return {
        "index": worker.index,
        "group": worker.plan.group,
        "pool": worker.plan.pool,
        "cpus": worker.plan.cpus,
        "cores": worker.plan.cores,
        "domains": worker.plan.domains,
        "node": worker.plan.node,
        "gpu": None if worker.plan.gpu is None else worker.plan.gpu.number,
        "device_error": worker.device_error,
        "load_step": worker.load_step,
        "state": worker.state.value,
        "incarnation": worker.incarnation,
        "pid": worker.pid,
        "batches": worker.batches,
        "in_flight": len(worker.in_flight),
        "credits": worker.credits,
        "starts": worker.starts,
        "failures": worker.failures,
        "ends": dict(worker.exit_counts),
        "copied_bytes": dict(worker.copied_bytes),
        "looping": worker.is_looping,
        "output_leased_bytes": worker.output_arena.leased_bytes,
        "output_huge_bytes": worker.backing.huge_bytes,
        "output_locked": worker.backing.is_locked,
        "output_node": worker.backing.node,
        "notices": tuple(worker.notices),
        "resident_bytes": resident_bytes(worker.pid) if worker.pid else 0,
        "history": [
            f"{(now - at_ns) // NS_PER_MS} ms ago: {event}, {state}"
            for at_ns, event, state in worker.history
        ],
    }


def _gpu(state: GpuState) -> dict[str, Any]:
    gpu, reading, age_s = state.gpu, state.reading or GpuReading(state.gpu.uuid), state.age_s
    return {
        "gpu": gpu.number,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "name": gpu.name,
        "profile": gpu.profile,
        "state": state.state,
        "reason": state.reason,
        "age_s": None if age_s is None else round(age_s, 1),
        "utilization": reading.utilization,
        "memory_used_bytes": reading.memory_used_bytes,
        "memory_total_bytes": reading.memory_total_bytes,
        "temperature_c": reading.temperature_c,
        "power_w": reading.power_w,
        "throttles": reading.throttles,
        "ecc_corrected": reading.ecc_corrected,
        "ecc_uncorrected": reading.ecc_uncorrected,
        "xids": dict(state.xids),
        "pcie_generation": reading.pcie_generation,
        "pcie_width": reading.pcie_width,
        "pcie_replays": reading.pcie_replays,
    }


def _latency(histogram: Histogram) -> dict[str, float]:
    """Summarize a histogram in milliseconds."""
    percentiles = {f"p{percent}": histogram.percentile(percent) for percent in (50, 95, 99)}
    values_ns = {"mean": histogram.mean, **percentiles, "max": histogram.max}
    values_ms = {name: round(value_ns / NS_PER_MS, 3) for name, value_ns in values_ns.items()}
    return {"count": len(histogram), **values_ms}


def _ranges(histogram: Histogram) -> dict[str, int]:
    """Return the nonzero counts by upper bound."""
    counts = zip((*map(str, histogram.bounds), "more"), histogram.counts, strict=True)
    return {bound: count for bound, count in counts if count}


def _counts(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        key.removeprefix(prefix): count for key, count in counts.items() if key.startswith(prefix)
    }
