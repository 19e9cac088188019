"""Errors of failed gRPC calls: status, error code, and details for each protocol."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from support import raw

from iskander.errors import (
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    MalformedInput,
    ModelNotFound,
    Overloaded,
    Unsupported,
)
from iskander.gateway.auth.origin import UNKNOWN_ORIGIN
from iskander.gateway.protocols.grpc_errors import rpc_error
from iskander.gateway.protocols.grpc_server import GrpcServer, _message_bytes, _with_message
from iskander.gateway.transport.http2.call import Call, Message
from iskander.gateway.transport.http2.status import RpcError, Status

FLIGHT = "/arrow.flight.protocol.FlightService/DoGet"
OTHER = "/inference.GRPCInferenceService/ModelInfer"


class FakeCall(Call):
    def __init__(self, path: str) -> None:
        self.path, self.metadata = path, ()
        self._streams: Any = SimpleNamespace(origin=UNKNOWN_ORIGIN)


class FakeServer(GrpcServer):
    """A server whose methods raise the given error."""

    def __init__(self, error: Exception) -> None:
        async def serve(_: Call) -> None:
            raise error

        self._methods = {FLIGHT: serve, OTHER: serve}
        self._flight_methods = {FLIGHT: serve}
        self._access, self._flight, self._own_id = self, self, ""

    def reader_grant(self, _: Call) -> None:
        """No call is of a reader process."""

    async def authenticate(self, *_: Any, **__: Any) -> None:
        """Allow every call."""

    def serve_error(self, path: str) -> RpcError:
        with pytest.raises(RpcError) as raised:
            asyncio.run(self._serve(FakeCall(path)))
        return raised.value


def code_of(error: RpcError) -> Any:
    return dict(error.trailers)["iskander-code"]


def test_unknown_method_is_unsupported() -> None:
    error = FakeServer(AssertionError()).serve_error("/no.such.Service/Call")
    assert (error.status, code_of(error)) == (Status.UNIMPLEMENTED, "unsupported")
    assert "/no.such.Service/Call" in error.message


@pytest.mark.parametrize(
    ("status", "error_type"),
    [
        (Status.RESOURCE_EXHAUSTED, LimitExceeded),
        (Status.INTERNAL, MalformedInput),
        (Status.UNIMPLEMENTED, Unsupported),
        (Status.UNAVAILABLE, Overloaded),
        (Status.DEADLINE_EXCEEDED, DeadlineExceeded),
    ],
)
@pytest.mark.parametrize("path", [FLIGHT, OTHER])
def test_transport_errors_get_an_error_code(
    path: str, status: Status, error_type: type[IskanderError]
) -> None:
    error = FakeServer(RpcError(status, "why")).serve_error(path)
    expected = (
        error_type.flight_status
        if path == FLIGHT and error_type.flight_status
        else error_type.status
    )
    assert (error.status.name, code_of(error), error.message) == (expected, error_type.code, "why")


def test_internal_error_has_a_code_and_hides_its_text() -> None:
    error = FakeServer(ValueError("secret")).serve_error(OTHER)
    assert (error.status, code_of(error)) == (Status.INTERNAL, "internal")
    assert "secret" not in error.message


def test_details_are_json_in_flight_and_a_grpc_status_elsewhere() -> None:
    """grpc-go before 1.59 reports INTERNAL for an error with any other detail."""
    error = Overloaded("größer", retry_after_ms=3, model="m")
    flight, other = rpc_error(error, is_flight=True), rpc_error(error)

    assert (flight.status, other.status) == (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED)
    detail_fields = json.loads(dict(flight.trailers)["grpc-status-details-bin"])
    assert (detail_fields["code"], detail_fields["model"]) == ("overloaded", "m")
    info = raw.field(1, b"OVERLOADED") + raw.field(2, b"iskander")
    for name, value in detail_fields.items():
        if name != "message":
            encoded = value if isinstance(value, str) else json.dumps(value)
            info += raw.field(3, raw.field(1, name.encode()) + raw.field(2, encoded.encode()))
    detail = raw.field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + raw.field(2, info)
    expected = b"\x08\x08" + raw.field(2, "größer".encode()) + raw.field(3, detail)
    assert dict(other.trailers)["grpc-status-details-bin"] == expected
    assert dict(flight.trailers)["x-arrow-status"] == "5"
    assert "x-arrow-status" not in dict(other.trailers)
    assert "x-arrow-status" not in dict(rpc_error(ModelNotFound("m"), is_flight=True).trailers)
    for each in (flight, other):
        assert dict(each.trailers)["iskander-retry-after-ms"] == "3"


def test_call_that_ends_before_its_message_is_malformed() -> None:
    class EndedCall(FakeCall):
        has_input = True

        def receive(self) -> Message | None:
            return None

    async def handler(*_: Any) -> None:
        pytest.fail("the call was answered")

    with pytest.raises(MalformedInput, match="before its message"):
        asyncio.run(_with_message(handler)(EndedCall(OTHER)))


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/inference.GRPCInferenceService/ModelInfer", 1 << 30),
        ("/inference.GRPCInferenceService/ModelStreamInfer", 1 << 30),
        ("/arrow.flight.protocol.FlightService/DoExchange", 1 << 30),
        ("/inference.GRPCInferenceService/RepositoryModelLoad", 1 << 16),
        ("/inference.GRPCInferenceService/TraceSetting", 1 << 16),
        ("/arrow.flight.protocol.FlightService/DoAction", 1 << 16),
        ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", 1 << 16),
        ("/no.such.Service/Call", 1 << 16),
        ("/inference.GRPCInferenceService/ServerLive", 1024),
        ("/grpc.health.v1.Health/Check", 1024),
    ],
)
def test_only_batch_methods_accept_large_messages(path: str, limit: int) -> None:
    """Parsing in the protobuf runtime blocks the event loop."""
    assert _message_bytes(1 << 30, path) == limit


@pytest.mark.parametrize("is_flight", [True, False])
@pytest.mark.parametrize("letter", ["a", "%", "\x7f", "\n", "é", "🤖", '"'])
def test_error_of_any_text_fits_in_grpc_trailers(letter: str, is_flight: bool) -> None:
    """The limit is 8 KiB, after percent-encoding and base64."""
    text = letter * 100_000
    error = ModelNotFound(text, retry_after_ms=2**53, model=text, tensor=text, wanted=2**53)
    sent = rpc_error(error, is_flight=is_flight)
    size = len(quote(sent.message)) + 100
    for name, value in sent.trailers:
        size += len(name) + 32 + (len(value) * 4 // 3 if isinstance(value, bytes) else len(value))
    assert size < 8192
