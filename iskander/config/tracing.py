"""Settings of OpenTelemetry traces."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from iskander.config.section import Live, Milliseconds, Section


class TracingConfig(Section, frozen=True, kw_only=True):
    """OpenTelemetry traces of requests, exported by OTLP over HTTP. Needs the extra `otel`.

    Attributes:
        enabled: Record traces. Each gateway process starts a process that exports them.
        ratio: Share of the requests without a trace context that are traced: 0 to 1.
        slow_ms: Milliseconds from arrival to written response, above which a request is always
            traced. 0: no such rule.
        spans_per_s: Spans exported each second; further requests are not traced. A fourth is
            reserved for failed and slow requests.
        queue: Traced requests that wait for the export; further ones are not traced.
        endpoint: URL for traces, such as `http://127.0.0.1:4318/v1/traces`. Empty: that of the
            environment (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`).
    """

    restart_reason: ClassVar[str] = "the export process receives it at its start"

    enabled: bool = False
    ratio: Live[Annotated[float, Meta(ge=0, le=1)]] = 0.01
    slow_ms: Live[Milliseconds] = 0.0
    spans_per_s: Live[Annotated[int, Meta(ge=100, le=1_000_000)]] = 2000
    queue: Live[Annotated[int, Meta(ge=1, le=1_000_000)]] = 4096
    endpoint: Annotated[str, Meta(pattern=r"^(https?://\S+)?\Z")] = ""
