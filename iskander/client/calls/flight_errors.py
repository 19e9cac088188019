"""Conversion of errors of pyarrow.flight that have no detail of a gateway.

Such errors are failures of the connection, statuses of a proxy, and timeouts of the client.

Runs on: the caller's threads. Pure.
"""

from __future__ import annotations

import re
from typing import TypeVar

import pyarrow as pa
from pyarrow import flight

from iskander.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExceeded,
    IskanderError,
    ModelNotFound,
    Overloaded,
    PermissionDenied,
    ProtocolError,
    Unauthenticated,
    Unsupported,
)

ErrorT = TypeVar("ErrorT", bound=IskanderError)

FLIGHT_ERRORS = (flight.FlightError, pa.ArrowException, OSError)

_KINDS: tuple[tuple[type[Exception], type[IskanderError], str], ...] = (
    (flight.FlightTimedOutError, DeadlineExceeded, "the call's deadline has passed"),
    (pa.ArrowCancelled, Cancelled, "the call was cancelled: {text}"),  # Also FlightCancelledError.
    (flight.FlightUnauthenticatedError, Unauthenticated, "{address} rejected the token: {text}"),
    (flight.FlightUnauthorizedError, PermissionDenied, "{address} rejected the call: {text}"),
    (flight.FlightUnavailableError, ConnectionFailed, "the connection to {address} failed: {text}"),
    (flight.FlightInternalError, ConnectionFailed, "the connection to {address} failed: {text}"),
    (flight.FlightError, IskanderError, "the call failed at {address}: {text}"),
    (pa.ArrowKeyError, ModelNotFound, "{address} has no such model or action: {text}"),
    (pa.ArrowNotImplementedError, Unsupported, "{address} does not have this call: {text}"),
    (Exception, ProtocolError, "{address} is no gateway, or of another version: {text}"),
)
"""Class of pyarrow, named error and its text; the first entry whose class matches is used.

A reset connection is a `FlightInternalError`; so are the statuses ABORTED and DATA_LOSS.
"""
_NOT_CONNECTED = ("failed to connect", "errors resolving", "empty address list")
"""Texts of gRPC for a call that reached no gateway. Other connections fail during a call."""
_CUT = ("RST_STREAM", "Stream removed")
"""Texts of gRPC for a call that a proxy ended because it lost the gateway."""
_EXHAUSTED = "gRPC returned resource exhausted error"
"""Text of pyarrow for RESOURCE_EXHAUSTED, which is an `ArrowInvalid`."""
_PREFIX = re.compile(r"\A(?:Unknown: )?(?:Flight|gRPC) [a-zA-Z -]+,? (?:with )?message: ")
_SUFFIX = re.compile(r"(\. (Detail|gRPC client debug context|Client context): |\n).*", re.S)


def to_iskander_error(error: Exception, address: str) -> IskanderError:
    """Convert one of `FLIGHT_ERRORS`, from a call to `address`, to a named error."""
    text = message_of(error)
    if _EXHAUSTED in str(error):
        return Overloaded(f"{address} is at a limit: {text}")
    _, kind, template = next(named for named in _KINDS if isinstance(error, named[0]))
    if kind in (Cancelled, IskanderError) and any(each in text for each in _CUT):
        kind, template = ConnectionFailed, "the connection to {address} failed: {text}"
    if kind is ConnectionFailed and any(known in text for known in _NOT_CONNECTED):
        template = "no gateway answers at {address}: {text}"
    return kind(template.format(address=address, text=text))


def message_of(error: Exception) -> str:
    """Return the message of an error without the additions of pyarrow and gRPC."""
    text = str(error.args[0] if error.args else error)
    return _SUFFIX.sub("", _PREFIX.sub("", text))


def add_model(error: ErrorT, model: str) -> ErrorT:
    """Set the model of an error that has none."""
    error.fields.setdefault("model", model)
    return error
