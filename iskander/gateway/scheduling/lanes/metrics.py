"""Latency metrics of a lane: histograms since the start, and rings of the latest values.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.contract.backend_manifest import STEPS_MAX
from iskander.foundation.clock import NS_PER_MS
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, ROWS_BOUNDS, Histogram
from iskander.foundation.measurement.recent_values import RecentValues
from iskander.gateway.scheduling.lanes.arrivals import CLIENTS_MAX
from iskander.gateway.scheduling.request import Request, Terms
from iskander.interprocess.control.messages import ModelSpec


class LaneMetrics:
    """Metrics of one lane.

    Attributes:
        wait_ns: Time of requests until their rows are sent to a worker.
        run_ns: Run time of batches in the worker.
        total_ns: Time of requests until their results are complete.
        request_run_ns: Run time of the last batch of each completed request, in total.
        batch_rows: Rows of batches.
        steps_ns: Run time of the steps of a pipeline, by name.
    """

    def __init__(self, model: ModelSpec, recent: RecentValues) -> None:
        self.wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self.run_ns = Histogram(LATENCY_BOUNDS_NS)
        self.total_ns = Histogram(LATENCY_BOUNDS_NS)
        self.request_run_ns = 0
        self.batch_rows = Histogram(ROWS_BOUNDS)
        self.steps_ns: dict[str, Histogram] = {}
        self._append_total = recent.ring("e2e_latency_ms").append
        self._append_wait = recent.ring("scheduling_wait_ms").append
        self._append_run = recent.ring("inference_latency_ms").append
        self._append_rows = recent.ring("batch_size").append
        self._append_depth = recent.ring("queue_depth").append
        self._append_retries = recent.ring("dispatch_retries").append
        self._labels = {"model": model.name, "version": model.version}
        self._client_labels: dict[str, dict[str, str]] = {}

    def on_sent(self, rows: int, waits_ns: list[int], queued: int, now_ns: int) -> None:
        """Record a batch sent to a worker, the waits of its requests, and the queue depth."""
        self.batch_rows.record(rows)
        self._append_rows((now_ns, rows, self._labels))
        self._append_depth((now_ns, queued, self._labels))
        for waited_ns in waits_ns:
            self.wait_ns.record(waited_ns)

    def on_completed(self, request: Request, run_ns: int, now_ns: int) -> None:
        """Record a completed request; `run_ns` is the run time of its last batch."""
        labels = self._labels_of(request.terms)
        total_ns = now_ns - request.arrived_ns
        self.total_ns.record(total_ns)
        self.request_run_ns += run_ns
        self._append_total((now_ns, total_ns / NS_PER_MS, labels))
        self._append_wait((now_ns, (request.sent_ns - request.arrived_ns) / NS_PER_MS, labels))
        self._append_run((now_ns, run_ns / NS_PER_MS, labels))

    def on_stepped(self, steps: tuple[tuple[str, int], ...]) -> None:
        """Record the run time of each pipeline step of a batch, in nanoseconds."""
        for name, step_ns in steps:
            if name not in self.steps_ns and len(self.steps_ns) < STEPS_MAX:
                self.steps_ns[name] = Histogram(LATENCY_BOUNDS_NS)
            if name in self.steps_ns:
                self.steps_ns[name].record(step_ns)

    def on_put_back(self, request: Request, now_ns: int) -> None:
        """Record a retry."""
        self._append_retries((now_ns, 1, self._labels_of(request.terms)))

    def _labels_of(self, terms: Terms) -> dict[str, str]:
        """Labels of a recorded value; one shared dict per named client."""
        if not terms.is_named:
            return self._labels
        labels = self._client_labels.get(terms.client)
        if labels is None:
            if len(self._client_labels) >= CLIENTS_MAX:
                self._client_labels.clear()
            labels = self._client_labels[terms.client] = {**self._labels, "client": terms.client}
        return labels
