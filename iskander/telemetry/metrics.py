"""Every metric, declared once: name, kind, unit, labels, sentence, and where its value is read.

The reference page comes from the tables below, and so does what Prometheus gets. Values are read
when they are asked for; the path of a batch counts in `Counts` and a `Histogram` and no more.
A scrape is made in short turns, so that no batch waits for a long page.

Runs on: gateway loop. Source: Prometheus text format 0.0.4 and OpenMetrics 1.0.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics

from iskander import __version__
from iskander.clock import NS_PER_S
from iskander.errors import PermissionDenied, Unauthenticated
from iskander.measurement.histogram import Histogram
from iskander.measurement.process_usage import cpu_s, resident_bytes
from iskander.scheduling.batcher import Reason
from iskander.supervision.lifecycle import State
from iskander.telemetry.metric_sources import MetricSources

if TYPE_CHECKING:
    from iskander.scheduling.lane import Lane
    from iskander.supervision.worker import Worker

SOURCES_A_TURN = {"counter": 16, "gauge": 16, "histogram": 2}
"""What a metric is read from before others have their turn: up to 72 samples of 8 us."""

ENDS = frozenset(("crash", "hang", "boot_failure", "replaced"))
BASE_UNITS = ("seconds", "bytes")
"""Units that end a name, as Prometheus wants it."""
OUTCOMES = ("completed", "withdrawn")
OBSERVED = ("answered", "late", "unsent")
TIMEOUTS = tuple(
    f"{name}_timeout" for name in ("preface", "headers", "idle", "keepalive", "message", "response")
)
REFUSED = (Unauthenticated.code, PermissionDenied.code)

Source = TypeVar("Source")
Readings = Iterable[tuple[tuple[str, ...], float | Histogram]]
Sources = Sequence[tuple[tuple[str, ...], Any]]


@dataclass(frozen=True)
class Metric(Generic[Source]):
    """One metric.

    Attributes:
        name: As Prometheus conventions have it; a histogram of seconds is recorded in nanoseconds.
        unit: Of its values; empty where they are a yes or no, or a number of its own kind.
        labels: Beside those of what it is read from.
        sentence: What it means.
        read: Its values now, each with its labels.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    labels: tuple[str, ...]
    sentence: str
    read: Callable[[Source], Readings]


def _one(read: Callable[[Source], float | Histogram]) -> Callable[[Source], Readings]:
    return lambda source: [((), read(source))]


def _count(key: str) -> Callable[[Lane], Readings]:
    return lambda lane: [((), lane.counts[key])]


def _counts(prefix: str, known: Iterable[str] = ()) -> Callable[[Lane], Readings]:
    """Counts whose key begins with a prefix, by what follows; `known` ones are there at 0."""

    def read(lane: Lane) -> Readings:
        counts = lane.counts
        keys = {key for key in counts if key.startswith(prefix)}.union(known)
        return [((key.removeprefix(prefix),), counts[key]) for key in sorted(keys)]

    return read


LANE_LABELS = ("model", "version")
LANE_METRICS: tuple[Metric[Lane], ...] = (
    Metric("iskander_model_workers", "gauge", "workers", (), "Workers that take its batches now.",
           _one(lambda lane: len(lane.ready))),
    Metric("iskander_queue_requests", "gauge", "requests", (), "Requests that wait.",
           _one(lambda lane: lane.queue.requests)),
    Metric("iskander_queue_rows", "gauge", "rows", (), "Rows that wait.",
           _one(lambda lane: lane.queue.rows)),
    Metric("iskander_queue_bytes", "gauge", "bytes", (), "Bytes of the inputs that wait.",
           _one(lambda lane: lane.queue.bytes)),
    Metric("iskander_requests_total", "counter", "requests", (), "Requests that were admitted.",
           _count("requests")),
    Metric("iskander_rows_total", "counter", "rows", (), "Rows of admitted requests.",
           _count("rows")),
    Metric("iskander_batches_total", "counter", "batches", (), "Batches sent to workers.",
           _count("batches")),
    Metric("iskander_requests_ended_total", "counter", "requests", ("outcome",), "Admitted "
           "requests that did not fail: completed or withdrawn (the caller left).",
           lambda lane: [((name,), lane.counts[name]) for name in OUTCOMES]),
    Metric("iskander_requests_retried_total", "counter", "requests", (), "Requests sent again "
           "after their worker died.", _count("retried")),
    Metric("iskander_worker_deaths_total", "counter", "workers", (), "Workers that died, or hung, "
           "while they ran a batch of it.", _count("worker_deaths")),
    Metric("iskander_model_isolated", "gauge", "", (), "Whether it has a worker of its own, since "
           "its batches ended others.", _one(lambda lane: lane.is_isolated)),
    Metric("iskander_model_quarantined", "gauge", "", (), "Whether its requests are refused, since "
           "its batches ended workers again and again.",
           _one(lambda lane: lane.quarantine is not None)),
    Metric("iskander_refusals_total", "counter", "requests", ("code",), "Requests that were "
           "refused before they ran, by error code.", _counts("refused.")),
    Metric("iskander_failures_total", "counter", "requests", ("code",), "Requests that a worker "
           "had and did not complete, by error code.", _counts("failed.")),
    Metric("iskander_deadlines_total", "counter", "requests", ("result",), "Requests with a "
           "deadline: hit (its results were there in time) or missed.",
           _counts("deadline.", ("deadline.hit", "deadline.missed"))),
    Metric("iskander_batches_closed_total", "counter", "batches", ("reason",), "Batches by why "
           "nothing more was put in: full, idle (a worker was free), linger (waited long enough), "
           "deadline (one could wait no longer), shape (the next does not fit with it) or alone "
           "(nothing else may be with it).", _counts("closed.", Reason)),
    Metric("iskander_batch_rows", "histogram", "rows", (), "Rows of the batches sent to workers.",
           _one(lambda lane: lane.measures.batch_rows)),
    Metric("iskander_wait_seconds", "histogram", "seconds", (), "From a request's arrival to a "
           "worker, for each batch with rows of it.", _one(lambda lane: lane.measures.wait_ns)),
    Metric("iskander_run_seconds", "histogram", "seconds", (), "What a worker took for a batch.",
           _one(lambda lane: lane.measures.run_ns)),
    Metric("iskander_step_seconds", "histogram", "seconds", ("step",), "What each step of a "
           "pipeline took for a batch.",
           lambda lane: [((name,), took) for name, took in lane.measures.steps_ns.items()]),
    Metric("iskander_request_seconds", "histogram", "seconds", (), "From a request's arrival to "
           "its results.", _one(lambda lane: lane.measures.total_ns)),
    Metric("iskander_cost_row_seconds", "gauge", "seconds", ("worker",), "What one more row costs "
           "on a worker, as learned.",
           lambda lane: [((str(i),), c.row_ns / NS_PER_S) for i, c in lane.costs.items()]),
    Metric("iskander_cost_base_seconds", "gauge", "seconds", ("worker",), "What a batch costs on a "
           "worker whatever its rows, as learned.",
           lambda lane: [((str(i),), c.base_ns / NS_PER_S) for i, c in lane.costs.items()]),
    Metric("iskander_cadence_clients", "gauge", "clients", (), "Clients whose rhythm is known.",
           _one(lambda lane: len(lane.cadence))),
)  # fmt: skip

WORKER_LABELS = ("worker",)
WORKER_METRICS: tuple[Metric[Worker], ...] = (
    Metric("iskander_worker_state", "gauge", "", ("state",), "1 for the state that the worker's "
           "place is in, 0 for the others.",
           lambda worker: [((state.value,), worker.state is state) for state in State]),
    Metric("iskander_worker_incarnation", "gauge", "", (), "Number of the process that fills the "
           "place; 0 while there is none.", _one(lambda worker: worker.incarnation)),
    Metric("iskander_worker_starts_total", "counter", "starts", (), "Processes that this gateway "
           "started for the place.", _one(lambda worker: worker.starts)),
    Metric("iskander_worker_ends_total", "counter", "ends", ("how",), "Its processes that ended: "
           "crash, hang, boot_failure (before it had its models) or replaced (in order).",
           lambda worker: [((how,), worker.ends[how]) for how in sorted(ENDS.union(worker.ends))]),
    Metric("iskander_worker_failures", "gauge", "ends", (), "Ends in a row that nobody asked for, "
           "with no steady service between them.", _one(lambda worker: worker.failures)),
    Metric("iskander_worker_looping", "gauge", "", (), "Whether it fails again and again, and "
           "counts for no readiness.", _one(lambda worker: worker.is_looping)),
    Metric("iskander_worker_batches_total", "counter", "batches", (), "Batches that it computed.",
           _one(lambda worker: worker.batches)),
    Metric("iskander_worker_batches_in_flight", "gauge", "batches", (), "Batches that it has.",
           _one(lambda worker: len(worker.in_flight))),
    Metric("iskander_worker_credits", "gauge", "batches", (), "Batches that it may have beside "
           "those.", _one(lambda worker: worker.credits)),
    Metric("iskander_worker_output_capacity_bytes", "gauge", "bytes", (), "Its output arena.",
           _one(lambda worker: worker.output_arena.capacity_bytes)),
    Metric("iskander_worker_output_leased_bytes", "gauge", "bytes", (), "Leased in its output "
           "arena.", _one(lambda worker: worker.output_arena.leased_bytes)),
    Metric("iskander_worker_output_huge_bytes", "gauge", "bytes", (), "Of its output arena in huge "
           "pages.", _one(lambda worker: worker.backing.huge_bytes)),
    Metric("iskander_worker_output_locked_bytes", "gauge", "bytes", (), "Of its output arena that "
           "are never swapped out.", _one(lambda worker: worker.backing.locked_bytes)),
    Metric("iskander_worker_notices", "gauge", "", (), "What was refused to it: cores of the plan, "
           "memory of its node, huge pages, a lock.", _one(lambda worker: len(worker.notices))),
    Metric("iskander_worker_cpu_seconds_total", "counter", "seconds", (), "CPU time of the process "
           "that fills the place; begins anew with the next.",
           _one(lambda worker: cpu_s(worker.pid) if worker.pid else 0)),
    Metric("iskander_worker_resident_bytes", "gauge", "bytes", (), "Memory of the process, with "
           "what it has touched of the arenas.",
           _one(lambda worker: resident_bytes(worker.pid) if worker.pid else 0)),
)  # fmt: skip

GATEWAY_METRICS: tuple[Metric[MetricSources], ...] = (
    Metric("iskander_build_info", "gauge", "", ("version", "python"), "Always 1; what runs.",
           lambda _: [((__version__, platform.python_version()), 1)]),
    Metric("iskander_ready", "gauge", "", (), "Whether every model is ready and it does not stop.",
           _one(lambda observed: observed.models.is_ready)),
    Metric("iskander_model_ready", "gauge", "", LANE_LABELS, "Whether the model has the workers "
           "that it needs, none of them in a crash loop.",
           lambda observed: [((lane.model.name, lane.model.version),
                              observed.models.is_lane_ready(lane)) for lane in observed.models]),
    Metric("iskander_model_loads_total", "counter", "loads", (), "Model versions, new or changed, "
           "that were loaded by enough workers and put in place.",
           _one(lambda observed: observed.models.counts["loaded"])),
    Metric("iskander_model_load_failures_total", "counter", "loads", (), "Those that were not "
           "served: what was served in their place still is.",
           _one(lambda observed: observed.models.counts["failed"])),
    Metric("iskander_model_unloads_total", "counter", "loads", (), "Model versions that were "
           "replaced, or taken away.",
           _one(lambda observed: observed.models.counts["unloaded"])),
    Metric("iskander_model_generations", "gauge", "", ("stage",), "Model versions with the files "
           "of one moment, by stage: loading, serving, or draining (finishing what they accepted).",
           lambda observed: list(observed.models.stages())),
    Metric("iskander_uptime_seconds", "gauge", "seconds", (), "Since the gateway was started.",
           _one(lambda observed: observed.uptime_s)),
    Metric("iskander_streams", "gauge", "streams", (), "Flight's streams that are open.",
           _one(lambda observed: len(observed.streams))),
    Metric("iskander_calls", "gauge", "calls", (), "Open calls that compute, of other protocols.",
           _one(lambda observed: len(observed.calls))),
    Metric("iskander_late_messages_total", "counter", "messages", (), "Answers of workers that "
           "nobody waited for any more.", _one(lambda observed: observed.counts["late_messages"])),
    Metric("iskander_inferential_clients", "gauge", "clients", (), "Clients of Inferential that "
           "are connected.", _one(lambda observed: len(observed.clients))),
    Metric("iskander_inferential_observations_total", "counter", "observations", ("outcome",),
           "Observations by what came of them: answered, late (its deadline had passed), unsent "
           "(its client had gone), or the code of its error.",
           lambda observed: [((name,), observed.outcomes.get(name, 0))
                             for name in sorted({*OBSERVED, *observed.outcomes})]),
    Metric("iskander_access_refusals_total", "counter", "calls", ("code",), "Calls that showed no "
           "token, or none that was enough.",
           lambda observed: [((name,), observed.refused.get(name, 0)) for name in REFUSED]),
    Metric("iskander_connections_ended_total", "counter", "connections", ("reason",),
           "Connections, and messages of them, that the server ended for a limit, a timeout or a "
           "broken protocol.",
           lambda observed: [((name,), observed.connections_ended.get(name, 0))
                             for name in sorted({*TIMEOUTS, *observed.connections_ended})]),
    Metric("iskander_receive_limit_bytes", "gauge", "bytes", (), "Received bytes that may be held "
           "before they are processed.", _one(lambda observed: observed.budget.limit_bytes)),
    Metric("iskander_receive_used_bytes", "gauge", "bytes", (), "Received bytes that are held.",
           _one(lambda observed: observed.budget.used_bytes)),
    Metric("iskander_receive_refusals_total", "counter", "calls", (), "Calls that were refused "
           "for want of memory to receive their messages.",
           _one(lambda observed: observed.budget.refused)),
    Metric("iskander_input_capacity_bytes", "gauge", "bytes", (), "The input arena.",
           _one(lambda observed: observed.input_arena.capacity_bytes)),
    Metric("iskander_input_leased_bytes", "gauge", "bytes", (), "Leased in the input arena.",
           _one(lambda observed: observed.input_arena.leased_bytes)),
    Metric("iskander_input_huge_bytes", "gauge", "bytes", (), "Of the input arena in huge pages.",
           _one(lambda observed: observed.input_backing.huge_bytes)),
    Metric("iskander_input_locked_bytes", "gauge", "bytes", (), "Of the input arena that are never "
           "swapped out.", _one(lambda observed: observed.input_backing.locked_bytes)),
    Metric("iskander_shared_regions", "gauge", "regions", (), "Regions of memory that are lent to "
           "clients.", _one(lambda observed: len(observed.regions))),
    Metric("iskander_shared_bytes", "gauge", "bytes", (), "Their bytes.",
           _one(lambda observed: sum(observed.regions.values()))),
    Metric("iskander_loop_lag_seconds", "histogram", "seconds", (), "How late the gateway's loop "
           "came to what was due, looked at every 50 ms: what a message would have waited for.",
           _one(lambda observed: observed.loop_lag_ns)),
    Metric("iskander_cpu_seconds_total", "counter", "seconds", (), "CPU time of the gateway.",
           _one(lambda _: cpu_s(os.getpid()))),
    Metric("iskander_resident_bytes", "gauge", "bytes", (), "Memory of the gateway, with what it "
           "has touched of the arenas.", _one(lambda _: resident_bytes(os.getpid()))),
)  # fmt: skip

SCOPES: tuple[tuple[str, tuple[str, ...], tuple[Metric[Any], ...]], ...] = (
    ("gateway", (), GATEWAY_METRICS),
    ("model version", LANE_LABELS, LANE_METRICS),
    ("worker", WORKER_LABELS, WORKER_METRICS),
)
"""What metrics are of, the labels that say which one, and the metrics."""


class Collector:
    """Reads every metric; what `prometheus_client` calls a collector."""

    def __init__(self, observed: MetricSources) -> None:
        self._observed = observed

    def collect(self) -> Iterator[Family]:
        """Each metric with its values now."""
        for metric, labels, sources in self._metrics():
            yield _family(metric, labels, sources)

    def reasons(self) -> list[str]:
        """Why the gateway is not ready; empty where it is."""
        return self._observed.models.reasons()

    async def render(self, *, is_openmetrics: bool) -> bytes:
        """The page for Prometheus, in short turns."""
        pages = []
        for metric, labels, sources in self._metrics():
            step = SOURCES_A_TURN[metric.kind]
            for start in range(0, max(len(sources), 1), step):
                family = _family(metric, labels, sources[start : start + step])
                pages.append(_page(family, is_first=start == 0, is_openmetrics=is_openmetrics))
                await asyncio.sleep(0)
        if is_openmetrics:
            pages.append(_EOF)
        return b"".join(pages)

    def _metrics(self) -> Iterator[tuple[Metric[Any], tuple[str, ...], Sources]]:
        """Each metric, the labels of what it is of, and what it is read from."""
        observed = self._observed
        sources: tuple[Sources, ...] = (
            [((), observed)],
            [((lane.model.name, lane.model.version), lane) for lane in observed.models],
            [((str(worker.index),), worker) for worker in observed.models.workers],
        )
        for (_, labels, metrics), of in zip(SCOPES, sources, strict=True):
            for metric in metrics:
                yield metric, labels, of


def _family(metric: Metric[Any], scope_labels: tuple[str, ...], sources: Sources) -> Family:
    unit = metric.unit if metric.unit in BASE_UNITS else ""
    labels = (*scope_labels, *metric.labels)
    made = _KINDS[metric.kind](metric.name, metric.sentence, labels=labels, unit=unit)
    divisor = NS_PER_S if unit == "seconds" else 1
    for names, source in sources:
        for more, value in metric.read(source):
            if isinstance(value, Histogram):
                bounds = [repr(bound / divisor) for bound in value.bounds]
                counts = accumulate(value.snapshot().counts)
                buckets = list(zip((*bounds, "+Inf"), counts, strict=True))
                made.add_metric((*names, *more), buckets, value.sum / divisor)
            else:
                made.add_metric((*names, *more), float(value))
    family: Family = made
    return family


_KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _page(family: Family, *, is_first: bool, is_openmetrics: bool) -> bytes:
    """Some samples of a metric as text; the lines about the metric itself only the first time."""
    generate = openmetrics.generate_latest if is_openmetrics else exposition.generate_latest
    # Every name is plain ASCII; escaping it anew for each sample takes half of the time.
    page = generate(cast(Any, SimpleNamespace(collect=lambda: [family])), openmetrics.ALLOWUTF8)
    if is_first:
        return page.removesuffix(_EOF)
    return b"".join(line for line in page.splitlines(keepends=True) if not line.startswith(b"#"))


_EOF = b"# EOF\n"
