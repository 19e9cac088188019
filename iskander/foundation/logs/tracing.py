"""Events of the export of traces."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

tracing = Source("iskander.tracing")


@tracing.warning("reason")
def export_failed(*, reason: str) -> str:
    """The collector does not accept spans; requests are not affected.

    Do: Check the collector, and its URL: `tracing.endpoint`, or that of the environment
    (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`).
    """
    return f"spans cannot be exported: {reason}"


@tracing.info()
def export_recovered() -> str:
    """The collector accepts spans again."""
    return "spans are exported again"


@tracing.error()
def export_process_ended(*, exit_code: int, spans: int) -> str:
    """The process that exports traces ended and is started again.

    Do: Read the lines before it. If there are none and it repeats, check the memory of the machine.
    """
    return f"the export process ended with {exit_code}: {spans} spans lost; it is started again"


@tracing.error()
def export_process_not_started(*, reason: str) -> str:
    """The process that exports traces cannot be started; the gateway tries again.

    Do: Check the limits of processes and memory.
    """
    return f"the export process cannot be started: {reason}"


@tracing.warning()
def export_incomplete(*, spans: int) -> str:
    """The gateway stopped before all spans were exported.

    Do: Nothing, if the collector was down; its own log has the cause.
    """
    return f"stopped with {spans} spans that are not exported"
