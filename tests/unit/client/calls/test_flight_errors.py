"""Named errors for errors of pyarrow without a detail of a gateway."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from pyarrow import flight

from iskander.client.calls.call_details import CallDetail
from iskander.client.calls.flight_errors import (
    FLIGHT_ERRORS,
    add_model,
    message_of,
    to_iskander_error,
)
from iskander.errors import (
    Cancelled,
    ConnectionFailed,
    ContractError,
    DeadlineExceeded,
    Fault,
    IskanderError,
    ModelNotFound,
    NotReady,
    Overloaded,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    Unsupported,
)

REFUSED = (
    "Flight returned unavailable error, with message: failed to connect to all addresses; last "
    "error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused. gRPC "
    "client debug context: UNAVAILABLE:failed to connect to all addresses. Client context: OK"
)
EXHAUSTED = "gRPC returned resource exhausted error, with message: too many calls. Client context: "


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (flight.FlightUnavailableError("Socket closed"), ConnectionFailed),
        (flight.FlightInternalError("Received RST_STREAM"), ConnectionFailed),
        (flight.FlightTimedOutError("x"), DeadlineExceeded),
        (flight.FlightCancelledError("x"), Cancelled),
        # A proxy whose gateway was killed.
        (flight.FlightCancelledError("Received RST_STREAM with error code 8"), ConnectionFailed),
        (flight.FlightServerError("Stream removed"), ConnectionFailed),
        (pa.ArrowCancelled("x"), Cancelled),
        (flight.FlightUnauthenticatedError("x"), Unauthenticated),
        (flight.FlightUnauthorizedError("x"), PermissionDenied),
        (flight.FlightServerError("x"), IskanderError),
        (pa.ArrowInvalid(EXHAUSTED), Overloaded),
        (pa.ArrowInvalid("x"), ProtocolError),
        (pa.ArrowKeyError("x"), ModelNotFound),
        (pa.ArrowNotImplementedError("x"), Unsupported),
        (pa.ArrowException("x"), ProtocolError),
        (OSError("Expected to read 8 metadata bytes, but only read 4"), ProtocolError),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_each_error_of_a_call_has_a_named_one(error: Exception, kind: type[IskanderError]) -> None:
    assert isinstance(error, FLIGHT_ERRORS)
    named = to_iskander_error(error, "host:1")
    assert type(named) is kind
    assert kind is DeadlineExceeded or message_of(error) in named.message


def test_refused_connections_are_told_from_broken_ones() -> None:
    refused = to_iskander_error(flight.FlightUnavailableError(REFUSED), "127.0.0.1:1")
    assert refused.message == (
        "no gateway answers at 127.0.0.1:1: failed to connect to all addresses; last error: "
        "UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused"
    )
    broken = to_iskander_error(flight.FlightUnavailableError("Socket closed"), "127.0.0.1:1")
    assert broken.message == "the connection to 127.0.0.1:1 failed: Socket closed"
    assert isinstance(broken, NotReady)
    assert (broken.code, broken.fault, broken.retryable) == (
        "connection_failed",
        Fault.OPERATOR,
        True,
    )


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Flight RPC failed with message: boom. gRPC client debug context: UNKNOWN", "boom"),
        ("Flight cancelled call, with message: boom. Client context: OK", "boom"),
        ("Unknown: Flight returned already exists error, with message: boom", "boom"),
        ("gRPC returned out-of-range error, with message: a. b", "a. b"),
        ("k. Detail: Python exception: Traceback (most recent call last):\n  File", "k"),
        ("first\nsecond", "first"),
        ("100 {address} of {text}", "100 {address} of {text}"),
    ],
)
def test_text_has_no_additions_of_pyarrow(raw: str, text: str) -> None:
    assert message_of(pa.ArrowKeyError(raw)) == text
    assert text in to_iskander_error(pa.ArrowInvalid(raw), "host:1").message


def test_model_is_added_to_an_error_without_one() -> None:
    assert add_model(ContractError("x"), "m").model == "m"
    error = ContractError("x", model="other", column="c")
    assert add_model(error, "m") is error
    assert (error.model, error.column) == ("other", "c")


@pytest.mark.parametrize(
    "detail",
    [b"", b"\x08\x0e", b"[]", b"{}", b'{"code": 1, "message": "x"}', b'{"code": "x"}', b"null"],
)
def test_detail_of_another_server_is_ignored(detail: bytes) -> None:
    call = CallDetail(None)
    call.received_headers({"grpc-status-details-bin": [detail]})
    assert call.server_error() is None


def test_detail_of_a_gateway_is_its_error() -> None:
    call = CallDetail("secret")
    wire = ContractError("wrong type", column="c").to_wire()
    call.received_headers({"grpc-status-details-bin": [json.dumps(wire).encode()]})
    error = call.server_error()
    assert isinstance(error, ContractError)
    assert (error.message, error.column) == ("wrong type", "c")
    assert call.sending_headers() == {"authorization": "Bearer secret"}
