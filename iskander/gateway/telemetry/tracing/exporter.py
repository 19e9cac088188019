"""Export process: builds spans of records that a gateway sends, and exports them by OTLP.

It is a process of its own, so that spans and their encoding use no interpreter time of the gateway,
and the gateway does not load OpenTelemetry. It has one thread: while the collector does not answer,
it reads nothing, and the gateway's queue fills and drops. It ends when the gateway closes the
socket, its standard input.

Runs on: an export process. Source: OTLP/HTTP.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from iskander import __version__
from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.foundation.logs.stderr import set_up_child
from iskander.gateway.telemetry.tracing.records import (
    ExportReport,
    FrameReader,
    RequestRecord,
    decode_records,
    decode_settings,
    frame,
)
from iskander.gateway.telemetry.tracing.spans import Context, Span, SpanBuilder

DELAY_S = 0.5
"""Time that a record waits for others of the same export."""
RECORDS_MAX = 128
SPANS_MAX = 512
RECEIVE_BYTES = 1 << 16
NICE = 10

_SCOPE = InstrumentationScope("iskander", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class FirstWarning(logging.Handler):
    """Keeps the text of the library's first warning: the reason of a failed export.

    Those of later attempts repeat it, and the last one is that there was no further attempt.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.text = self.text or record.getMessage()


class Converter:
    """Converts spans to those of OpenTelemetry."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource

    def convert(self, span: Span, offset_ns: int) -> ReadableSpan:
        """Convert a span; the offset converts its times to those of the wall clock."""
        trace_id = span.context.trace_id
        state = TraceState.from_header([span.state]) if span.state else None
        parent = None
        if span.parent_id:
            parent = SpanContext(trace_id, span.parent_id, span.is_server, _SAMPLED, state)
        return ReadableSpan(
            span.name,
            context=SpanContext(*span.context, False, _SAMPLED, state),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=[
                Event(each.name, each.attributes, each.at_ns + offset_ns) for each in span.events
            ],
            links=[Link(_linked(each)) for each in span.links],
            kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns + offset_ns,
            end_time=span.end_ns + offset_ns,
            instrumentation_scope=_SCOPE,
        )


def _linked(context: Context) -> SpanContext:
    return SpanContext(*context, False, _SAMPLED)


class ExportLoop:
    """Reads records from the gateway and exports their spans."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader()
        self._warning = FirstWarning()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._warning)
        logger.propagate = False

    def run(self) -> None:
        """Serve until the gateway closes the connection."""
        contents = self._contents()
        first = next(filter(None, contents), None)
        if first is None:
            return  # The gateway has ended.
        settings = decode_settings(first)
        exporter = OTLPSpanExporter(endpoint=settings.endpoint or None)
        own = Resource({"service.name": "iskander", **settings.resource})
        converter = Converter(own.merge(OTELResourceDetector().detect()))
        builder = SpanBuilder(settings.addresses, os.urandom(16), lambda: random.getrandbits(64))
        records: list[RequestRecord] = []
        for content in contents:
            if content is not None:
                records += decode_records(content)
            if records and (content is None or len(records) >= RECORDS_MAX):
                offset_ns = wall_ns() - now_ns()
                spans = [converter.convert(each, offset_ns) for each in builder.build(records)]
                for start in range(0, len(spans), SPANS_MAX):
                    self._export(exporter, spans[start : start + SPANS_MAX])
                self._report(ExportReport(0, 0, sum(record.spans for record in records)))
                records.clear()

    def _export(self, exporter: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> None:
        self._warning.text = ""
        is_exported = exporter.export(spans) is SpanExportResult.SUCCESS
        exported, failed = (len(spans), 0) if is_exported else (0, len(spans))
        self._report(ExportReport(exported, failed, 0, self._warning.text))

    def _report(self, report: ExportReport) -> None:
        with contextlib.suppress(OSError):  # The gateway has ended; its last records are exported.
            self._connection.sendall(frame(report))

    def _contents(self) -> Iterator[bytes | None]:
        """Yield received frames; None when `DELAY_S` has passed since the first, and at the end."""
        due_ns = 0
        while True:
            left_s = max(due_ns - now_ns(), 0) / NS_PER_S if due_ns else None
            if left_s == 0:
                due_ns = 0
                yield None
                continue
            self._connection.settimeout(left_s)
            try:
                data = self._connection.recv(RECEIVE_BYTES)
            except TimeoutError:
                continue
            except ConnectionError:
                data = b""
            if not data:
                yield None
                return
            due_ns = due_ns or now_ns() + int(DELAY_S * NS_PER_S)
            yield from self._frames.feed(data)


def main() -> None:
    """Entry point of the process."""
    set_up_child()
    Path("/proc/self/comm").write_text("isk-traces")
    # Service managers signal all processes; the gateway's end of the socket ends this one.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # On all cpus, not only those of the gateway, with a lower priority than the workers.
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.nice(NICE)
    ExportLoop(socket.socket(fileno=0)).run()


if __name__ == "__main__":
    main()
