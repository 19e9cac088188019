"""A gateway without processes, as a source of metrics, stats and pages."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec

from iskander.config.models import LaneConfig
from iskander.foundation.clock import now_ns
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, Histogram
from iskander.gateway.repository.models import Models
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.lifecycle import Event, State
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.interprocess.control.messages import ModelSpec
from iskander.interprocess.memory.arena import Arena
from support.lanes import model_of

MIB = 1 << 20


def make_lane(name: str = "m", version: str = "1", *, is_ready: bool = True, **counts: int) -> Lane:
    """A lane with only these `counts`; `__` in their names stands for a dot."""
    lane = Lane(make_model(name, version), LaneConfig())
    lane.counts.update({key.replace("__", "."): count for key, count in counts.items()})
    if is_ready:
        worker = make_worker()
        lane.workers[worker.incarnation] = worker
    return lane


def make_model(name: str, version: str) -> ModelSpec:
    return msgspec.structs.replace(model_of(rows_max=1024), name=name, version=version)


def make_worker(index: int = 0, state: State = State.READY) -> Worker:
    """An idle worker; its process is this one."""
    worker = Worker(SlotPlan(index, 0, (index,), None))
    worker.state = state
    worker.incarnation = 7 + index
    worker.pid = os.getpid()
    worker.starts = 1
    worker.credits = 2
    worker.output_arena = Arena(MIB)
    worker.history.append((now_ns(), Event.ATTACHED, State.LOADING))
    return worker


def models_of(lanes: list[Lane]) -> Models:
    """Models that serve these lanes."""
    models = Models()
    models.by_key = dict(enumerate(lanes))
    for lane in lanes:
        models.serve(lane)
    return models


def observe(
    lanes: list[Lane],
    workers: list[Worker] | None = None,
    *,
    is_stopping: bool = False,
    **more: Any,
) -> MetricSources:
    """A gateway with these lanes and workers."""
    models = models_of(lanes)
    models.workers = [make_worker()] if workers is None else workers
    models.is_stopping = is_stopping
    parts: dict[str, Any] = {
        "started_ns": now_ns(),
        "models": models,
        "input_arena": Arena(4 * MIB),
        "streams": (),
        "counts": Counter(),
        "loop_lag_ns": Histogram(LATENCY_BOUNDS_NS),
    }
    return MetricSources(**{**parts, **more})
