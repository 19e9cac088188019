"""Headers of the current span, and no import of OpenTelemetry without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

from iskander.client.calls.trace_context import trace_headers, with_trace

SPAN = NonRecordingSpan(
    SpanContext(
        trace_id=0x0AF7651916CD43DD8448EB211C80319C,
        span_id=0xB7AD6B7169203331,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState([("vendor", "value")]),
    )
)
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def propagator() -> Iterator[None]:
    before = propagate.get_global_textmap()
    yield
    propagate.set_global_textmap(before)


def test_current_span_gives_the_w3c_headers() -> None:
    with trace.use_span(SPAN):
        headers = dict(trace_headers())
    assert headers == {b"traceparent": PARENT, b"tracestate": b"vendor=value"}


def test_no_or_an_invalid_span_gives_no_headers() -> None:
    assert trace_headers() == ()
    with trace.use_span(trace.INVALID_SPAN):
        assert trace_headers() == ()


def test_nothing_is_imported_for_a_caller_who_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with trace.use_span(SPAN):
        for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
            monkeypatch.delitem(sys.modules, name)
        assert trace_headers() == ()
        assert [name for name in sys.modules if name.startswith("opentelemetry")] == []


def test_names_of_other_propagators_are_lower_case(propagator: None) -> None:
    class Upper(TextMapPropagator):
        def extract(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
            raise NotImplementedError

        def inject(self, carrier, context=None, setter=None) -> None:  # type: ignore[no-untyped-def,override]  # noqa: ANN001
            carrier["X-B3-TraceId"] = "1"

        @property
        def fields(self) -> set[str]:
            return {"X-B3-TraceId"}

    propagate.set_global_textmap(Upper())
    with trace.use_span(SPAN):
        assert trace_headers() == ((b"x-b3-traceid", b"1"),)


def test_terms_of_a_batch_get_the_current_span_unless_they_have_one() -> None:
    assert with_trace(None) is None
    assert with_trace({"priority": 0}) == {"priority": 0}
    fields = {"traceparent": PARENT.decode(), "tracestate": "vendor=value"}
    with trace.use_span(SPAN):
        assert with_trace(None) == fields
        assert with_trace({"priority": 0}) == {"priority": 0, **fields}
        assert with_trace({"traceparent": "own"})["traceparent"] == "own"  # type: ignore[index]
