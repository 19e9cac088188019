"""How a call ends: every error has its name beside its status, in the form its readers want."""

from __future__ import annotations

import asyncio
import json
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
from iskander.protocols.grpc_errors import rpc_error
from iskander.protocols.grpc_server import GrpcServer, _message_bytes, _with_message
from iskander.transport.http2.call import Call, Message
from iskander.transport.http2.status import RpcError, Status

FLIGHT = "/arrow.flight.protocol.FlightService/DoGet"
OTHER = "/inference.GRPCInferenceService/ModelInfer"


class PlayedCall(Call):
    def __init__(self, path: str) -> None:
        self.path, self.metadata = path, ()


class PlayedServer(GrpcServer):
    """Its methods end as they are told."""

    def __init__(self, ends_with: Exception) -> None:
        async def serve(_: Call) -> None:
            raise ends_with

        self._methods = {FLIGHT: serve, OTHER: serve}
        self._flight_methods = {FLIGHT: serve}
        self._access = self

    def grant(self, *_: Any, **__: Any) -> None:
        """Everybody may ask."""

    def outcome(self, path: str) -> RpcError:
        with pytest.raises(RpcError) as ended:
            asyncio.run(self._serve(PlayedCall(path)))
        return ended.value


def code_of(error: RpcError) -> Any:
    return dict(error.trailers)["iskander-code"]


def test_an_unknown_method_is_unsupported() -> None:
    ended = PlayedServer(AssertionError()).outcome("/no.such.Service/Call")
    assert (ended.status, code_of(ended)) == (Status.UNIMPLEMENTED, "unsupported")
    assert "/no.such.Service/Call" in ended.message


@pytest.mark.parametrize(
    ("status", "named"),
    [
        (Status.RESOURCE_EXHAUSTED, LimitExceeded),
        (Status.INTERNAL, MalformedInput),
        (Status.UNIMPLEMENTED, Unsupported),
        (Status.UNAVAILABLE, Overloaded),
        (Status.DEADLINE_EXCEEDED, DeadlineExceeded),
    ],
)
@pytest.mark.parametrize("path", [FLIGHT, OTHER])
def test_what_the_transport_refuses_has_a_name(
    path: str, status: Status, named: type[IskanderError]
) -> None:
    ended = PlayedServer(RpcError(status, "why")).outcome(path)
    status_of = named.flight_status if path == FLIGHT and named.flight_status else named.status
    assert (ended.status.name, code_of(ended), ended.message) == (status_of, named.code, "why")


def test_a_failure_of_ours_has_a_name_and_no_text() -> None:
    ended = PlayedServer(ValueError("secret")).outcome(OTHER)
    assert (ended.status, code_of(ended)) == (Status.INTERNAL, "internal")
    assert "secret" not in ended.message


def test_flight_has_the_detail_as_json_and_others_have_it_as_grpcs_own_message() -> None:
    """grpc-go before 1.59 makes INTERNAL of an error whose detail is anything else."""
    error = Overloaded("größer", retry_after_ms=3, model="m")
    flight, other = rpc_error(error, is_flight=True), rpc_error(error)

    assert (flight.status, other.status) == (Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED)
    told = json.loads(dict(flight.trailers)["grpc-status-details-bin"])
    assert (told["code"], told["model"]) == ("overloaded", "m")
    info = raw.field(1, b"OVERLOADED") + raw.field(2, b"iskander")
    for name, value in told.items():
        if name != "message":
            text = value if isinstance(value, str) else json.dumps(value)
            info += raw.field(3, raw.field(1, name.encode()) + raw.field(2, text.encode()))
    detail = raw.field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + raw.field(2, info)
    wanted = b"\x08\x08" + raw.field(2, "größer".encode()) + raw.field(3, detail)
    assert dict(other.trailers)["grpc-status-details-bin"] == wanted
    assert dict(flight.trailers)["x-arrow-status"] == "5"
    assert "x-arrow-status" not in dict(other.trailers)
    assert "x-arrow-status" not in dict(rpc_error(ModelNotFound("m"), is_flight=True).trailers)
    for ended in (flight, other):
        assert dict(ended.trailers)["iskander-retry-after-ms"] == "3"


def test_a_call_that_ends_before_its_message_is_malformed() -> None:
    class Ended(PlayedCall):
        has_input = True

        def receive(self) -> Message | None:
            return None

    async def never(*_: Any) -> None:
        pytest.fail("it is answered")

    with pytest.raises(MalformedInput, match="before its message"):
        asyncio.run(_with_message(never)(Ended(OTHER)))


@pytest.mark.parametrize(
    ("path", "most"),
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
def test_only_batches_may_be_large(path: str, most: int) -> None:
    """What a protobuf runtime reads holds up all others meanwhile."""
    assert _message_bytes(1 << 30, path) == most


@pytest.mark.parametrize("is_flight", [True, False])
@pytest.mark.parametrize("letter", ["a", "%", "\x7f", "\n", "é", "🤖", '"'])
def test_an_error_of_any_text_stays_below_what_grpc_takes(letter: str, is_flight: bool) -> None:
    """In trailers of 8 KiB, whose bytes are percent-encoded and in base64."""
    said = letter * 100_000
    error = ModelNotFound(said, retry_after_ms=2**53, model=said, tensor=said, wanted=2**53)
    ended = rpc_error(error, is_flight=is_flight)
    size = len(quote(ended.message)) + 100
    for name, value in ended.trailers:
        size += len(name) + 32 + (len(value) * 4 // 3 if isinstance(value, bytes) else len(value))
    assert size < 8192
