"""Trace context of the caller's current OpenTelemetry span, as headers of a call.

OpenTelemetry is used only if the caller has imported it.

Runs on: the caller's threads.
"""

from __future__ import annotations

import sys

_NOTHING: tuple[()] = ()


def trace_headers() -> tuple[tuple[bytes, bytes], ...]:
    """Return `traceparent`, `tracestate` and what else the caller's propagators inject.

    Without a valid current span, the result is empty.
    """
    if "opentelemetry.trace" not in sys.modules:
        return _NOTHING
    from opentelemetry import propagate, trace

    if not trace.get_current_span().get_span_context().is_valid:
        return _NOTHING
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    # gRPC rejects a name with capitals, such as those of B3.
    return tuple((name.lower().encode(), value.encode()) for name, value in carrier.items())
