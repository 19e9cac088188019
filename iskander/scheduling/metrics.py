"""What a lane's requests and batches took: since the start, and of the last moments.

Runs on: gateway loop.
"""

from __future__ import annotations

from iskander.clock import NS_PER_MS
from iskander.contract.backend_manifest import STEPS_MAX
from iskander.control.messages import ModelSpec
from iskander.measurement.histogram import LATENCY_BOUNDS_NS, ROWS_BOUNDS, Histogram
from iskander.measurement.recent_values import RecentValues
from iskander.scheduling.arrivals import CLIENTS_MAX
from iskander.scheduling.request import Request, Terms


class LaneMetrics:
    """Of one lane.

    Args:
        model: Whose name and version the points have.
        recent: Where the last points are kept.

    Attributes:
        wait_ns: Of requests, until their rows were sent to a worker.
        run_ns: Of batches, in the worker.
        total_ns: Of requests, until their results were there.
        batch_rows: Of batches.
        steps_ns: Of the steps of a pipeline, by their names.
    """

    def __init__(self, model: ModelSpec, recent: RecentValues) -> None:
        self.wait_ns = Histogram(LATENCY_BOUNDS_NS)
        self.run_ns = Histogram(LATENCY_BOUNDS_NS)
        self.total_ns = Histogram(LATENCY_BOUNDS_NS)
        self.batch_rows = Histogram(ROWS_BOUNDS)
        self.steps_ns: dict[str, Histogram] = {}
        self._recent_total = recent.ring("e2e_latency_ms").append
        self._recent_wait = recent.ring("scheduling_wait_ms").append
        self._recent_run = recent.ring("inference_latency_ms").append
        self._recent_rows = recent.ring("batch_size").append
        self._recent_depth = recent.ring("queue_depth").append
        self._recent_retries = recent.ring("dispatch_retries").append
        self._labels = {"model": model.name, "version": model.version}
        self._client_labels: dict[str, dict[str, str]] = {}

    def on_sent(self, rows: int, waits_ns: list[int], queued: int, now_ns: int) -> None:
        """A batch goes to a worker: its rows, how long its requests waited, and who still does."""
        labels = self._labels
        self.batch_rows.record(rows)
        self._recent_rows((now_ns, rows, labels))
        self._recent_depth((now_ns, queued, labels))
        for waited_ns in waits_ns:
            self.wait_ns.record(waited_ns)

    def on_completed(self, request: Request, run_ns: int, now_ns: int) -> None:
        """A request has its results, the last of which a batch of `run_ns` gave."""
        terms = request.terms
        labels = self._of(terms) if terms.is_named else self._labels
        total_ns = now_ns - request.arrived_ns
        self.total_ns.record(total_ns)
        self._recent_total((now_ns, total_ns / NS_PER_MS, labels))
        self._recent_wait((now_ns, (request.sent_ns - request.arrived_ns) / NS_PER_MS, labels))
        self._recent_run((now_ns, run_ns / NS_PER_MS, labels))

    def on_stepped(self, steps: tuple[tuple[str, int], ...]) -> None:
        """A batch has run; what each step of its model took, in nanoseconds."""
        for name, took_ns in steps:
            if name not in self.steps_ns and len(self.steps_ns) < STEPS_MAX:
                self.steps_ns[name] = Histogram(LATENCY_BOUNDS_NS)
            if name in self.steps_ns:
                self.steps_ns[name].record(took_ns)

    def on_put_back(self, request: Request, now_ns: int) -> None:
        """A request waits anew."""
        terms = request.terms
        labels = self._of(terms) if terms.is_named else self._labels
        self._recent_retries((now_ns, 1, labels))

    def _of(self, terms: Terms) -> dict[str, str]:
        """The labels of a named client's points: one object for all of them."""
        labels = self._client_labels.get(terms.client)
        if labels is None:
            if len(self._client_labels) >= CLIENTS_MAX:
                self._client_labels.clear()
            labels = self._client_labels[terms.client] = {**self._labels, "client": terms.client}
        return labels
