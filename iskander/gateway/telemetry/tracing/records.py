"""Records of traced requests, and their frames between the gateway and the export process.

A frame is its length in four bytes, and msgpack. The gateway sends `ExportSettings` once, and then
lists of `RequestRecord`; the export process answers with `ExportReport`.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from iskander.gateway.scheduling.tracing import BatchRun

LENGTH_BYTES = 4


class RequestRecord(msgspec.Struct, array_like=True, gc=False):
    """One traced request, or a call that failed before it had a request; then `model` is empty.

    Attributes:
        spans: Number of its spans, at most.
        system: Protocol of the method: `http`, or the value of `rpc.system`.
        name: Route or method.
        reason: Why it is traced.
        parent_id: Caller's span; empty for none.
        state: Header `tracestate` of the caller.
        queued_ns: Time of its admission; 0 if it was not admitted.
        ended_ns: Time of the written response, or of the error.
        queued_before: Queued requests at its admission.
        error: Code of its error; empty for none.
        status: gRPC status of its error.
        http_status: HTTP status of its response.
        is_failure: The error is not a fault of the caller.
        runs: Batches with its rows, in the order of their answers.
    """

    spans: int
    system: str
    name: str
    reason: str
    trace_id: bytes
    parent_id: bytes
    state: str
    arrived_ns: int
    queued_ns: int
    ended_ns: int
    model: str = ""
    version: str = ""
    rows: int = 0
    bucket: int = 0
    priority: int = 0
    queued_before: int = 0
    error: str = ""
    status: str = "OK"
    http_status: int = 200
    is_failure: bool = False
    runs: tuple[BatchRun, ...] = ()


class ExportSettings(msgspec.Struct, frozen=True):
    """Settings of an export process.

    Attributes:
        endpoint: URL for traces; empty: that of the environment.
        resource: Attributes of the gateway process.
        addresses: Host and port of each system (`RequestRecord.system`) with exactly one listener.
    """

    endpoint: str
    resource: dict[str, str | int]
    addresses: dict[str, tuple[str, int]]


class ExportReport(msgspec.Struct, frozen=True, array_like=True):
    """Result of an export.

    Attributes:
        taken: Sum of `RequestRecord.spans` of the records whose spans are exported or failed.
        reason: Explains the failure.
    """

    exported: int
    failed: int
    taken: int
    reason: str = ""


decode_settings = msgspec.msgpack.Decoder(ExportSettings).decode
decode_records = msgspec.msgpack.Decoder(list[RequestRecord]).decode
decode_report = msgspec.msgpack.Decoder(ExportReport).decode


def frame(content: Any) -> bytes:  # noqa: ANN401
    """Encode a frame."""
    body = msgspec.msgpack.encode(content)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


class FrameReader:
    """Splits received bytes into frames; both ends are of one installation."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes, and yield the contents of the complete frames."""
        self._data += data
        while len(self._data) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._data[:LENGTH_BYTES], "big")
            if len(self._data) < end:
                return
            content = bytes(self._data[LENGTH_BYTES:end])
            del self._data[:end]
            yield content
