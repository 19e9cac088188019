"""Metrics: tables of name, kind, unit, labels, help text and reader.

The tables are the source of the reference page and of the Prometheus page. Values are read during a
scrape; the path of a batch updates `Counters` and `Histogram` only. A scrape yields to the event
loop between small steps.

Runs on: gateway loop. Source: Prometheus text format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Generic, Literal, TypeVar, cast

from prometheus_client import exposition
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    UnknownMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics

from iskander import __version__
from iskander.errors import (
    ArenaFull,
    ClientOverShare,
    ContractError,
    DeadlineExceeded,
    DeadlineUnreachable,
    DroppedFromQueue,
    ExecutionFailed,
    LimitExceeded,
    MalformedInput,
    NotReady,
    PermissionDenied,
    PoisonedRequest,
    QueueFull,
    RateLimited,
    Unauthenticated,
)
from iskander.foundation.build_info import BUILD
from iskander.foundation.clock import NS_PER_S
from iskander.foundation.machine_memory import memory_bytes
from iskander.foundation.measurement.histogram import Histogram
from iskander.foundation.measurement.process_usage import cpu_s, resident_bytes
from iskander.gateway.scheduling.lanes.batcher import Reason
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.supervision.gpus.health import STATES as GPU_STATES
from iskander.gateway.supervision.gpus.readings import THROTTLES, XIDS
from iskander.gateway.supervision.lifecycle import State
from iskander.gateway.telemetry.metrics.aggregate import RELOAD_VALID, RELOAD_VALID_AT
from iskander.gateway.telemetry.metrics.sources import MetricSources
from iskander.gateway.telemetry.status.stats import GpuStats, WorkerStats
from iskander.gateway.telemetry.status.stats_reader import oldest_s, read_gpus, read_workers
from iskander.gateway.transport.limits.descriptors import descriptor_limit, open_descriptors

SOURCES_PER_STEP = {"counter": 16, "gauge": 16, "unknown": 16, "histogram": 2}
"""Sources of a metric in one step of a scrape: up to 72 samples of 8 us."""

ENDS = frozenset(("crash", "hang", "boot_failure", "replaced"))
BASE_UNITS = ("seconds", "bytes")
"""Units that are suffixes of metric names (Prometheus convention)."""
OUTCOMES = ("completed", "withdrawn")
OBSERVED = ("answered", "late", "unsent")
SPAN_OUTCOMES = ("exported", "failed", "limited", "queue_full")
TIMEOUTS = tuple(
    f"{name}_timeout" for name in ("preface", "headers", "idle", "keepalive", "message", "response")
)
LIMITS = ("too_many_connections", "gave_way")
REFUSALS = tuple(
    f"refused.{kind.code}"
    for kind in (
        ArenaFull,
        ClientOverShare,
        ContractError,
        DeadlineExceeded,
        DeadlineUnreachable,
        DroppedFromQueue,
        LimitExceeded,
        MalformedInput,
        NotReady,
        QueueFull,
        RateLimited,
    )
)
FAILURES = tuple(f"failed.{kind.code}" for kind in (ExecutionFailed, PoisonedRequest))
"""Counters start at 0, because a rate over a first value is 0."""
SAMPLE_OUTCOMES = (
    "handed_over", "pressure", "held_limit", "expired", "queue_full", "not_running", "busy",
    "process_lost", "worker_lost",
)  # fmt: skip
LOG_OUTCOMES = ("logged", "buffer_full", "write_failed", "spool_full", "unknown_column")
READ_RESULTS = ("completed", "cancelled")
REFUSED = (Unauthenticated.code, PermissionDenied.code)
AUDITED = ("written", "logged", "dropped")
OVER_QUOTA = (ClientOverShare, LimitExceeded, RateLimited)

Source = TypeVar("Source")
Value = Callable[[Source], float | Histogram]
Readings = Iterable[tuple[tuple[str, ...], float | Histogram]]
Sources = Sequence[tuple[tuple[str, ...], Any]]


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """One metric.

    Attributes:
        name: Prometheus name; a histogram of seconds is recorded in nanoseconds.
        unit: Unit of the values; empty for booleans and plain numbers.
        labels: Labels beside those of the scope.
        read: Returns the current values with their labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "unknown"]
    unit: str
    labels: tuple[str, ...]
    sentence: str
    read: Callable[[Source], Readings]


Scope = tuple[str, tuple[str, ...], tuple[Metric[Any], ...]]
"""Name of a scope, the labels that identify an object of it, and its metrics."""


def _gauge(name: str, unit: str, text: str, read: Value[Source]) -> Metric[Source]:
    return Metric(name, "gauge", unit, (), text, lambda source: [((), read(source))])


def _counter(name: str, unit: str, text: str, read: Value[Source]) -> Metric[Source]:
    return Metric(name, "counter", unit, (), text, lambda source: [((), read(source))])


def _histogram(name: str, unit: str, text: str, read: Value[Source]) -> Metric[Source]:
    return Metric(name, "histogram", unit, (), text, lambda source: [((), read(source))])


def _count(name: str, unit: str, text: str, key: str) -> Metric[Lane]:
    return Metric(name, "counter", unit, (), text, lambda lane: [((), lane.counts[key])])


def _counts(prefix: str, known: Iterable[str] = ()) -> Callable[[Lane], Readings]:
    """Read the counts of a key prefix, labelled by the rest of the key; `known` keys start at 0."""

    def read(lane: Lane) -> Readings:
        counts = lane.counts
        keys = {key for key in counts if key.startswith(prefix)}.union(known)
        return [((key.removeprefix(prefix),), counts[key]) for key in sorted(keys)]

    return read


def _read_results(counts: Mapping[str, int]) -> Readings:
    """Read the ended reads by their result; the usual results start at 0."""
    prefix = "ended."
    keys = {key.removeprefix(prefix) for key in counts if key.startswith(prefix)}
    return [((key,), counts.get(prefix + key, 0)) for key in sorted(keys.union(READ_RESULTS))]


LANE_LABELS = ("model", "version")
LANE_METRICS: tuple[Metric[Lane], ...] = (
    _gauge("iskander_model_workers", "workers", "Workers that accept its batches now.",
           lambda lane: len(lane.ready)),
    _gauge("iskander_queue_oldest_seconds", "seconds", "Age of the request that has been queued "
           "for the longest time; 0 for an empty queue.", oldest_s),
    _gauge("iskander_queue_requests", "requests", "Queued requests.",
           lambda lane: lane.queue.requests),
    _gauge("iskander_queue_rows", "rows", "Queued rows.", lambda lane: lane.queue.rows),
    _gauge("iskander_queue_bytes", "bytes", "Input bytes of queued requests.",
           lambda lane: lane.queue.bytes),
    _count("iskander_requests_total", "requests", "Admitted requests.", "requests"),
    _count("iskander_rows_total", "rows", "Rows of admitted requests.", "rows"),
    _count("iskander_batches_total", "batches", "Batches sent to workers.", "batches"),
    Metric("iskander_requests_ended_total", "counter", "requests", ("outcome",), "Admitted "
           "requests that did not fail: completed, or withdrawn (the caller disconnected).",
           lambda lane: [((name,), lane.counts[name]) for name in OUTCOMES]),
    _count("iskander_requests_retried_total", "requests", "Retries after the death of a worker.",
           "retried"),
    _count("iskander_worker_deaths_total", "workers", "Workers that died or hung while they ran a "
           "batch.", "worker_deaths"),
    _gauge("iskander_model_isolated", "", "Whether it runs in a separate worker because its "
           "batches ended workers.", lambda lane: lane.is_isolated),
    _gauge("iskander_model_quarantined", "", "Whether its requests are rejected because its "
           "batches ended workers repeatedly.", lambda lane: lane.quarantine is not None),
    Metric("iskander_refusals_total", "counter", "requests", ("code",), "Requests rejected "
           "before they ran, by error code: for their content, or by their lane.",
           _counts("refused.", REFUSALS)),
    Metric("iskander_failures_total", "counter", "requests", ("code",), "Requests that failed in a "
           "worker, by error code.", _counts("failed.", FAILURES)),
    Metric("iskander_deadlines_total", "counter", "requests", ("result",), "Requests with a "
           "deadline: hit (results in time) or missed.",
           _counts("deadline.", ("deadline.hit", "deadline.missed"))),
    Metric("iskander_batches_closed_total", "counter", "batches", ("reason",), "Batches by the "
           "reason for closing: full, idle (a worker was free), linger (timeout), deadline (a "
           "request could not wait longer), shape (the next request has another shape) or alone "
           "(the request runs in a batch of its own).", _counts("closed.", Reason)),
    _histogram("iskander_batch_rows", "rows", "Rows of the batches sent to workers.",
               lambda lane: lane.metrics.batch_rows),
    _histogram("iskander_wait_seconds", "seconds", "Time from the arrival of a request to its "
               "worker, for each batch with rows of it.", lambda lane: lane.metrics.wait_ns),
    _histogram("iskander_run_seconds", "seconds", "Run time of a batch in the worker.",
               lambda lane: lane.metrics.run_ns),
    Metric("iskander_step_seconds", "histogram", "seconds", ("step",), "Run time of each pipeline "
           "step of a batch.",
           lambda lane: [((name,), step_ns) for name, step_ns in lane.metrics.steps_ns.items()]),
    _histogram("iskander_request_seconds", "seconds", "Time from the arrival of a request to its "
               "results.", lambda lane: lane.metrics.total_ns),
    Metric("iskander_cost_row_seconds", "gauge", "seconds", ("worker",), "Learned cost of one more "
           "row on a worker.",
           lambda lane: [((str(i),), c.row_ns / NS_PER_S) for i, c in lane.costs.items()]),
    Metric("iskander_cost_base_seconds", "gauge", "seconds", ("worker",), "Learned fixed cost of a "
           "batch on a worker.",
           lambda lane: [((str(i),), c.base_ns / NS_PER_S) for i, c in lane.costs.items()]),
    _gauge("iskander_cadence_clients", "clients", "Clients with a known request period.",
           lambda lane: len(lane.arrivals)),
)  # fmt: skip


def _known(field: str) -> Callable[[Any], Readings]:
    """Read a field; none if it is unknown."""

    def read(source: Any) -> Readings:  # noqa: ANN401
        value = getattr(source, field)
        return [] if value is None else [((), value)]

    return read


WORKER_LABELS = ("worker",)
WORKER_METRICS: tuple[Metric[WorkerStats], ...] = (
    Metric("iskander_worker_state", "gauge", "", ("state",), "1 for the state of the worker slot, "
           "0 for the others.",
           lambda worker: [((state.value,), worker.state == state) for state in State]),
    _gauge("iskander_worker_incarnation", "", "Incarnation of the process in the slot; 0 for none.",
           lambda worker: worker.incarnation),
    _counter("iskander_worker_starts_total", "starts", "Processes that this gateway started for "
             "the slot.", lambda worker: worker.starts),
    Metric("iskander_worker_ends_total", "counter", "ends", ("how",), "Exits of its processes: "
           "crash, hang, boot_failure (before its models were loaded) or replaced (recycled).",
           lambda worker: [((how,), worker.ends.get(how, 0))
                           for how in sorted(ENDS.union(worker.ends))]),
    Metric("iskander_worker_heartbeat_age_seconds", "gauge", "seconds", (), "Time since the "
           "last heartbeat of the process; none without a process. It writes one every 0.1 s, but "
           "none during a batch.", _known("heartbeat_s")),
    _gauge("iskander_worker_failures", "ends", "Consecutive unexpected exits without steady "
           "service between them.", lambda worker: worker.failures),
    _gauge("iskander_worker_looping", "", "Whether it is in a crash loop; it then does not count "
           "for readiness.", lambda worker: worker.looping),
    _counter("iskander_worker_batches_total", "batches", "Batches that it completed.",
             lambda worker: worker.batches),
    Metric("iskander_worker_copied_bytes_total", "counter", "bytes", ("direction",), "Bytes that "
           "it copied between the arenas and its GPU: in or out; none without a GPU.",
           lambda worker: [((way,), count) for way, count in sorted(worker.copied_bytes.items())]),
    _gauge("iskander_worker_batches_in_flight", "batches", "Batches in flight.",
           lambda worker: worker.in_flight),
    _gauge("iskander_worker_credits", "batches", "Batches that it accepts beside those in flight.",
           lambda worker: worker.credits),
    _gauge("iskander_worker_output_capacity_bytes", "bytes", "Size of its output arena.",
           lambda worker: worker.output_capacity_bytes),
    _gauge("iskander_worker_output_leased_bytes", "bytes", "Leased bytes of its output arena.",
           lambda worker: worker.output_leased_bytes),
    _gauge("iskander_worker_output_huge_bytes", "bytes", "Bytes of its output arena in huge pages.",
           lambda worker: worker.output_huge_bytes),
    _gauge("iskander_worker_output_locked_bytes", "bytes", "Locked bytes of its output arena.",
           lambda worker: worker.output_locked_bytes),
    _gauge("iskander_worker_notices", "", "Resources that the system refused: planned cores, "
           "memory of its node, huge pages, a lock.", lambda worker: len(worker.notices)),
    _counter("iskander_worker_cpu_seconds_total", "seconds", "CPU time of the process in the slot; "
             "restarts at 0 with the next.", lambda worker: worker.cpu_s),
    _gauge("iskander_worker_resident_bytes", "bytes", "Resident memory of the process, with the "
           "arena pages that it has touched.", lambda worker: worker.resident_bytes),
)  # fmt: skip


def _gpu_gauge(name: str, unit: str, text: str, field: str) -> Metric[GpuStats]:
    return Metric(name, "gauge", unit, (), text, _known(field))


def _throttled(gpu: GpuStats) -> Readings:
    is_read = gpu.age_s is not None
    return [((reason,), reason in gpu.throttles) for reason in THROTTLES.values() if is_read]


def _ecc_errors(gpu: GpuStats) -> Readings:
    found = {"corrected": gpu.ecc_corrected, "uncorrected": gpu.ecc_uncorrected}
    return [((kind,), value) for kind, value in found.items() if value is not None]


def _xid_errors(gpu: GpuStats) -> Readings:
    known = {str(code): gpu.xids.get(str(code), 0) for code in XIDS}
    known["other"] = sum(gpu.xids.values()) - sum(known.values())
    return [((code,), count) for code, count in known.items()]


GPU_LABELS = ("gpu", "uuid")
GPU_METRICS: tuple[Metric[GpuStats], ...] = (
    Metric("iskander_gpu_state", "gauge", "", ("state",), "1 for the state of the GPU, 0 for the "
           "others.", lambda gpu: [((state,), gpu.state == state) for state in GPU_STATES]),
    Metric("iskander_gpu_reading_age_seconds", "gauge", "seconds", (), "Time since NVML answered "
           "for the GPU; none before the first answer.", _known("age_s")),
    _gpu_gauge("iskander_gpu_utilization_ratio", "", "Share of the last sample period in which a "
               "kernel ran on the GPU; none for MIG slices.", "utilization"),
    _gpu_gauge("iskander_gpu_memory_used_bytes", "bytes", "Used memory of the GPU, of all "
               "programs.", "memory_used_bytes"),
    _gpu_gauge("iskander_gpu_memory_total_bytes", "bytes", "Memory of the GPU.",
               "memory_total_bytes"),
    _gpu_gauge("iskander_gpu_temperature_celsius", "", "Temperature of the GPU.", "temperature_c"),
    _gpu_gauge("iskander_gpu_power_watts", "", "Power draw of the card.", "power_w"),
    Metric("iskander_gpu_throttled", "gauge", "", ("reason",), "Whether the clocks are lowered for "
           "the reason.", _throttled),
    Metric("iskander_gpu_ecc_errors_total", "counter", "errors", ("kind",), "Memory errors since "
           "the driver was loaded: corrected or uncorrected.", _ecc_errors),
    Metric("iskander_gpu_xid_errors_total", "counter", "errors", ("xid",), "Xid errors of the "
           "driver by number, since the start of the gateway; `other` for rare numbers.",
           _xid_errors),
    _gpu_gauge("iskander_gpu_pcie_generation", "", "Current generation of the PCIe link; an idle "
               "card lowers it.", "pcie_generation"),
    _gpu_gauge("iskander_gpu_pcie_lanes", "", "Current width of the PCIe link.", "pcie_width"),
    Metric("iskander_gpu_pcie_replays_total", "counter", "errors", (), "Repeated transfers on the "
           "PCIe link.", _known("pcie_replays")),
)  # fmt: skip


def _load_failed(gateway: MetricSources) -> Readings:
    served = {(lane.model.name, lane.model.version) for lane in gateway.models}
    failed = gateway.models.failures.keys()
    return [(each, each in failed) for each in sorted(served | failed)]


GATEWAY_METRICS: tuple[Metric[MetricSources], ...] = (
    Metric("iskander_build_info", "gauge", "", ("version", "python", "build"), "Always 1; labels "
           "are the versions, and whether the build is compiled.",
           lambda _: [((__version__, platform.python_version(), BUILD), 1)]),
    _gauge("iskander_ready", "", "Whether every model is ready and the server is not stopping.",
           lambda gateway: gateway.models.is_ready),
    Metric("iskander_model_ready", "gauge", "", LANE_LABELS, "Whether the model has its quorum of "
           "workers, none of them in a crash loop.",
           lambda gateway: [((lane.model.name, lane.model.version),
                             gateway.models.is_lane_ready(lane)) for lane in gateway.models]),
    _counter("iskander_model_loads_total", "loads", "New or changed model versions that enough "
             "workers loaded and that are served.",
             lambda gateway: gateway.models.counts["loaded"]),
    _counter("iskander_model_load_failures_total", "loads", "Failed loads of model versions; the "
             "previous ones are still served.", lambda gateway: gateway.models.counts["failed"]),
    _counter("iskander_model_unloads_total", "loads", "Model versions that were replaced or "
             "unloaded.", lambda gateway: gateway.models.counts["unloaded"]),
    Metric("iskander_model_generations", "gauge", "", ("stage",), "Generations of model versions "
           "by stage: loading, serving, or draining (accepted requests still run).",
           lambda gateway: list(gateway.models.stages())),
    Metric("iskander_model_load_failed", "gauge", "", LANE_LABELS, "Whether the last load of the "
           "model version failed; its previous files, if any, are still served.", _load_failed),
    _gauge("iskander_start_time_seconds", "seconds", "Unix time of the start of the gateway.",
           lambda gateway: gateway.started_wall_ns / NS_PER_S),
    Metric("iskander_reload_valid", "gauge", "", ("file",), RELOAD_VALID,
           lambda gateway: [((name,), each.is_valid) for name, each in gateway.reloads.items()]),
    Metric("iskander_reload_valid_timestamp_seconds", "gauge", "seconds", ("file",),
           RELOAD_VALID_AT,
           lambda gateway: [((name,), each.valid_ns / NS_PER_S)
                            for name, each in gateway.reloads.items()]),
    Metric("iskander_tls_expiry_timestamp_seconds", "gauge", "seconds", (), "Unix time at which "
           "the first certificate of the chain expires; none without TLS.",
           lambda gateway: [((), expiry_s)] if (expiry_s := gateway.expiry_s()) else []),
    _gauge("iskander_streams", "streams", "Open Flight streams.",
           lambda gateway: len(gateway.streams)),
    _gauge("iskander_open_calls", "calls", "Open inference calls of other protocols.",
           lambda gateway: len(gateway.calls)),
    Metric("iskander_calls_ended_total", "counter", "calls", ("protocol", "code"), "Ended calls by "
           "protocol (flight, oip, health, reflection, other, http) and gRPC or HTTP status; "
           "CANCELLED includes lost connections. A Flight stream is one call.",
           lambda gateway: sorted(gateway.calls_ended.items())),
    _counter("iskander_late_messages_total", "messages", "Responses of workers to batches that "
             "had ended.", lambda gateway: gateway.counts["late_messages"]),
    _gauge("iskander_inferential_clients", "clients", "Connected Inferential clients.",
           lambda gateway: len(gateway.clients)),
    Metric("iskander_inferential_observations_total", "counter", "observations", ("outcome",),
           "Inferential observations by outcome: answered, late (deadline passed), unsent (client "
           "disconnected), or the code of the error.",
           lambda gateway: [((name,), gateway.outcomes.get(name, 0))
                            for name in sorted({*OBSERVED, *gateway.outcomes})]),
    _gauge("iskander_source_reads", "reads", "Open reads of sources.",
           lambda gateway: len(gateway.reads)),
    Metric("iskander_trace_spans_total", "counter", "spans", ("outcome",), "Spans of sampled "
           "requests by outcome: exported, failed (export error, or the export process ended), "
           "limited (`tracing.spans_per_s`) or queue_full (`tracing.queue`).",
           lambda gateway: [((name,), gateway.spans.get(name, 0)) for name in SPAN_OUTCOMES]),
    Metric("iskander_samples_total", "counter", "requests", ("outcome",), "Sampled requests by "
           "outcome: handed_over to the consumers, or dropped: pressure (a request needed the "
           "memory), held_limit (`observation.held_requests`, `held_bytes`), expired "
           "(`observation.held_s`), queue_full (the socket), busy (`observation.buffer_bytes`), "
           "not_running or process_lost (the observer process), worker_lost.",
           lambda gateway: [((name,), gateway.samples.get(name, 0)) for name in SAMPLE_OUTCOMES]),
    _gauge("iskander_samples_held", "requests", "Sampled requests whose memory in the arenas is "
           "held until it is copied.", lambda gateway: gateway.samples_held()[0]),
    _gauge("iskander_samples_held_bytes", "bytes", "Bytes of this memory.",
           lambda gateway: gateway.samples_held()[1]),
    _counter("iskander_observer_starts_total", "starts", "Started observer processes.",
             lambda gateway: gateway.observer_starts()),
    Metric("iskander_prediction_log_samples_total", "counter", "requests", ("outcome",), "Requests "
           "for the prediction log by outcome: logged (in a complete file), or dropped: "
           "buffer_full (`prediction_log.buffer_bytes`), write_failed (in a file that could not be "
           "written), spool_full (`prediction_log.spool_bytes`), unknown_column (`omit` or `hash` "
           "names no column).",
           lambda gateway: [((name,), gateway.log_counts().get(name, 0)) for name in LOG_OUTCOMES]),
    _counter("iskander_prediction_log_files_total", "files", "Complete files of the prediction "
             "log.", lambda gateway: gateway.log_counts().get("files", 0)),
    _counter("iskander_prediction_log_bytes_total", "bytes", "Bytes of these files.",
             lambda gateway: gateway.log_counts().get("bytes", 0)),
    _counter("iskander_source_rows_total", "rows", "Rows sent to readers of sources.",
             lambda gateway: gateway.read_counts.get("rows", 0)),
    _counter("iskander_source_bytes_total", "bytes", "Bytes of these rows.",
             lambda gateway: gateway.read_counts.get("bytes", 0)),
    Metric("iskander_source_reads_ended_total", "counter", "reads", ("result",), "Ended reads of "
           "sources: completed, cancelled, or the code of the error.",
           lambda gateway: _read_results(gateway.read_counts)),
    Metric("iskander_access_refusals_total", "counter", "calls", ("code",), "Calls without a "
           "sufficient token.",
           lambda gateway: [((name,), gateway.refused.get(name, 0)) for name in REFUSED]),
    Metric("iskander_audit_records_total", "counter", "records", ("result",), "Records of the "
           "audit log: written to `access.audit_file`, logged, or dropped for a full queue.",
           lambda gateway: [((name,), gateway.audited.get(name, 0)) for name in AUDITED]),
    Metric("iskander_grant_outstanding_rows", "gauge", "rows", ("grant",), "Rows admitted and not "
           "computed of each grant with limits; `(other)`: of those after the first 255.",
           lambda gateway: [((name,), rows) for name, rows, _ in gateway.grants()]),
    Metric("iskander_grant_requests_total", "counter", "requests", ("grant",), "Admitted requests "
           "of each grant with limits.",
           lambda gateway: [((name,), counts.get("requests", 0))
                            for name, _, counts in gateway.grants()]),
    Metric("iskander_grant_rows_total", "counter", "rows", ("grant",), "Rows of these requests.",
           lambda gateway: [((name,), counts.get("rows", 0))
                            for name, _, counts in gateway.grants()]),
    Metric("iskander_grant_refusals_total", "counter", "requests", ("grant", "code"), "Requests "
           "above the limits of their grant, by error code.",
           lambda gateway: [((name, kind.code), counts.get(f"refused.{kind.code}", 0))
                            for name, _, counts in gateway.grants() for kind in OVER_QUOTA]),
    _gauge("iskander_connections", "connections", "Open connections of all ports.",
           lambda gateway: gateway.connections()),
    _gauge("iskander_connections_limit", "connections", "Connections that the limit of file "
           "descriptors permits.", lambda gateway: gateway.connections_max()),
    _gauge("iskander_descriptors", "descriptors", "Open file descriptors of the gateway.",
           lambda _: open_descriptors()),
    _gauge("iskander_descriptors_limit", "descriptors", "Limit of open file descriptors "
           "(RLIMIT_NOFILE).", lambda _: descriptor_limit()),
    Metric("iskander_connections_ended_total", "counter", "connections", ("reason",),
           "Connections, or messages of them, that the server ended for a limit, a timeout, the "
           "maximum age or a protocol violation.",
           lambda gateway: [((name,), gateway.connections_ended.get(name, 0))
                            for name in sorted({*LIMITS, *TIMEOUTS, *gateway.connections_ended})]),
    _gauge("iskander_receive_limit_bytes", "bytes", "Limit of buffered received bytes.",
           lambda gateway: gateway.budget.limit_bytes),
    _gauge("iskander_receive_used_bytes", "bytes", "Buffered received bytes.",
           lambda gateway: gateway.budget.used_bytes),
    _counter("iskander_receive_refusals_total", "calls", "Calls rejected for lack of receive "
             "memory.", lambda gateway: gateway.budget.evictions),
    _gauge("iskander_input_capacity_bytes", "bytes", "Size of the input arena.",
           lambda gateway: gateway.input_arena.capacity_bytes),
    _gauge("iskander_input_leased_bytes", "bytes", "Leased bytes of the input arena.",
           lambda gateway: gateway.input_arena.leased_bytes),
    _gauge("iskander_input_huge_bytes", "bytes", "Bytes of the input arena in huge pages.",
           lambda gateway: gateway.input_backing.huge_bytes),
    _gauge("iskander_input_locked_bytes", "bytes", "Locked bytes of the input arena.",
           lambda gateway: gateway.input_backing.locked_bytes),
    _gauge("iskander_shared_regions", "regions", "Shared-memory regions of clients.",
           lambda gateway: len(gateway.regions)),
    _gauge("iskander_shared_bytes", "bytes", "Bytes of the shared-memory regions.",
           lambda gateway: sum(gateway.regions.values())),
    _histogram("iskander_loop_lag_seconds", "seconds", "Lag of the gateway's event loop, measured "
               "every 50 ms.", lambda gateway: gateway.loop_lag_ns),
    _counter("iskander_cpu_seconds_total", "seconds", "CPU time of the gateway.",
             lambda _: cpu_s(os.getpid())),
    _gauge("iskander_memory_limit_bytes", "bytes", "Memory of the machine, or of the gateway's "
           "cgroup if less.", lambda _: memory_bytes()),
    _gauge("iskander_resident_bytes", "bytes", "Resident memory of the gateway, with the arena "
           "pages that it has touched.", lambda _: resident_bytes(os.getpid())),
)  # fmt: skip

SCOPES: tuple[Scope, ...] = (
    ("gateway", (), GATEWAY_METRICS),
    ("model version", LANE_LABELS, LANE_METRICS),
    ("worker", WORKER_LABELS, WORKER_METRICS),
    ("GPU", GPU_LABELS, GPU_METRICS),
)


class Collector:
    """Reads the metrics of all scopes."""

    def __init__(self, sources: MetricSources, scopes: Sequence[Scope] = SCOPES) -> None:
        self._sources = sources
        self._scopes = scopes

    async def render(self, is_openmetrics: bool) -> bytes:
        """Render the page for Prometheus in small steps."""
        pages = []
        workers = await read_workers(self._sources)
        for metric, labels, sources in self._metrics(workers):
            step = SOURCES_PER_STEP[metric.kind]
            for start in range(0, max(len(sources), 1), step):
                family = _family(metric, labels, sources[start : start + step])
                pages.append(_page(family, is_first=start == 0, is_openmetrics=is_openmetrics))
                await asyncio.sleep(0)
        if is_openmetrics:
            pages.append(_EOF)
        return b"".join(pages)

    def _metrics(
        self, workers: Sequence[WorkerStats]
    ) -> Iterator[tuple[Metric[Any], tuple[str, ...], Sources]]:
        """Return each metric with the labels and the objects of its scope."""
        gateway = self._sources
        sources: dict[str, Sources] = {
            "gateway": [((), gateway)],
            "model version": [
                ((lane.model.name, lane.model.version), lane) for lane in gateway.models
            ],
            "worker": [((str(worker.index),), worker) for worker in workers],
            "shadow version": [(pair.key, pair) for pair in gateway.shadows()],
            "drift": [((model.model, model.version), model) for model in gateway.drift().models],
            "GPU": [((gpu.gpu, gpu.uuid), gpu) for gpu in read_gpus(gateway)],
        }
        for scope, labels, metrics in self._scopes:
            for metric in metrics:
                yield metric, labels, sources[scope]


def _family(metric: Metric[Any], scope_labels: tuple[str, ...], sources: Sources) -> Family:
    unit = metric.unit if metric.unit in BASE_UNITS else ""
    labels = (*scope_labels, *metric.labels)
    builder = _KINDS[metric.kind](metric.name, metric.sentence, labels=labels, unit=unit)
    divisor = NS_PER_S if unit == "seconds" else 1
    for names, source in sources:
        for more, value in metric.read(source):
            if isinstance(value, Histogram):
                bounds = [repr(bound / divisor) for bound in value.bounds]
                buckets = list(zip((*bounds, "+Inf"), accumulate(value.counts), strict=True))
                builder.add_metric((*names, *more), buckets, value.sum / divisor)
            else:
                builder.add_metric((*names, *more), float(value))
    family: Family = builder
    return family


_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "unknown": UnknownMetricFamily,
}


def _page(family: Family, *, is_first: bool, is_openmetrics: bool) -> bytes:
    """Render samples of a metric, with the comment lines only for the first step."""
    generate = openmetrics.generate_latest if is_openmetrics else exposition.generate_latest
    # Names are plain ASCII; escaping them for each sample costs half of the time.
    page = generate(cast(Any, SimpleNamespace(collect=lambda: [family])), openmetrics.ALLOWUTF8)
    if is_first:
        return page.removesuffix(_EOF)
    return b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(b"#"))


_EOF = b"# EOF\n"
