"""Statuses of a remote server as named errors."""

from __future__ import annotations

import pytest
from iskander_worker.remote.statuses import RETRY_AFTER_MAX_MS, error_of, target_text

from iskander.errors import (
    IskanderError,
    RemoteAnswerInvalid,
    RemoteDenied,
    RemoteFailed,
    RemoteLoop,
    RemoteNotReady,
    RemoteOverloaded,
    RemoteRejected,
    RemoteTimeout,
    RemoteUnavailable,
)

TARGET = target_text("m", "2", "host:1")
LOST = (
    "failed to connect to all addresses; last error: Connection refused",
    "recvmsg:Connection reset by peer (104)",
    "Stream removed (sendmsg: Broken pipe (32))",
    "errors resolving host:1",
    "Socket closed",
    "no healthy upstream",
    "Received http2 header with status: 502",
    "Ssl handshake failed",
    "",
)
CASES: list[tuple[str, str, dict[str, str], type[IskanderError]]] = [
    *(("UNAVAILABLE", text, {}, RemoteUnavailable) for text in LOST),
    ("UNAVAILABLE", "Exceeds maximum queue size", {}, RemoteOverloaded),
    ("UNAVAILABLE", "the server is stopping", {"iskander-code": "draining"}, RemoteOverloaded),
    ("UNAVAILABLE", "no worker", {"iskander-code": "not_ready"}, RemoteNotReady),
    ("UNAVAILABLE", "a connection", {"iskander-code": "remote_unavailable"}, RemoteNotReady),
    ("RESOURCE_EXHAUSTED", "queue full", {"iskander-code": "queue_full"}, RemoteOverloaded),
    ("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max", {}, RemoteRejected),
    ("RESOURCE_EXHAUSTED", "CLIENT: Received message larger than max", {}, RemoteAnswerInvalid),
    ("INVALID_ARGUMENT", "shape", {}, RemoteRejected),
    ("NOT_FOUND", "no model", {}, RemoteNotReady),
    ("UNAUTHENTICATED", "no token", {}, RemoteDenied),
    ("PERMISSION_DENIED", "not yours", {}, RemoteDenied),
    ("DEADLINE_EXCEEDED", "late", {}, RemoteTimeout),
    ("FAILED_PRECONDITION", "hops", {"iskander-code": "remote_loop"}, RemoteLoop),
    ("INTERNAL", "bug", {}, RemoteFailed),
    ("UNKNOWN", "bug", {}, RemoteFailed),
    ("UNIMPLEMENTED", "no method", {}, RemoteFailed),
]


@pytest.mark.parametrize(("status", "detail", "trailers", "kind"), CASES)
def test_each_status_has_its_error(
    status: str, detail: str, trailers: dict[str, str], kind: type[IskanderError]
) -> None:
    error = error_of(status, detail, trailers, TARGET)
    assert type(error) is kind
    assert error.message.startswith("remote model `m/2` at host:1 ")
    assert detail in error.message


WAITS = [
    ({"iskander-retry-after-ms": "40"}, 40),
    ({"grpc-retry-pushback-ms": "250"}, 250),
    ({"retry-after": "3"}, 3000),
    ({"retry-after": "99999999999999999999"}, RETRY_AFTER_MAX_MS),
    ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
    ({"grpc-retry-pushback-ms": "-1"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("trailers", "wait_ms"), WAITS)
def test_time_to_retry(trailers: dict[str, str], wait_ms: int | None) -> None:
    assert error_of("RESOURCE_EXHAUSTED", "busy", trailers, TARGET).retry_after_ms == wait_ms
    assert error_of("INVALID_ARGUMENT", "bad", trailers, TARGET).retry_after_ms is None


def test_loop_through_several_servers_is_described_once() -> None:
    inner = error_of("FAILED_PRECONDITION", "5 hops", {"iskander-code": "remote_loop"}, TARGET)
    trailers = {"iskander-code": inner.code}
    outer = error_of("FAILED_PRECONDITION", inner.message, trailers, "remote model `n` at host:2")
    assert outer.message == inner.message


LINES = {
    '\x1b[36mray::Replica()\x1b[39m (pid=1)\n  File "a.py", line 1\n    x\nValueError: why\n': (
        "ValueError: why"
    ),
    "Failed to process the request: why\n\nAt:\n  model.py(12): execute\n": (
        "Failed to process the request: why"
    ),
}


@pytest.mark.parametrize("detail", LINES)
def test_traceback_of_a_server_is_one_line(detail: str) -> None:
    assert error_of("INTERNAL", detail, {}, TARGET).message == f"{TARGET} failed: {LINES[detail]}"


def test_long_detail_is_shortened() -> None:
    assert len(error_of("INTERNAL", "x" * 5000, {}, TARGET).message) < 400
