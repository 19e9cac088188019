"""OTLP collector: an HTTP server in a process of its own, which writes received spans as JSON.

    python otlp_collector.py FILE MODE       writes its port to stdout

`FILE` gets one line for each span. Modes: `accept`; `reject` answers 400; `hang` never answers.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Collector:
    """The process, from the view of a test."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.file = folder / "spans.jsonl"
        self.file.touch()
        command = [sys.executable, __file__, str(self.file), mode]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.base = f"http://127.0.0.1:{int(self.process.stdout.readline())}"
        self.url = f"{self.base}/v1/traces"

    def spans(self) -> list[dict[str, Any]]:
        """All received spans."""
        lines = self.file.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def collecting(folder: Path, mode: str = "accept") -> Iterator[Collector]:
    """A running collector."""
    collector = Collector(folder, mode)
    try:
        yield collector
    finally:
        collector.process.kill()
        collector.process.communicate()


def main() -> None:
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    path, mode = Path(sys.argv[1]), sys.argv[2]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if mode == "hang":
                time.sleep(3600)
            if mode == "reject":
                self._answer(400, b"")
                return
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            with path.open("a") as file:
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    about = plain(resource.resource.attributes)
                    for scope in resource.scope_spans:
                        origin = {
                            "resource": about,
                            "scope": [scope.scope.name, scope.scope.version],
                        }
                        for span in scope.spans:
                            file.write(json.dumps(readable(span) | origin) + "\n")
            self._answer(200, ExportTraceServiceResponse().SerializeToString())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    def plain(pairs: Any) -> dict[str, Any]:
        return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in pairs}

    def readable(span: Any) -> dict[str, Any]:
        return {
            "name": span.name,
            "kind": MessageToDict(span).get("kind", ""),
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_id": span.parent_span_id.hex(),
            "state": span.trace_state,
            "flags": span.flags,
            "start_ns": span.start_time_unix_nano,
            "end_ns": span.end_time_unix_nano,
            "is_error": span.status.code == 2,
            "attributes": plain(span.attributes),
            "links": [(each.trace_id.hex(), each.span_id.hex()) for each in span.links],
            "events": [(each.name, plain(each.attributes)) for each in span.events],
        }

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
