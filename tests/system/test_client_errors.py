"""Errors of connections and of foreign servers as named errors, and headers of traces.

A Flight server of this process stands for a proxy, or for a server that is no gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import trustme
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from pyarrow import flight

from iskander.client import OFF, AsyncClient, Client, Retry, Tls
from iskander.errors import (
    Cancelled,
    ConfigError,
    ConnectionFailed,
    DeadlineExceeded,
    IskanderError,
    ModelNotFound,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    Unsupported,
)

BATCH = pa.record_batch({"x": [1, 2]})
WITHIN_S = 30.0
STATUSES: dict[str, tuple[Exception, type[IskanderError]]] = {
    "unavailable": (flight.FlightUnavailableError("of a proxy"), ConnectionFailed),
    "internal": (flight.FlightInternalError("of a proxy"), ConnectionFailed),
    "cancelled": (flight.FlightCancelledError("of a proxy"), Cancelled),
    "timed-out": (flight.FlightTimedOutError("of a proxy"), DeadlineExceeded),
    "unauthenticated": (flight.FlightUnauthenticatedError("of a proxy"), Unauthenticated),
    "unauthorized": (flight.FlightUnauthorizedError("of a proxy"), PermissionDenied),
    "unknown": (flight.FlightServerError("of a proxy"), IskanderError),
    "invalid": (pa.ArrowInvalid("of a proxy"), ProtocolError),
    "not-found": (KeyError("of a proxy"), ModelNotFound),
    "unimplemented": (NotImplementedError("of a proxy"), Unsupported),
}


class Headers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Records the headers of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, str]] = []

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        self.calls.append({name: values[0] for name, values in headers.items()})

    def take(self) -> list[dict[str, str]]:
        calls, self.calls = self.calls, []
        return calls


class Foreign(flight.FlightServerBase):  # type: ignore[misc]
    """Fails a call of a model with the status of that name, and returns the batches of others."""

    def __init__(self) -> None:
        self.headers = Headers()
        super().__init__("grpc://127.0.0.1:0", middleware={"headers": self.headers})
        self.address = f"127.0.0.1:{self.port}"
        self.results: list[bytes] = []
        self.valid_token = ""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        name = descriptor.path[0].decode()
        if name == "tokens":
            self._require_token()
        chunk = reader.read_chunk()
        if name in STATUSES:
            raise STATUSES[name][0]
        writer.begin(chunk.data.schema)
        while True:
            writer.write_batch(chunk.data)
            if name == "tokens":
                self._require_token()
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        if action.type == "load":
            raise STATUSES[json.loads(action.body.to_pybytes())["model"]][0]
        return iter(self.results)

    def _require_token(self) -> None:
        if self.headers.calls[-1]["authorization"] != f"Bearer {self.valid_token}":
            raise flight.FlightUnauthenticatedError("expired")


@pytest.fixture
def server() -> Iterator[Foreign]:
    with Foreign() as ready:
        yield ready


def client_of(server: Foreign, **options: Any) -> Client:
    options = {"retry": OFF, "is_matched": False, "shared_bytes": 0, **options}
    return Client(server.address, **options)


@contextlib.contextmanager
def named(
    kind: type[IskanderError], model: str | None, cause: type[BaseException] | None
) -> Iterator[None]:
    """Check an error: its class, its fields, and the error of pyarrow as its cause."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert type(error) is kind
    assert (error.code, error.fault, error.retryable) == (kind.code, kind.fault, kind.retryable)
    assert error.model == model
    assert cause is None or isinstance(error.__cause__, cause)


@pytest.mark.parametrize("status", STATUSES)
def test_statuses_of_a_foreign_server_are_named_errors(server: Foreign, status: str) -> None:
    kind = STATUSES[status][1]
    with client_of(server) as client:
        calls: tuple[Callable[[], Any], ...] = (
            lambda: client.score(status, BATCH),
            lambda: client.score(status, pa.table({"x": range(200_000)})),
            lambda: list(client.stream(status, [BATCH] * 2)),
            lambda: list(client.outcomes(status, [BATCH] * 2)),
            lambda: client.load(status),
        )
        for call in calls:
            with named(kind, status, pa.ArrowException):
                call()


@pytest.mark.parametrize("status", ["unavailable", "invalid", "not-found"])
def test_statuses_are_named_errors_for_asyncio(server: Foreign, status: str) -> None:
    async def check() -> None:
        options: Any = {"retry": OFF, "is_matched": False, "shared_bytes": 0}
        async with AsyncClient(server.address, **options) as client:
            kind = STATUSES[status][1]
            with named(kind, status, pa.ArrowException):
                await client.score(status, BATCH)
            with named(kind, status, pa.ArrowException):
                [each async for each in client.stream(status, [BATCH])]
            with named(kind, status, pa.ArrowException):
                [each async for each in client.outcomes(status, [BATCH])]
            with named(kind, status, pa.ArrowException):
                await client.load(status)
            with named(DeadlineExceeded, "m", None):
                await client.score("m", BATCH, timeout_s=0.0)
        with named(Cancelled, "m", None):
            await client.score("m", BATCH)
        with named(Cancelled, "m", None):
            [each async for each in client.stream("m", [BATCH])]

    asyncio.run(check())


@pytest.mark.parametrize("results", [[], [b"no json"], [b"[]"], [b"7"], [b"{}"], [b"\xff"]])
def test_results_of_a_foreign_server_are_protocol_errors(
    server: Foreign, results: list[bytes]
) -> None:
    server.results = results
    with client_of(server) as client:
        for call, valid in (
            (client.health, [b"{}"]),
            (client.stats, [b"{}"]),
            (client.models, [b"[]"]),
            (lambda: client.unload("m"), []),
            (lambda: client.model("m"), []),
        ):
            if results != valid:
                with pytest.raises(ProtocolError, match="cannot be read"):
                    call()


def silent() -> socket.socket:
    """A listener that accepts connections and sends nothing."""
    return socket.create_server(("127.0.0.1", 0))


@contextlib.contextmanager
def hanging_up() -> Iterator[str]:
    """The address of a listener that closes each connection."""

    def close_all() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    with silent() as listener:
        thread = threading.Thread(target=close_all)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def calls_of(client: Client) -> tuple[Callable[[], Any], ...]:
    return (
        lambda: client.score("m", BATCH, timeout_s=WITHIN_S),
        lambda: list(client.stream("m", [BATCH], timeout_s=WITHIN_S)),
        lambda: client.model("m"),
        lambda: client.load("m"),
    )


def test_refused_and_closed_connections_are_named_errors(tmp_path: Path) -> None:
    with silent() as listener:
        refused = f"127.0.0.1:{listener.getsockname()[1]}"
    with hanging_up() as closed:
        for address in (refused, closed, f"unix:{tmp_path}/none", "name.invalid:1"):
            for is_matched in (True, False):
                with Client(address, retry=OFF, is_matched=is_matched) as client:
                    for call in calls_of(client):
                        with named(ConnectionFailed, "m", flight.FlightUnavailableError):
                            call()


def test_failed_tls_handshakes_are_named_errors(server: Foreign, tmp_path: Path) -> None:
    """A server without TLS, and one with a certificate of another CA."""
    certificate = trustme.CA().issue_cert("127.0.0.1")
    roots = tmp_path / "roots.pem"
    trustme.CA().cert_pem.write_to_path(str(roots))
    pair = (certificate.cert_chain_pems[0].bytes(), certificate.private_key_pem.bytes())
    with flight.FlightServerBase("grpc+tls://127.0.0.1:0", tls_certificates=[pair]) as secure:
        for port, words in ((server.port, "Ssl handshake failed"), (secure.port, "certificate")):
            client = Client(f"127.0.0.1:{port}", tls=Tls(roots=roots), retry=OFF)
            with client:
                for call in calls_of(client):
                    with named(ConnectionFailed, "m", flight.FlightUnavailableError):
                        call()
                with pytest.raises(ConnectionFailed, match=words):
                    client.health()


def test_silent_server_is_a_deadline_of_the_call() -> None:
    with silent() as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(address, retry=OFF, timeout_s=0.2) as client:
            for call in (
                lambda: client.score("m", BATCH, timeout_s=0.2),
                lambda: list(client.stream("m", [BATCH], timeout_s=0.2)),
                lambda: client.load("m"),
            ):
                with named(DeadlineExceeded, "m", flight.FlightTimedOutError):
                    call()


def test_closed_client_is_a_named_error(server: Foreign) -> None:
    client = client_of(server)
    client.close()
    for call in calls_of(client):
        with named(Cancelled, "m", None):
            call()


def test_invalid_arguments_are_config_errors(server: Foreign, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="invalid address 'bad host:1': expected HOST:PORT"):
        Client("bad host:1")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("garbage")
    with pytest.raises(ConfigError, match=r"garbage\.pem is no PEM file"):
        Client(server.address, tls=Tls(roots=garbage))
    with client_of(server) as client:
        for terms in ({"client": "\xe9"}, {"client": "a\nb"}, {"Client name": "a"}):
            with pytest.raises(ConfigError, match="invalid term"):
                client.score("m", BATCH, terms=terms)


def test_error_of_the_callers_feed_stays_as_it_is(server: Foreign) -> None:
    """It may be an error of pyarrow, or of another client."""
    for failure in (flight.FlightUnavailableError("of the feed"), ConnectionFailed("of the feed")):

        def feed(failure: Exception = failure) -> Iterator[pa.RecordBatch]:
            yield BATCH
            raise failure

        with client_of(server) as client, pytest.raises(type(failure)) as caught:
            list(client.stream("m", feed()))
        assert caught.value is failure


def test_token_function_is_called_for_each_call(server: Foreign) -> None:
    tokens = (f"token-{number}" for number in range(100))
    server.results = [b"{}"]
    with client_of(server, token=lambda: next(tokens)) as client:
        client.score("m", BATCH)
        list(client.stream("m", [BATCH] * 3))
        client.stats()
    sent = [call["authorization"] for call in server.headers.take()]
    assert sent == [f"Bearer token-{number}" for number in range(3)]


def test_stream_goes_on_with_the_next_token(server: Foreign) -> None:
    """The server ends the stream of the old token after each result."""
    server.valid_token = "0"
    with client_of(server, token=lambda: server.valid_token, retry=Retry()) as client:
        results = client.stream("tokens", (pa.record_batch({"x": [n]}) for n in range(6)))
        for number in range(6):
            server.valid_token = str(number // 2)
            assert next(results)["x"].to_pylist() == [number]
        assert next(results, None) is None


def test_rejected_token_is_not_retried(server: Foreign) -> None:
    server.valid_token = "other"
    fail = ConnectionRefusedError("no token")

    def failing() -> str:
        raise fail

    for token in ("old", lambda: "old"):
        with client_of(server, token=token, retry=Retry()) as client:
            with named(Unauthenticated, "tokens", flight.FlightUnauthenticatedError):
                client.score("tokens", BATCH)
            assert len(server.headers.take()) == 1
    with client_of(server, token=failing, retry=Retry()) as client:
        with pytest.raises(ConnectionRefusedError, match="no token") as caught:
            client.score("tokens", BATCH)
        assert caught.value is fail
        with pytest.raises(ConnectionRefusedError):
            list(client.stream("tokens", [BATCH]))


# ---- Traces


def span(number: int) -> NonRecordingSpan:
    flags = TraceFlags(TraceFlags.SAMPLED)
    state = TraceState([("vendor", "value")])
    return NonRecordingSpan(SpanContext(0xAB, number, False, flags, state))


def parents(server: Foreign) -> list[tuple[str | None, str | None]]:
    calls = server.headers.take()
    return [(call.get("traceparent"), call.get("tracestate")) for call in calls]


def sent_by(number: int) -> tuple[str, str]:
    return f"00-{0xAB:032x}-{number:016x}-01", "vendor=value"


def test_current_span_is_sent_with_calls_streams_and_actions(server: Foreign) -> None:
    server.results = [b"{}"]
    with client_of(server) as client:
        with trace.use_span(span(1)):
            client.score("m", BATCH)
            list(client.stream("m", [BATCH] * 2))
            client.stats()
            late = client.stream("m", [BATCH])
        assert parents(server) == [sent_by(1)] * 3
        list(late)  # The span of its call, not of its reading.
        assert parents(server) == [sent_by(1)]
        client.score("m", BATCH)
        client.stats()
        assert parents(server) == [(None, None)] * 2


def test_span_of_each_task_is_sent(server: Foreign) -> None:
    async def check() -> None:
        options: Any = {"retry": OFF, "is_matched": False, "shared_bytes": 0}
        async with AsyncClient(server.address, **options) as client:

            async def call(number: int) -> None:
                with trace.use_span(span(number)):
                    await client.score("m", BATCH)
                    [each async for each in client.stream("m", [BATCH])]

            await asyncio.gather(*(call(number) for number in range(1, 6)))
            await client.score("m", BATCH)

    asyncio.run(check())
    sent = parents(server)
    assert sent[-1] == (None, None)
    assert sorted(sent[:-1]) == sorted([sent_by(number) for number in range(1, 6)] * 2)


def test_client_does_not_import_opentelemetry(server: Foreign) -> None:
    code = (
        "import sys, pyarrow as pa; from iskander.client import Client\n"
        f"with Client({server.address!r}, is_matched=False, shared_bytes=0) as client:\n"
        "    client.score('m', pa.record_batch({'x': [1]}))\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
    assert parents(server) == [(None, None)]
