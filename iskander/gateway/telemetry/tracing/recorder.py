"""Recorder of traced requests: sampling at their end, and a bounded queue for the export.

An untraced request costs a few comparisons. A traced one costs one record with its times.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections import deque
from random import getrandbits
from typing import Final

from iskander.config.tracing import TracingConfig
from iskander.errors import IskanderError
from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.foundation.measurement.counters import Counters
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.tracing import BatchRun, Method, TraceContext
from iskander.gateway.scheduling.worker_slot import InFlightBatch, WorkerSlot
from iskander.gateway.telemetry.tracing.records import RequestRecord
from iskander.gateway.telemetry.tracing.sampling import (
    ID_BITS,
    Reason,
    SpanLimit,
    is_failure,
    trace_reason,
)

RUNS_MAX: Final = 64
"""Batches in the trace of a request; only requests of many rows are in more."""
REQUEST_SPANS: Final = 4
"""Spans of a request: the request, admission, queue, response."""
RUN_SPANS: Final = 3
"""Spans of each batch of a request: the batch, dispatch, run."""


class Recorder:
    """Tracer of a gateway process.

    Attributes:
        records: Traced requests that wait for the export.
        counts: Spans by outcome: exported, failed, limited, queue_full.
    """

    def __init__(self, config: TracingConfig) -> None:
        self.records: deque[RequestRecord] = deque()
        self.counts = Counters()
        self._queue_max = config.queue
        self._threshold = int(config.ratio * (1 << ID_BITS))
        self._slow_ns = int(config.slow_ms * NS_PER_MS)
        self._limit = SpanLimit(config.spans_per_s, now_ns())
        self._last_run: BatchRun | None = None

    def configure(self, config: TracingConfig) -> None:
        """Apply the live settings to requests that end from now on."""
        self._queue_max = config.queue
        self._threshold = int(config.ratio * (1 << ID_BITS))
        self._slow_ns = int(config.slow_ms * NS_PER_MS)
        self._limit.set_rate(config.spans_per_s)

    def on_batch(
        self,
        worker: WorkerSlot,
        batch: InFlightBatch,
        batch_id: int,
        now: int,
        run_ns: int = 0,
        outcome: str = "",
    ) -> None:
        """Add an answered or lost batch to its requests."""
        requests = [part.request for part in batch.parts]
        self._last_run = run = BatchRun(
            batch_id,
            worker.index,
            worker.incarnation,
            worker.pid,
            worker.group,
            batch.sent_ns,
            now,
            run_ns,
            batch.run_rows,
            len(batch.parts),
            outcome,
        )
        for request in requests:
            runs = request.runs
            if not runs:
                request.runs = (run,)
            elif len(runs) < RUNS_MAX and runs[-1] is not run:
                request.runs = (*runs, run)

    def on_steps(self, worker: WorkerSlot, steps: tuple[tuple[str, int], ...]) -> None:
        """Add pipeline steps; they follow the answer of their batch in one message."""
        run = self._last_run
        if run is not None and run.incarnation == worker.incarnation:
            run.steps = steps

    def on_end(self, request: Request, method: Method, error: IskanderError | None) -> None:
        """Record an ended request if it is sampled and the limits permit it."""
        record = self._begin(method, request.terms.trace, request.arrived_ns, error)
        if record is None:
            return
        lane, runs = request.lane, request.runs
        record.model, record.version = lane.model.name, lane.model.version
        record.rows, record.bucket = request.rows, request.shape
        record.priority = request.terms.priority
        record.queued_ns, record.queued_before = request.queued_ns, request.queued_before
        record.runs = runs
        record.spans = REQUEST_SPANS + sum([RUN_SPANS + len(run.steps) for run in runs])
        self._add(record)

    def on_refused(
        self,
        method: Method,
        context: TraceContext | None,
        arrived_ns: int,
        error: IskanderError,
    ) -> None:
        """Record a call that failed before it had a request."""
        record = self._begin(method, context, arrived_ns, error)
        if record is not None:
            self._add(record)

    def _begin(
        self,
        method: Method,
        context: TraceContext | None,
        arrived_ns: int,
        error: IskanderError | None,
    ) -> RequestRecord | None:
        """Create the record of a request that ends now; None if it is not sampled."""
        now, low_bits = now_ns(), 0
        if context is not None:
            is_head_sampled = context.is_sampled
        else:
            low_bits = getrandbits(ID_BITS)
            is_head_sampled = low_bits < self._threshold
        reason = trace_reason(error, now - arrived_ns, self._slow_ns, is_head_sampled)
        if reason is Reason.NONE:
            return None
        if context is not None:
            trace_id, parent_id, state = context.trace_id, context.span_id, context.state
        else:
            trace_id = (getrandbits(ID_BITS) << ID_BITS | low_bits).to_bytes(16, "big")
            parent_id, state = b"", ""
        record = RequestRecord(
            1,
            method.system,
            method.name,
            reason.value,
            trace_id,
            parent_id,
            state,
            arrived_ns,
            0,
            now,
        )
        if error is not None:
            record.error, record.status = error.code, error.status
            record.http_status = error.http_status
            record.is_failure = is_failure(error)
        return record

    def _add(self, record: RequestRecord) -> None:
        spans, is_head_sampled = record.spans, record.reason == Reason.HEAD.value
        if not self._limit.take(spans, record.ended_ns, is_head_sampled=is_head_sampled):
            self.counts["limited"] += spans
        elif len(self.records) >= self._queue_max:
            self.counts["queue_full"] += spans
        else:
            self.records.append(record)
