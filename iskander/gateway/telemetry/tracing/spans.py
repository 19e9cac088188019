"""Spans of traced requests, built from their records.

    server span of a request   arrival to written response; child of the caller's span
      admission                arrival to queue: limits, memory, copy into the arena
      queue                    until the last rows are sent to a worker; once for each attempt
      dispatch                 sent until the worker begins; once for each batch
      run                      gather, model and scatter in the worker
        step NAME              of a pipeline
      response                 answer of the worker to written response
    batch                      a trace of its own; links to its requests, which link to it

Times of steps are durations only; the spans follow each other from the begin of the run.

Pure.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from iskander.gateway.scheduling.tracing import LOST, BatchRun
from iskander.gateway.telemetry.tracing.records import RequestRecord

BATCHES_MAX = 4096
"""Exported batches that are remembered, so that requests that end later link to the same span."""
HTTP_METHOD = "POST"

Value = str | int | bool


class Context(NamedTuple):
    """Identity of a span."""

    trace_id: int
    span_id: int


class Event(NamedTuple):
    """Event of a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value]


class Span(NamedTuple):
    """One span; times are of the monotonic clock.

    Attributes:
        parent_id: Span of the same trace; 0 for none.
        state: `tracestate` of the trace.
        error: Code, if the status of the span is an error; else empty.
    """

    name: str
    context: Context
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value]
    is_server: bool = False
    state: str = ""
    links: Sequence[Context] = ()
    events: Sequence[Event] = ()
    error: str = ""


class SpanBuilder:
    """Builds the spans of records.

    Args:
        addresses: Host and port by system.
        seed: Random bytes; with the number of a batch they determine the identity of its span.
        new_id: Returns a random span id.
    """

    def __init__(
        self,
        addresses: Mapping[str, tuple[str, int]],
        seed: bytes,
        new_id: Callable[[], int],
    ) -> None:
        self._addresses = addresses
        self._seed = seed
        self._new_id = new_id
        self._built: OrderedDict[int, None] = OrderedDict()

    def build(self, records: Iterable[RequestRecord]) -> list[Span]:
        """Return the spans of requests, and of their batches, as far as these have no spans yet."""
        spans: list[Span] = []
        batches: dict[int, tuple[BatchRun, RequestRecord, list[Context]]] = {}
        for record in records:
            server = Context(int.from_bytes(record.trace_id, "big"), self._new_id())
            spans += self._request(record, server)
            for run in record.runs:
                batches.setdefault(run.batch_id, (run, record, []))[2].append(server)
        for run, record, requests in batches.values():
            if run.batch_id not in self._built:
                self._built[run.batch_id] = None
                spans.append(self._batch(run, record, requests))
        while len(self._built) > BATCHES_MAX:
            self._built.popitem(last=False)
        return spans

    def _batch(self, run: BatchRun, record: RequestRecord, requests: list[Context]) -> Span:
        attributes = _model_attributes(record) | _run_attributes(run)
        return Span(
            "batch",
            self._batch_context(run),
            0,
            run.sent_ns,
            run.ended_ns,
            attributes,
            links=requests,
            error=run.outcome,
        )

    def _batch_context(self, run: BatchRun) -> Context:
        source = self._seed + run.batch_id.to_bytes(8, "big")
        digest = hashlib.blake2b(source, digest_size=24).digest()
        return Context(int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big"))

    def _request(self, record: RequestRecord, server: Context) -> Iterator[Span]:
        yield Span(
            f"{HTTP_METHOD} {record.name}" if record.system == "http" else record.name,
            server,
            int.from_bytes(record.parent_id, "big"),
            record.arrived_ns,
            record.ended_ns,
            self._method(record) | _outcome_attributes(record) | _request_attributes(record),
            is_server=True,
            state=record.state,
            links=[self._batch_context(run) for run in record.runs],
            events=list(_events(record)),
            error=record.error if record.is_failure else "",
        )
        if record.model:
            for span in self._stages(record, server):
                yield span._replace(state=record.state)

    def _stages(self, record: RequestRecord, server: Context) -> Iterator[Span]:
        """The children of a server span."""

        def child(name: str, start_ns: int, end_ns: int, attributes: Mapping[str, Value]) -> Span:
            context = Context(server.trace_id, self._new_id())
            return Span(name, context, server.span_id, start_ns, end_ns, attributes)

        yield child("admission", record.arrived_ns, record.queued_ns or record.ended_ns, {})
        if not record.queued_ns:
            return
        for start_ns, end_ns in _waits(record):
            yield child(
                "queue", start_ns, end_ns, {"iskander.queue.requests": record.queued_before}
            )
        for run in record.runs:
            begun_ns = max(run.ended_ns - run.run_ns, run.sent_ns)
            yield child("dispatch", run.sent_ns, begun_ns, _run_attributes(run))
            if run.outcome:
                continue
            running = child("run", begun_ns, run.ended_ns, _run_attributes(run))
            yield running._replace(links=[self._batch_context(run)])
            for name, step_ns in run.steps:
                end_ns = min(begun_ns + step_ns, run.ended_ns)
                step = child(f"step {name}", begun_ns, end_ns, {"iskander.step": name})
                yield step._replace(parent_id=running.context.span_id)
                begun_ns = end_ns
        if record.runs and not record.runs[-1].outcome:
            yield child("response", record.runs[-1].ended_ns, record.ended_ns, {})

    def _method(self, record: RequestRecord) -> dict[str, Value]:
        """Attributes of the semantic conventions for RPC and HTTP servers."""
        attributes: dict[str, Value] = {}
        if record.system == "http":
            attributes |= {
                "http.request.method": HTTP_METHOD,
                "http.route": record.name,
                "http.response.status_code": record.http_status,
            }
        else:
            attributes |= {
                "rpc.system": record.system,
                "rpc.system.name": record.system,
                "rpc.method": record.name,
                "rpc.response.status_code": record.status,
            }
        if record.system in self._addresses:
            host, port = self._addresses[record.system]
            attributes |= {"server.address": host, "server.port": port}
        return attributes


def _outcome_attributes(record: RequestRecord) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "iskander.outcome": record.error or "ok",
        "iskander.sampled_by": record.reason,
    }
    if record.error:
        attributes["error.type"] = record.error
    return attributes


def _model_attributes(record: RequestRecord) -> dict[str, Value]:
    return {
        "iskander.model": record.model,
        "iskander.version": record.version,
        "iskander.lane": f"{record.model}/{record.version}",
    }


def _request_attributes(record: RequestRecord) -> dict[str, Value]:
    if not record.model:
        return {}
    return _model_attributes(record) | {
        "iskander.rows": record.rows,
        "iskander.bucket": record.bucket,
        "iskander.priority": record.priority,
    }


def _run_attributes(run: BatchRun) -> dict[str, Value]:
    return {
        "iskander.batch.id": run.batch_id,
        "iskander.batch.rows": run.rows,
        "iskander.batch.parts": run.parts,
        "iskander.worker": run.worker,
        "iskander.worker.pid": run.pid,
        "iskander.worker.incarnation": run.incarnation,
        "iskander.worker.group": run.group,
    }


def _events(record: RequestRecord) -> Iterator[Event]:
    """Failures of batches, and the retries after them."""
    for run, following in pairwise([*record.runs, None]):
        if run is None or not run.outcome:
            continue
        attributes: dict[str, Value] = {
            "iskander.worker": run.worker,
            "iskander.reason": run.outcome,
        }
        yield Event(
            "worker lost" if run.outcome == LOST else "batch failed", run.ended_ns, attributes
        )
        if following is not None:
            yield Event("retry", run.ended_ns, {"iskander.reason": run.outcome})


def _waits(record: RequestRecord) -> Iterator[tuple[int, int]]:
    """Begin and end of the time in the queue, for each attempt.

    After the failure of its last batch, a request waits no more: it has failed.
    """
    start_ns, sent_ns = record.queued_ns, 0
    for run in record.runs:
        sent_ns = max(sent_ns, run.sent_ns)
        if run.outcome:
            yield start_ns, sent_ns
            start_ns, sent_ns = run.ended_ns, 0
    if sent_ns:
        yield start_ns, max(start_ns, sent_ns)
    elif not record.runs:
        yield start_ns, record.ended_ns  # It was rejected from the queue.
