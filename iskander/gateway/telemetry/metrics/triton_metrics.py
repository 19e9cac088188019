"""Metrics of model versions under Triton's names, for dashboards made for Triton.

Triton's page calls them counters, but their names lack `_total`, so here they have no type; `rate`
and `increase` do not need one. `scripts/gen_reference.py` lists what is left out.

Runs on: gateway loop. Source: Triton Inference Server, `docs/user_guide/metrics.md`.
"""

from __future__ import annotations

from collections.abc import Callable

from iskander.errors import Cancelled, DeadlineExceeded, NotReady
from iskander.foundation.clock import NS_PER_US
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.telemetry.metrics.exposition import LANE_LABELS, Metric, Readings, Scope

FAILURE_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def failure_reason(key: str) -> str:
    """Return Triton's reason for a counter of a lane, such as `refused.queue_full`; or empty."""
    how, _, code = key.partition(".")
    if how == "withdrawn" or code == Cancelled.code:
        return "CANCELED"
    if how == "refused":
        return "OTHER" if code == NotReady.code else "REJECTED"
    if how == "failed":
        return "REJECTED" if code == DeadlineExceeded.code else "BACKEND"
    return ""


def _failures(lane: Lane) -> Readings:
    counts = dict.fromkeys(FAILURE_REASONS, 0)
    for key, count in lane.counts.items():
        if reason := failure_reason(key):
            counts[reason] += count
    return [((reason,), count) for reason, count in counts.items()]


def _value(name: str, unit: str, text: str, read: Callable[[Lane], float]) -> Metric[Lane]:
    return Metric(name, "unknown", unit, (), text, lambda lane: [((), read(lane))])


TRITON_METRICS: tuple[Metric[Lane], ...] = (
    _value("nv_inference_request_success", "requests", "Requests with results.",
           lambda lane: lane.counts["completed"]),
    Metric("nv_inference_request_failure", "unknown", "requests", ("reason",), "Requests without "
           "results: REJECTED before they ran, CANCELED by the caller, BACKEND (failed in a "
           "worker) or OTHER (no worker was ready).", _failures),
    _value("nv_inference_count", "rows", "Rows of the batches sent to workers.",
           lambda lane: lane.metrics.batch_rows.sum),
    _value("nv_inference_exec_count", "batches", "Batches sent to workers.",
           lambda lane: lane.counts["batches"]),
    _value("nv_inference_request_duration_us", "us", "Time of all requests with results from their "
           "arrival to their results.", lambda lane: lane.metrics.total_ns.sum // NS_PER_US),
    _value("nv_inference_queue_duration_us", "us", "Time of all requests from their arrival to "
           "their worker.", lambda lane: lane.metrics.wait_ns.sum // NS_PER_US),
    _value("nv_inference_compute_infer_duration_us", "us", "Run time of the last batch of all "
           "requests with results.", lambda lane: lane.metrics.request_run_ns // NS_PER_US),
    Metric("nv_inference_pending_request_count", "gauge", "requests", (), "Queued requests.",
           lambda lane: [((), lane.queue.requests)]),
)  # fmt: skip

TRITON_SCOPE: Scope = ("model version", LANE_LABELS, TRITON_METRICS)
