"""Trace context of the caller's OpenTelemetry span, for calls and batches of streams.

OpenTelemetry is used only if the caller has imported it.

Runs on: the caller's threads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

_BATCH_TERMS = ("traceparent", "tracestate")


def trace_headers() -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that the caller's propagators inject, such as `traceparent`.

    Without a valid current span, the result is empty.
    """
    # gRPC rejects names with capitals, which B3 has.
    return tuple(
        (name.lower().encode(), value.encode()) for name, value in _inject_context().items()
    )


def with_trace(terms: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Add the trace context to the terms of a batch, unless they have one.

    Call this on the thread that took the batch from the caller's iterator. That thread has a
    current span only if the iterator opened one, and this span then replaces the span of the call.
    """
    context = {name: value for name, value in _inject_context().items() if name in _BATCH_TERMS}
    return {**context, **(terms or {})} if context else terms


def _inject_context() -> dict[str, str]:
    """Return what the caller's propagators inject; empty without a valid current span."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate, trace

    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
