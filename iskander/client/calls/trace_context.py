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
    """Return `traceparent`, `tracestate` and what else the caller's propagators inject.

    Without a valid current span, the result is empty.
    """
    # gRPC rejects a name with capitals, such as those of B3.
    return tuple((name.lower().encode(), value.encode()) for name, value in _injected().items())


def with_trace(terms: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Add the trace context to the terms of a batch, unless they have one.

    Call it on the thread that took the batch from the caller's iterator: it has a current span only
    if the iterator opened one, which then replaces that of the call.
    """
    context = {name: value for name, value in _injected().items() if name in _BATCH_TERMS}
    return {**context, **(terms or {})} if context else terms


def _injected() -> dict[str, str]:
    """Return what the caller's propagators inject; empty without a valid current span."""
    if "opentelemetry.trace" not in sys.modules:
        return {}
    from opentelemetry import propagate, trace

    if not trace.get_current_span().get_span_context().is_valid:
        return {}
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier
