"""Status document: the content of the page at `admin.address`, and of `/status.json`.

It is derived from the `Stats` of each process. Units are last in the names; a value that is unknown
or without a request is null. Counts are since the start of the gateway. All lists are bounded;
`left_out` counts what is not listed.
"""

from __future__ import annotations

import msgspec

from iskander.foundation.decoders import thread_safe
from iskander.gateway.telemetry.status.drift_status import DriftStatus
from iskander.gateway.telemetry.status.events import Event
from iskander.gateway.telemetry.status.shadow_status import OutputStatus, ShadowStatus
from iskander.gateway.telemetry.status.stats import GpuStats, WorkerStats

MODELS_MAX = 100
WORKERS_MAX = 64
GPUS_MAX = 64
MEMORY_MAX = 64
PLOTS_MAX = 12
"""Models with a series of samples: those with the most requests."""
REASONS_MAX = 10
CODES_MAX = 8

PROBLEMS = ("failed", "quarantined", "not ready")
"""States of models that need an operator, the worst first."""
STATES = (*PROBLEMS, "loading", "draining", "serving")


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A gateway process.

    Attributes:
        state: `ready`, `not ready`, or `no answer` with all other values 0.
    """

    process: int
    state: str
    starts: int = 1
    uptime_s: float = 0.0
    loop_lag_p50_ms: float = 0.0
    loop_lag_p99_ms: float = 0.0
    resident_bytes: int = 0
    streams: int = 0
    calls: int = 0


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A model version.

    Attributes:
        state: State of the model, one of `STATES`.
        reason: Why it is not ready, or why changed files of it are not served.
        isolated: The model runs in a dedicated worker, because its batches crashed shared workers.
        row_relation: Whether its rows affect each other's results, and the effect.
        workers: Workers that accept its batches.
        requests_per_s: Requests completed per second of the last interval; `rows_per_s` are their
            rows.
        total_p50_ms: From the arrival of a request to its results, in the last interval.
        oldest_s: Age of the oldest queued request.
        batch_rows: Mean rows of a batch.
        refusals: Requests rejected before they ran, by error code.
        failures: Requests that failed in a worker, by error code.
        series: Samples by measure, oldest first; empty for models without plots.
    """

    name: str
    version: str
    state: str
    reason: str = ""
    isolated: bool = False
    row_relation: str = ""
    workers: int = 0
    requests_per_s: float | None = None
    rows_per_s: float | None = None
    total_p50_ms: float | None = None
    total_p95_ms: float | None = None
    total_p99_ms: float | None = None
    queue_requests: int = 0
    queue_rows: int = 0
    queue_bytes: int = 0
    oldest_s: float = 0.0
    batches: int = 0
    batch_rows: float = 0.0
    refusals: dict[str, int] = {}
    failures: dict[str, int] = {}
    series: dict[str, list[float | None]] = {}


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Memory with a limit: an arena, the shared-memory regions, or the received messages.

    `count` is the number of leases or regions.
    """

    name: str
    process: int
    used_bytes: int
    count: int | None = None
    limit_bytes: int | None = None
    huge_bytes: int | None = None
    locked: bool | None = None


@thread_safe
class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status of a gateway.

    Attributes:
        started_ms: Identifies the gateway: monotonic time of its start.
        interval_s: Seconds between two samples of a series.
        left_out: Number of entries of a list that are not listed.
    """

    version: str
    build: str
    started_ms: int
    uptime_s: float
    ready: bool
    reasons: list[str]
    interval_s: int
    processes: list[ProcessStatus]
    models: list[ModelStatus]
    workers: list[WorkerStats]
    gpus: list[GpuStats] = []
    memory: list[MemoryStatus]
    events: list[Event]
    left_out: dict[str, int]
    shadows: list[ShadowStatus] = []
    shadow_outputs: list[OutputStatus] = []
    drift: list[DriftStatus] = []


def listed(models: list[ModelStatus]) -> list[ModelStatus]:
    """Select the listed models, in their order: first those with problems, then the busiest."""

    def rank(index: int) -> tuple[bool, float]:
        model = models[index]
        return model.state not in PROBLEMS, -(model.requests_per_s or 0.0)

    ranked = sorted(range(len(models)), key=rank)
    return [models[index] for index in sorted(ranked[:MODELS_MAX])]


def plotted(models: list[ModelStatus]) -> set[tuple[str, str]]:
    """Select the model versions with series: the busiest."""
    busiest = sorted(models, key=lambda model: -(model.requests_per_s or 0.0))
    return {(model.name, model.version) for model in busiest[:PLOTS_MAX]}
