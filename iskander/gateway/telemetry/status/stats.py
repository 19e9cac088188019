"""State of a gateway process: the response of the action `stats`.

The page, `iskander top`, `iskander stats` and the metrics of workers and GPUs read it. Counts and
percentiles are since the start; the action `metrics` covers recent values. An unknown value is
null. Fields with defaults may be missing in the response of a server of another version. Pure.
"""

from __future__ import annotations

import msgspec

from iskander.foundation.decoders import thread_safe
from iskander.gateway.supervision.gpus.readings import GpuValues


class LatencyStats(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of times in milliseconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


class QueueStats(msgspec.Struct, frozen=True, kw_only=True):
    """Queued requests of a model version; `oldest_s` is the time that the oldest has waited."""

    requests: int
    rows: int
    bytes: int
    oldest_s: float = 0.0


class BatchRowsStats(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of the batches sent to workers; `up_to` has the nonzero counts by upper bound."""

    count: int
    mean: float
    min: int
    max: int
    up_to: dict[str, int]


class CostStats(msgspec.Struct, frozen=True, kw_only=True):
    """Learned cost of a batch on a worker: a fixed part, and one for each row."""

    row_us: float
    base_us: float
    samples: int


class CadenceStats(msgspec.Struct, frozen=True, kw_only=True):
    """Request period of a client."""

    client: str
    period_ms: float
    samples: int


class RowRelationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the rows of a model affect each other's results; `summary` has the effect."""

    verdict: str
    evidence: str
    combine: bool | None
    is_combinable: bool
    is_whole: bool
    reason: str
    summary: str = ""


class LaneStats(msgspec.Struct, frozen=True, kw_only=True):
    """A served model version.

    Attributes:
        workers: Workers that accept its batches.
        row_relation: Null until a worker has loaded it.
        quarantine: Why its requests are rejected; empty if they are not.
        latency_ms: By `wait` (from the arrival of a request to its worker), `run` (of a batch) and
            `total` (from the arrival to the results).
        latency_counts: Counts of the same times, by `Stats.latency_bounds_ms`.
        steps_ms: By pipeline step of a batch.
        closed: Batches by the reason for closing.
        refused: Requests rejected before they ran, by error code.
        failed: Requests that failed in a worker, by error code.
        cost: By worker.
        cadence: Of the clients with the most samples.
    """

    ready: bool
    workers: int
    isolated: bool
    row_relation: RowRelationStats | None
    quarantine: str
    outage: str
    queued: int
    queue: QueueStats
    run_ms: float
    latency_ms: dict[str, LatencyStats]
    latency_counts: dict[str, tuple[int, ...]]
    steps_ms: dict[str, LatencyStats]
    batch_rows: BatchRowsStats
    closed: dict[str, int]
    refused: dict[str, int]
    failed: dict[str, int]
    deadlines: dict[str, int]
    cost: dict[str, CostStats]
    cadence_clients: int
    cadence: list[CadenceStats]
    requests: int = 0
    rows: int = 0
    batches: int = 0
    completed: int = 0
    withdrawn: int = 0
    retried: int = 0
    worker_deaths: int = 0


class ModelStats(msgspec.Struct, frozen=True, kw_only=True):
    """A model version that is served, loading or draining, or whose load failed.

    Attributes:
        state: As in the model index of the Open Inference Protocol.
        reason: Why it is not ready, or why changed files of it are not served.
        lane: Key in `Stats.lanes`; empty if it is not served.
    """

    name: str
    version: str
    state: str
    reason: str
    lane: str


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker slot.

    Attributes:
        pool: The only model of the worker; empty for the shared pool.
        gpu: Number of its GPU.
        device_error: Why its GPU cannot be used.
        load_step: Long step of the current load.
        credits: Batches that it accepts beside those in flight.
        starts: Processes that this gateway started for the slot.
        failures: Consecutive unexpected exits.
        ends: Exits of its processes by kind.
        looping: It is in a crash loop, which does not count for readiness.
        notices: Requests that the system denied, such as memory locks.
        heartbeat_s: Age of the last heartbeat; null without a process.
        history: Latest events with the states after them, oldest first.
    """

    index: int
    group: int
    pool: str
    cpus: tuple[int, ...]
    cores: int | None = None
    domains: tuple[int, ...] = ()
    node: int | None = None
    gpu: str | None = None
    device_error: str = ""
    load_step: str = ""
    state: str
    incarnation: int
    pid: int
    batches: int
    in_flight: int
    credits: int
    starts: int
    failures: int
    ends: dict[str, int]
    copied_bytes: dict[str, int] = {}
    looping: bool
    output_capacity_bytes: int = 0
    output_leased_bytes: int
    output_leases: int = 0
    output_huge_bytes: int = 0
    output_locked: bool = False
    output_locked_bytes: int = 0
    output_node: int | None = None
    notices: tuple[str, ...]
    resident_bytes: int
    cpu_s: float = 0.0
    heartbeat_s: float | None = None
    history: tuple[str, ...]

    @property
    def shown_state(self) -> str:
        """The state for people: a worker in a crash loop is shown as such between its starts."""
        return "crash loop" if self.looping else self.state


class GpuStats(GpuValues, frozen=True, kw_only=True):
    """A GPU and its last values; `xids` are counted since the start of the gateway.

    Attributes:
        gpu: Number, as in `workers.groups`.
        profile: Profile of a MIG slice.
        state: `ok`, `throttled`, `error`, `no answer`, `lost` or `unknown`.
        age_s: Time since NVML answered.
    """

    gpu: str
    uuid: str
    pci: str
    name: str
    profile: str
    state: str
    reason: str
    age_s: float | None = None


class ArenaStats(msgspec.Struct, frozen=True, kw_only=True):
    """The input arena."""

    capacity_bytes: int
    leased_bytes: int
    leases: int
    huge_bytes: int
    locked: bool
    notices: tuple[str, ...]


class RegionStats(msgspec.Struct, frozen=True, kw_only=True):
    """Shared-memory regions of clients."""

    regions: int
    lent_bytes: int


class ReceiveStats(msgspec.Struct, frozen=True, kw_only=True):
    """Buffered received bytes, and their limit."""

    used_bytes: int = 0
    limit_bytes: int = 0


@thread_safe
class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """State of a gateway process.

    Attributes:
        process: Number of the process, of several.
        late_messages: Responses of workers to batches that had ended.
        loop_lag_ms: Lag of the event loop.
        lanes: Served model versions by `NAME/VERSION`.
    """

    version: str
    build: str
    pid: int
    process: int = 0
    uptime_s: float
    ready: bool
    reasons: list[str]
    streams: int
    calls: int
    late_messages: int
    resident_bytes: int
    loop_lag_ms: LatencyStats
    latency_bounds_ms: list[float]
    input_arena: ArenaStats
    receive: ReceiveStats = ReceiveStats()
    shared_memory: RegionStats
    models: list[ModelStats] = []
    lanes: dict[str, LaneStats]
    workers: list[WorkerStats]
    gpus: list[GpuStats] = []
