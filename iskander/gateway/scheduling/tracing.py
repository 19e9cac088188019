"""Trace context and batch runs of requests, and the interface of a trace recorder.

The path of a batch only keeps times and identifiers. Spans are built from them after the request,
in another process.

Runs on: gateway loop. Source: W3C Trace Context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from iskander.errors import IskanderError

if TYPE_CHECKING:
    from iskander.gateway.scheduling.request import Request

LOST: Final = "worker_lost"


class TraceContext(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Span of the caller.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes.
        is_sampled: The caller records the trace.
        state: Header `tracestate`; empty for none.
    """

    trace_id: bytes
    span_id: bytes
    is_sampled: bool
    state: str = ""


class BatchRun(msgspec.Struct, array_like=True, gc=False):
    """A batch that was sent to a worker for one or more requests.

    Attributes:
        worker: Index of the worker slot.
        group: Core group of the slot.
        sent_ns: Time at which it was sent.
        ended_ns: Time of the worker's answer or death.
        run_ns: Run time in the worker; 0 if it was not computed.
        rows: Rows that the model ran with, padding included.
        parts: Number of its parts: one for each request, or range of rows of it.
        outcome: Empty for results, else the code of the error, or `LOST`.
        steps: Name and nanoseconds of each pipeline step.
    """

    batch_id: int
    worker: int
    incarnation: int
    pid: int
    group: int
    sent_ns: int
    ended_ns: int
    run_ns: int
    rows: int
    parts: int
    outcome: str = ""
    steps: tuple[tuple[str, int], ...] = ()


class Method(NamedTuple):
    """Method of a protocol: the system (`grpc`, `http` or `zmq`), and the name there."""

    system: str
    name: str


class Tracer(Protocol):
    """Records requests at their end, for traces or events; there is none if both are off."""

    def on_end(self, request: Request, method: Method, error: IskanderError | None) -> None:
        """Record a request whose response is written, or that failed or was withdrawn; once."""

    def on_refused(
        self,
        method: Method,
        context: TraceContext | None,
        arrived_ns: int,
        error: IskanderError,
    ) -> None:
        """Record a call that failed before it had a request."""


class Tracers:
    """Several tracers as one."""

    def __init__(self, tracers: Sequence[Tracer]) -> None:
        self._tracers = tuple(tracers)

    def on_end(self, request: Request, method: Method, error: IskanderError | None) -> None:
        """Pass it on."""
        for each in self._tracers:
            each.on_end(request, method, error)

    def on_refused(
        self,
        method: Method,
        context: TraceContext | None,
        arrived_ns: int,
        error: IskanderError,
    ) -> None:
        """Pass it on."""
        for each in self._tracers:
            each.on_refused(method, context, arrived_ns, error)


def joined(tracers: Sequence[Tracer]) -> Tracer | None:
    """Return tracers as one; None without any, so that the protocols make no calls."""
    if not tracers:
        return None
    return tracers[0] if len(tracers) == 1 else Tracers(tracers)
