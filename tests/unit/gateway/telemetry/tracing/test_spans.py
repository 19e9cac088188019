"""Spans of records: times, parents, links and events."""

from __future__ import annotations

import itertools
from typing import Any

from iskander.gateway.scheduling.tracing import LOST, BatchRun
from iskander.gateway.telemetry.tracing.records import (
    FrameReader,
    RequestRecord,
    decode_records,
    frame,
)
from iskander.gateway.telemetry.tracing.spans import BATCHES_MAX, Span, SpanBuilder

TRACE = bytes(range(16))
PARENT = bytes(range(1, 9))


def run_of(batch_id: int = 1, sent_ns: int = 30, ended_ns: int = 90, **fields: Any) -> BatchRun:
    values = {"run_ns": 40, "rows": 8, "parts": 2, "outcome": "", "steps": ()} | fields
    return BatchRun(batch_id, 1, 7, 4321, 2, sent_ns, ended_ns, **values)


def record_of(*runs: BatchRun, **fields: Any) -> RequestRecord:
    values: dict[str, Any] = {
        "spans": 7,
        "system": "grpc",
        "name": "Service/Method",
        "reason": "head",
        "trace_id": TRACE,
        "parent_id": PARENT,
        "state": "vendor=1",
        "arrived_ns": 10,
        "queued_ns": 20,
        "ended_ns": 100,
        "model": "m",
        "version": "3",
        "rows": 4,
        "runs": runs,
    }
    return RequestRecord(**(values | fields))


def builder() -> SpanBuilder:
    ids = itertools.count(1)
    return SpanBuilder({"grpc": ("::1", 50051)}, b"seed", lambda: next(ids))


def times(spans: list[Span]) -> list[tuple[str, int, int]]:
    return [(span.name, span.start_ns, span.end_ns) for span in spans]


def test_stages_of_a_request_and_its_batch() -> None:
    spans = builder().build([record_of(run_of())])
    assert times(spans) == [
        ("Service/Method", 10, 100),
        ("admission", 10, 20),
        ("queue", 20, 30),
        ("dispatch", 30, 50),
        ("run", 50, 90),
        ("response", 90, 100),
        ("batch", 30, 90),
    ]
    server, *stages, batch = spans
    assert server.parent_id == int.from_bytes(PARENT, "big")
    assert server.is_server
    assert {span.parent_id for span in stages} == {server.context.span_id}
    trace_id = int.from_bytes(TRACE, "big")
    assert {span.context.trace_id for span in (server, *stages)} == {trace_id}
    assert {span.state for span in (server, *stages)} == {"vendor=1"}
    assert batch.parent_id == 0
    assert batch.context.trace_id != trace_id
    assert list(batch.links) == [server.context]
    assert list(server.links) == [batch.context]
    assert server.attributes["server.address"] == "::1"


def test_run_never_begins_before_it_is_sent() -> None:
    spans = builder().build([record_of(run_of(run_ns=1000))])
    assert ("run", 30, 90) in times(spans)


def test_requests_of_one_batch_share_its_span_also_later() -> None:
    build = builder().build
    first = build([record_of(run_of()), record_of(run_of())])
    (batch,) = [span for span in first if span.name == "batch"]
    servers = [span for span in first if span.is_server]
    assert list(batch.links) == [span.context for span in servers]
    later = build([record_of(run_of())])
    assert [span for span in later if span.name == "batch"] == []
    assert list(later[0].links) == [batch.context]


def test_remembered_batches_are_bounded() -> None:
    build = builder()
    build.build([record_of(run_of(number)) for number in range(BATCHES_MAX + 10)])
    assert len(build._built) == BATCHES_MAX


def test_steps_follow_each_other_within_the_run() -> None:
    steps = (("a", 15), ("b", 20), ("c", 50))
    spans = builder().build([record_of(run_of(steps=steps))])
    (running,) = [span for span in spans if span.name == "run"]
    found = [span for span in spans if span.name.startswith("step ")]
    assert times(found) == [("step a", 50, 65), ("step b", 65, 85), ("step c", 85, 90)]
    assert {span.parent_id for span in found} == {running.context.span_id}


def test_request_in_several_batches_waits_until_its_last_rows_are_sent() -> None:
    spans = builder().build([record_of(run_of(1, 30, 60), run_of(2, 40, 90))])
    assert [each for each in times(spans) if each[0] == "queue"] == [("queue", 20, 40)]
    assert ("response", 90, 100) in times(spans)


def test_lost_batch_and_retry() -> None:
    lost = run_of(1, 30, 50, outcome=LOST, run_ns=0)
    spans = builder().build([record_of(lost, run_of(2, 60, 90, run_ns=20))])
    server = spans[0]
    assert [(event.name, event.at_ns) for event in server.events] == [
        ("worker lost", 50),
        ("retry", 50),
    ]
    assert server.events[0].attributes["iskander.reason"] == LOST
    stages = times(spans)[1:7]
    assert stages == [
        ("admission", 10, 20),
        ("queue", 20, 30),
        ("queue", 50, 60),
        ("dispatch", 30, 50),
        ("dispatch", 60, 70),
        ("run", 70, 90),
    ]
    assert [span.error for span in spans if span.name == "batch"] == [LOST, ""]


def test_rejected_requests() -> None:
    rejection: dict[str, Any] = {"error": "queue_full", "status": "RESOURCE_EXHAUSTED"}
    (server, admission) = builder().build([record_of(queued_ns=0, is_failure=True, **rejection)])
    assert times([admission]) == [("admission", 10, 100)]
    assert server.error == "queue_full"
    assert server.attributes["error.type"] == "queue_full"
    assert server.attributes["rpc.response.status_code"] == "RESOURCE_EXHAUSTED"
    spans = builder().build([record_of(error="deadline_exceeded", is_failure=True)])
    assert times(spans)[1:] == [("admission", 10, 20), ("queue", 20, 100)]
    (server, _) = builder().build([record_of(queued_ns=0, error="contract")])
    assert server.error == ""  # A fault of the caller is no error of the server.


def test_call_without_a_request_has_one_span_without_a_model() -> None:
    (server,) = builder().build(
        [record_of(model="", version="", queued_ns=0, error="not_ready", parent_id=b"")]
    )
    assert server.parent_id == 0
    assert not [name for name in server.attributes if name == "iskander.model"]


def test_http_spans_have_the_conventions_of_http() -> None:
    record = record_of(run_of(), system="http", name="/v2/models/{name}/infer")
    server = builder().build([record])[0]
    assert server.name == "POST /v2/models/{name}/infer"
    assert server.attributes["http.route"] == "/v2/models/{name}/infer"
    assert "rpc.method" not in server.attributes


def test_frames_are_read_from_any_pieces() -> None:
    records = [record_of(run_of(steps=(("a", 1),))), record_of()]
    data = frame(records) + frame([])
    reader = FrameReader()
    contents = [each for at in range(len(data)) for each in reader.feed(data[at : at + 1])]
    assert [decode_records(each) for each in contents] == [records, []]
