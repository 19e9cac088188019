"""Recorder: sampled requests, batches of requests, and bounds."""

from __future__ import annotations

from typing import Any

from support.lanes import lane_of, request_of

from iskander.config.tracing import TracingConfig
from iskander.errors import ContractError, IskanderError, NotReady, QueueFull
from iskander.gateway.scheduling.request import Request
from iskander.gateway.scheduling.tracing import Method, TraceContext
from iskander.gateway.scheduling.worker_slot import BatchPart, InFlightBatch, WorkerSlot
from iskander.gateway.telemetry.tracing.recorder import RUNS_MAX, Recorder
from iskander.interprocess.memory.arena import Lease

METHOD = Method("grpc", "Service/Method")
SAMPLED = TraceContext(b"t" * 16, b"s" * 8, True, "vendor=1")
UNSAMPLED = TraceContext(b"t" * 16, b"s" * 8, False)


def recorder_of(**settings: Any) -> Recorder:
    return Recorder(TracingConfig(enabled=True, **({"ratio": 0.0} | settings)))


def ended(recorder: Recorder, error: IskanderError | None = None, **terms: Any) -> Request:
    request = request_of(lane_of(), **terms)
    recorder.on_end(request, METHOD, error)
    return request


def worker_of(incarnation: int = 7) -> WorkerSlot:
    worker = WorkerSlot(1)
    worker.incarnation, worker.pid, worker.group = incarnation, 4321, 2
    return worker


def batch_of(*requests: Request) -> InFlightBatch:
    parts = [BatchPart(request, 0, 1, 0) for request in requests]
    return InFlightBatch(requests[0].lane, parts, Lease(0, 64, 1), 8, 5, 0)


def test_callers_decide_with_a_context_and_the_ratio_without() -> None:
    for ratio in (0.0, 1.0):
        recorder = recorder_of(ratio=ratio)
        ended(recorder, trace=SAMPLED)
        ended(recorder, trace=UNSAMPLED)
        assert [record.parent_id for record in recorder.records] == [b"s" * 8]
        ended(recorder)
        assert len(recorder.records) == 1 + ratio


def test_new_settings_apply_to_the_next_requests() -> None:
    recorder = recorder_of(queue=1)
    ended(recorder)
    assert not recorder.records
    recorder.configure(TracingConfig(enabled=True, ratio=1.0, queue=1))
    ended(recorder)
    ended(recorder)
    assert len(recorder.records) == 1 and recorder.counts["queue_full"]
    recorder.configure(TracingConfig(enabled=True, ratio=1.0, queue=1000, spans_per_s=100))
    for _ in range(1000):
        ended(recorder)
    assert 1 < len(recorder.records) < 100 and recorder.counts["limited"]
    recorder.records.clear()
    recorder.configure(TracingConfig(enabled=True, ratio=0.0, slow_ms=0.000_001, queue=1000))
    recorder._limit._updated_ns = 0  # A second ago.
    ended(recorder)
    assert [record.reason for record in recorder.records] == ["slow"]


def test_ratio_is_the_share_of_traces_and_they_differ() -> None:
    recorder = recorder_of(ratio=0.25, spans_per_s=1_000_000, queue=10_000)
    for _ in range(4000):
        ended(recorder)
    assert 800 < len(recorder.records) < 1200
    assert len({record.trace_id for record in recorder.records}) == len(recorder.records)


def test_record_has_the_times_and_terms_of_the_request() -> None:
    recorder = recorder_of()
    request = ended(recorder, QueueFull("x"), trace=SAMPLED, priority=3)
    (record,) = recorder.records
    assert (record.system, record.name) == METHOD
    assert (record.trace_id, record.state) == (b"t" * 16, "vendor=1")
    assert record.arrived_ns == request.arrived_ns
    assert (record.model, record.rows, record.priority) == (
        request.lane.model.name,
        request.rows,
        3,
    )
    assert (record.error, record.status) == ("queue_full", "RESOURCE_EXHAUSTED")
    assert record.is_failure


def test_failures_are_recorded_in_unsampled_traces_too() -> None:
    recorder = recorder_of()
    ended(recorder, QueueFull("x"), trace=UNSAMPLED)
    ended(recorder, ContractError("x"), trace=UNSAMPLED)
    assert [record.error for record in recorder.records] == ["queue_full"]


def test_call_without_a_request() -> None:
    recorder = recorder_of()
    recorder.on_refused(METHOD, SAMPLED, 1, NotReady("x"))
    recorder.on_refused(METHOD, None, 1, ContractError("x"))
    (record,) = recorder.records
    assert (record.arrived_ns, record.model, record.error) == (1, "", "not_ready")


def test_batch_is_added_once_to_each_of_its_requests() -> None:
    recorder = recorder_of()
    first, second = request_of(lane_of()), request_of(lane_of())
    recorder.on_batch(worker_of(), batch_of(first, second, second), 1, 9, run_ns=3)
    recorder.on_steps(worker_of(), (("a", 2),))
    assert first.runs == second.runs
    (run,) = first.runs
    assert (run.pid, run.group, run.parts, run.steps) == (4321, 2, 3, (("a", 2),))
    for batch_id in range(2, RUNS_MAX + 10):
        recorder.on_batch(worker_of(), batch_of(first), batch_id, 9)
    assert len(first.runs) == RUNS_MAX


def test_steps_of_another_process_are_ignored() -> None:
    recorder = recorder_of()
    request = request_of(lane_of())
    recorder.on_batch(worker_of(), batch_of(request), 1, 9)
    recorder.on_steps(worker_of(8), (("a", 2),))
    assert request.runs[0].steps == ()


def test_bounds_drop_and_count_spans() -> None:
    recorder = recorder_of(ratio=1.0, queue=2)
    for _ in range(3):
        ended(recorder)
    assert len(recorder.records) == 2
    assert recorder.counts["queue_full"] == 4
    recorder = recorder_of(ratio=1.0, spans_per_s=100)
    for _ in range(30):
        ended(recorder)
    limited = recorder.counts["limited"]
    assert limited > 0
    assert 4 * len(recorder.records) + limited == 120
    ended(recorder, QueueFull("x"), trace=UNSAMPLED)
    assert recorder.records[-1].error == "queue_full"
