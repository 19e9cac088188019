"""gRPC form of an error: status, message, and machine-readable details in trailers.

Runs on: gateway loop. Source: gRPC's status codes; `google.rpc.Status` and `google.rpc.ErrorInfo`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from iskander.errors import IskanderError
from iskander.foundation.varint import encode_varint
from iskander.gateway.transport.http2.status import RpcError, Status

DOMAIN: Final = "iskander"
ARROW_IO_ERROR: Final = "5"
"""`arrow::StatusCode::IOError`."""
_IO_ERRORS: Final = frozenset(
    {Status.CANCELLED, Status.UNKNOWN, Status.DEADLINE_EXCEEDED, Status.PERMISSION_DENIED,
     Status.ABORTED, Status.INTERNAL, Status.UNAVAILABLE, Status.DATA_LOSS, Status.UNAUTHENTICATED}
)  # fmt: skip
"""Statuses that pyarrow raises as `FlightError`.

The others become Arrow's own exceptions, which have no field for the detail; `x-arrow-status` would
change their type.
"""
_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"


def rpc_error(error: IskanderError, *, is_flight: bool = False) -> RpcError:
    """Convert an error to the status, message and trailers of a call.

    pyarrow exposes the `grpc-status-details-bin` trailer as the `extra_info` of a `FlightError`,
    with Arrow's own status in `x-arrow-status`. Other clients expect a `google.rpc.Status` there,
    and some of them fail the call on any other content.

    Args:
        error: The error.
        is_flight: Encode the details for pyarrow clients.
    """
    status = Status[error.flight_status if is_flight and error.flight_status else error.status]
    detail = msgspec.json.encode(error.to_wire()) if is_flight else _rpc_status(status, error)
    trailers: list[tuple[str, str | bytes]] = [
        ("iskander-code", error.code),
        ("iskander-fault", error.fault.value),
        ("iskander-retryable", "true" if error.retryable else "false"),
        ("grpc-status-details-bin", detail),
    ]
    if error.retry_after_ms is not None:
        trailers.append(("iskander-retry-after-ms", str(error.retry_after_ms)))
    if is_flight and status in _IO_ERRORS:
        trailers.append(("x-arrow-status", ARROW_IO_ERROR))
    return RpcError(status, error.message, tuple(trailers))


def _rpc_status(status: Status, error: IskanderError) -> bytes:
    """Encode a `google.rpc.Status` with one `ErrorInfo`, which has the error's other fields."""
    info = _field(1, error.code.upper()) + _field(2, DOMAIN)
    for name, value in error.to_wire().items():
        if name != "message":
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            info += _field(3, _field(1, name) + _field(2, text))
    detail = _field(1, _ERROR_INFO) + _field(2, info)
    return b"\x08" + encode_varint(int(status)) + _field(2, error.message) + _field(3, detail)


def _field(number: int, value: str | bytes) -> bytes:
    """Encode a length-delimited protobuf field."""
    raw = value.encode() if isinstance(value, str) else value
    return encode_varint(number << 3 | 2) + encode_varint(len(raw)) + raw
