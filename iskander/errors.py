"""Named errors: fault, retryability, and the status of each protocol.

An `AssertionError` is a bug in this program: it ends a worker, which the supervisor restarts; in
the gateway it ends the call and is logged. An `IskanderError` is an expected failure: it is
handled, counted and returned to the caller. Pure; any process may import it.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)
MESSAGE_BYTES_MAX = 900
"""gRPC sends the text twice beside the detail and drops the status when headers pass 8 KiB."""
FIELD_BYTES_MAX = 150
INTERNAL = "internal server error; details are in the server log"
"""Text for clients; only the log has the exception, which may contain internals."""
_JSON_BYTES_MAX = 6
_SHOWN_MAX = 200
_SURROGATE = re.compile("[\ud800-\udfff]")
_BYTES_FROM = 0xDC00
"""Source: PEP 383 (`surrogateescape`): byte 0xFF is U+DCFF."""

_RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
_HTTP_STATUS = {
    "INVALID_ARGUMENT": 400, "UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "NOT_FOUND": 404,
    "ABORTED": 409, "CANCELLED": 499, "INTERNAL": 500, "FAILED_PRECONDITION": 500,
    "UNIMPLEMENTED": 501, "UNAVAILABLE": 503, "RESOURCE_EXHAUSTED": 503, "DEADLINE_EXCEEDED": 504,
}  # fmt: skip
"""HTTP status for each gRPC status."""


class Fault(StrEnum):
    """The party that has to change something for the same request to succeed."""

    CLIENT = "client"
    MODEL = "model"
    NOBODY = "nobody"
    OPERATOR = "operator"
    SERVER = "server"


class IskanderError(Exception):
    """An internal error of the server; base class of all named errors.

    Class attributes: `code` is stable and part of the interface; `retryable` means that the same
    request may succeed later; `status` is the gRPC status; `flight_status` replaces it for Flight,
    because pyarrow clients show RESOURCE_EXHAUSTED as a bad argument; `http_status` is for HTTP;
    `settings` are the limits that cause it, settings or whole sections.
    A subclass passes its code, fault and gRPC status; the others follow from the gRPC status. An
    `ExecutionFailed` may have another fault and status than its class.

    Attributes:
        is_counted: The statistics of the server have the request that this error ended.

    Args:
        message: Text of the error: what, where, expected, got. Never a traceback, path or address.
        retry_after_ms: Delay before a retry, if it is known.
        fields: Named values for programs, such as `column="user_id"`; str, int or None.
    """

    code: ClassVar[str] = "internal"
    fault: Fault = Fault.SERVER
    retryable: ClassVar[bool] = False
    status: str = "INTERNAL"
    flight_status: ClassVar[str | None] = None
    http_status: int = 500
    settings: ClassVar[tuple[str, ...]] = ()
    is_counted: bool = False

    _by_code: ClassVar[dict[str, type[IskanderError]]] = {}

    def __init_subclass__(
        cls,
        *,
        code: str,
        fault: Fault,
        status: str,
        http_status: int | None = None,
        settings: tuple[str, ...] = (),
    ) -> None:
        """Set the class attributes and register the class for `from_wire`."""
        assert code not in IskanderError._by_code, f"two errors have the code {code}"
        IskanderError._by_code[code] = cls
        cls.code, cls.fault, cls.status = code, fault, status
        cls.retryable = status in _RETRYABLE
        cls.flight_status = "UNAVAILABLE" if status == "RESOURCE_EXHAUSTED" else None
        cls.http_status = http_status or _HTTP_STATUS[status]
        cls.settings = settings

    def __init__(self, message: str, *, retry_after_ms: int | None = None, **fields: Any) -> None:  # noqa: ANN401
        self.message = shorten(message)
        self.retry_after_ms = retry_after_ms
        self.fields = {key: value for key, value in fields.items() if value is not None}
        super().__init__(self.message)

    @property
    def column(self) -> str | None:
        """Name of the column that caused the error; None if it is unknown."""
        return self._text_field("column")

    @property
    def model(self) -> str | None:
        """Name of the model of the request; None if it is unknown."""
        return self._text_field("model")

    def _text_field(self, name: str) -> str | None:
        value = self.fields.get(name)
        return None if value is None else str(value)

    def to_wire(self) -> dict[str, Any]:
        """Convert to plain values for JSON and msgpack."""
        wire: dict[str, Any] = {
            "code": self.code,
            "fault": self.fault.value,
            "retryable": self.retryable,
            "message": self.message,
        }
        if self.retry_after_ms is not None:
            wire["retry_after_ms"] = self.retry_after_ms
        for key, value in self.fields.items():
            wire[key] = shorten(value, FIELD_BYTES_MAX) if isinstance(value, str) else value
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> IskanderError:
        """Convert back from `to_wire`; an unknown code gives a plain `IskanderError`.

        The peer may be faulty: a value of another type is replaced by the default.
        """
        known = ("code", "fault", "retryable", "message", "retry_after_ms", "self")
        fields = {key: value for key, value in wire.items() if key not in known}
        code, message, wait_ms = (wire.get(key) for key in ("code", "message", "retry_after_ms"))
        kind = IskanderError._by_code.get(code, IskanderError) if isinstance(code, str) else None
        error = (kind or IskanderError)(
            message if isinstance(message, str) else "",
            retry_after_ms=wait_ms if type(wait_ms) is int else None,
            **fields,
        )
        if isinstance(error, ExecutionFailed) and wire.get("fault") == Fault.CLIENT:
            error.blame_input()
        return error


def shorten(text: str, bytes_max: int = MESSAGE_BYTES_MAX) -> str:
    """Truncate a text to a number of bytes, counted as JSON in UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) * _JSON_BYTES_MAX <= bytes_max:
        return text
    total = fitting = 0
    for count, letter in enumerate(text, start=1):
        total += _json_bytes(letter)
        if total > bytes_max:
            return text[:fitting] + "..."
        if total <= bytes_max - 3:
            fitting = count
    return text


def utf8_problem(text: str) -> str:
    """Why a text cannot be sent or stored, with its bytes shown; empty if it is UTF-8.

    Python reads bytes of arguments and file names that are not UTF-8 as surrogates.
    """
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"`{_SURROGATE.sub(_shown, text[:_SHOWN_MAX])}` is not UTF-8"
    return ""


def _shown(found: re.Match[str]) -> str:
    """Write a surrogate as the byte that it stands for, or as its number."""
    code = ord(found[0])
    is_byte = _BYTES_FROM <= code <= _BYTES_FROM + 0xFF
    return f"\\x{code - _BYTES_FROM:02x}" if is_byte else f"\\u{code:04x}"


def _json_bytes(letter: str) -> int:
    if letter < " ":
        return _JSON_BYTES_MAX
    return 2 if letter in '"\\' else len(letter.encode())


def detach(error: ErrorT) -> ErrorT:
    """Drop the traceback and the chained errors of an error that is kept.

    Their frames keep messages in memory until a garbage collection.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class ContractError(IskanderError, code="contract", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """Names, types, shapes or rows of the request do not match the model's contract."""


class MalformedInput(
    IskanderError, code="malformed", fault=Fault.CLIENT, status="INVALID_ARGUMENT"
):
    """The bytes are not valid messages of the protocol."""


class LimitExceeded(
    IskanderError,
    code="limit",
    fault=Fault.CLIENT,
    status="INVALID_ARGUMENT",
    http_status=413,
    settings=("limits", "http.json_bytes", "models.max_batch_rows", "shared_memory.region_bytes"),
):
    """The request is larger than a configured limit."""


class ModelNotFound(IskanderError, code="model_not_found", fault=Fault.CLIENT, status="NOT_FOUND"):
    """No model has this name or version."""


class SourceNotFound(
    IskanderError, code="source_not_found", fault=Fault.CLIENT, status="NOT_FOUND"
):
    """No source has this name."""


class SourceChanged(
    IskanderError, code="source_changed", fault=Fault.CLIENT, status="FAILED_PRECONDITION"
):
    """An input file is gone, or its size, time or ETag differs from the plan or ticket."""


class SourceError(IskanderError, code="source", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """An input cannot be read: no files, mixed formats, different schemas or invalid bytes."""


class FilterError(IskanderError, code="filter", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """The filter is not in the language of filters, or it does not fit the columns."""


class TicketRejected(IskanderError, code="ticket", fault=Fault.CLIENT, status="INVALID_ARGUMENT"):
    """The ticket is expired, altered, of another key, or its source changed; request a new one."""


class ReaderLost(IskanderError, code="reader_lost", fault=Fault.SERVER, status="UNAVAILABLE"):
    """The process that reads a source ended, or made no progress in time."""


class Unauthenticated(
    IskanderError, code="unauthenticated", fault=Fault.CLIENT, status="UNAUTHENTICATED"
):
    """The call has no valid token.

    Attributes:
        has_new_token: Python client: its token function returns another token than the call had.
    """

    has_new_token: bool = False


class PermissionDenied(
    IskanderError, code="permission_denied", fault=Fault.CLIENT, status="PERMISSION_DENIED"
):
    """The token does not permit this model or action."""


class CrossSiteRequest(
    IskanderError, code="cross_site", fault=Fault.CLIENT, status="PERMISSION_DENIED"
):
    """A web page of another site sent the HTTP request, or its `Host` is no name of the server."""


class RegionNotFound(
    IskanderError, code="region_not_found", fault=Fault.CLIENT, status="NOT_FOUND"
):
    """The shared-memory region of the stream does not exist or was released."""


class ModelMoved(IskanderError, code="model_moved", fault=Fault.NOBODY, status="UNAVAILABLE"):
    """The model version was replaced or unloaded during the stream or request."""


class RuntimeDiffers(
    IskanderError, code="runtime_differs", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"
):
    """The model runs with another library, execution provider or number of threads than wanted."""


class Unsupported(IskanderError, code="unsupported", fault=Fault.CLIENT, status="UNIMPLEMENTED"):
    """The server does not implement this part of the protocol."""


class Overloaded(
    IskanderError,
    code="overloaded",
    fault=Fault.NOBODY,
    status="RESOURCE_EXHAUSTED",
    settings=(
        "limits.streams",
        "limits.receive_bytes",
        "http.connections",
        "http.bodies_bytes",
        "source_reads.streams",
    ),
):
    """Streams, calls, connections or received bytes are at their limit."""


class QueueFull(
    IskanderError,
    code="queue_full",
    fault=Fault.NOBODY,
    status="RESOURCE_EXHAUSTED",
    settings=("lanes.queue_requests", "lanes.queue_rows", "lanes.queue_bytes"),
):
    """The model's queue is at its limit of requests, rows or bytes."""


class ClientOverShare(
    IskanderError,
    code="client_over_share",
    fault=Fault.CLIENT,
    status="RESOURCE_EXHAUSTED",
    http_status=429,
    settings=("lanes.client_requests",),
):
    """The client is at its limit of outstanding requests, or its token at that of rows.

    Also for a short time after requests of the client ended workers of the model.
    """


class RateLimited(
    IskanderError,
    code="rate_limited",
    fault=Fault.CLIENT,
    status="RESOURCE_EXHAUSTED",
    http_status=429,
):
    """The token sends more requests or rows per second than its limits permit."""


class ArenaFull(
    IskanderError,
    code="arena_full",
    fault=Fault.NOBODY,
    status="RESOURCE_EXHAUSTED",
    settings=("arena.input_bytes", "limits.arena_wait_ms"),
):
    """Shared memory had no free space before the timeout."""


class DroppedFromQueue(
    IskanderError,
    code="dropped",
    fault=Fault.NOBODY,
    status="RESOURCE_EXHAUSTED",
    settings=("lanes.overflow",),
):
    """The queue was full and its policy evicted this request."""


class Superseded(IskanderError, code="superseded", fault=Fault.CLIENT, status="ABORTED"):
    """A newer request of the same client replaced this one before it ran."""


class DeadlineUnreachable(
    IskanderError, code="deadline_unreachable", fault=Fault.NOBODY, status="RESOURCE_EXHAUSTED"
):
    """The cost model predicts a missed deadline; the request did not run."""


class DeadlineExceeded(
    IskanderError, code="deadline_exceeded", fault=Fault.NOBODY, status="DEADLINE_EXCEEDED"
):
    """The deadline, the queue timeout or the age limit passed before the request ran.

    For a remote model also while it ran.

    Attributes:
        is_unanswered: Python client: its own timer ended the call, without an answer of the server.
    """

    is_unanswered: bool = False


class Cancelled(IskanderError, code="cancelled", fault=Fault.CLIENT, status="CANCELLED"):
    """The caller cancelled the request."""


class NotReady(IskanderError, code="not_ready", fault=Fault.OPERATOR, status="UNAVAILABLE"):
    """The model has no warmed worker now."""


class ConnectionFailed(
    NotReady, code="connection_failed", fault=Fault.OPERATOR, status="UNAVAILABLE"
):
    """Python client: no gateway answers at the address, or the connection failed during a call."""


class Draining(IskanderError, code="draining", fault=Fault.NOBODY, status="UNAVAILABLE"):
    """The server rejects new requests, or ends an old connection; another one accepts them."""


class PoisonedRequest(IskanderError, code="poisoned", fault=Fault.MODEL, status="INTERNAL"):
    """Two workers died while they ran this request; it is not retried.

    One is enough for a request that ran alone, of a source that sent such a request before.
    """


class ModelQuarantined(
    IskanderError, code="model_quarantined", fault=Fault.MODEL, status="UNAVAILABLE"
):
    """Batches of this model ended several workers; its requests are rejected for a while."""


class ExecutionFailed(IskanderError, code="execution_failed", fault=Fault.MODEL, status="INTERNAL"):
    """The runtime failed to run the model on this batch.

    If the model runs other rows, the values are the cause: then the fault is that of the client,
    with INVALID_ARGUMENT and 400. The fields `row` and `column` name the first such row of the
    request, and its column, where a worker could find them.

    Attributes:
        is_shape: In a worker: a result has another shape than the contract.
    """

    is_shape: bool = False
    _reason: str = ""

    @property
    def row(self) -> int | None:
        """The first row of the request that fails alone, from 0; None if it is unknown."""
        row = self.fields.get("row")
        return row if isinstance(row, int) else None

    def blame_input(self) -> None:
        """Make it a fault of the client's values instead of the model."""
        self.fault, self.status, self.http_status = Fault.CLIENT, "INVALID_ARGUMENT", 400

    def located(self, row: int | None, column: str | None) -> ExecutionFailed:
        """Return the error with a row and a column, which its text begins with."""
        places = [f"row {row}"] if row is not None else []
        places += [f"column `{column}`"] if column is not None else []
        reason = self._reason or self.message
        text = f"{', '.join(places)}: {reason}" if places else reason
        fields = {**self.fields, "row": row, "column": column}
        error = type(self)(text, retry_after_ms=self.retry_after_ms, **fields)
        error._reason = reason
        error.fault, error.status, error.http_status = self.fault, self.status, self.http_status
        return error


class RemoteUnavailable(
    IskanderError, code="remote_unavailable", fault=Fault.OPERATOR, status="UNAVAILABLE"
):
    """Backend `remote`: the remote server cannot be reached, or the connection was lost."""


class RemoteOverloaded(
    IskanderError, code="remote_overloaded", fault=Fault.NOBODY, status="RESOURCE_EXHAUSTED"
):
    """Backend `remote`: the remote server rejected the batch because of its load or its stop."""


class RemoteNotReady(
    IskanderError, code="remote_not_ready", fault=Fault.OPERATOR, status="UNAVAILABLE"
):
    """Backend `remote`: the remote server does not have the model, or not yet."""


class RemoteDenied(
    IskanderError, code="remote_denied", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"
):
    """Backend `remote`: the remote server does not accept this server's token or certificate."""


class RemoteTimeout(
    IskanderError, code="remote_timeout", fault=Fault.OPERATOR, status="DEADLINE_EXCEEDED"
):
    """Backend `remote`: the remote server did not answer in time."""


class RemoteLoop(
    IskanderError, code="remote_loop", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"
):
    """Backend `remote`: the remote server is this server, or calls it through others."""


class RemoteRejected(
    ContractError, code="remote_rejected", fault=Fault.CLIENT, status="INVALID_ARGUMENT"
):
    """Backend `remote`: the remote server rejected the batch as invalid or too large."""


class RemoteFailed(ExecutionFailed, code="remote_failed", fault=Fault.MODEL, status="INTERNAL"):
    """Backend `remote`: the remote server failed to run the model on this batch."""


class RemoteAnswerInvalid(
    ExecutionFailed, code="remote_answer", fault=Fault.OPERATOR, status="INTERNAL"
):
    """Backend `remote`: the remote server's answer does not match the model's contract."""


class ManifestError(
    IskanderError, code="manifest", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"
):
    """The model or its manifest is invalid or not supported."""


class ConfigError(IskanderError, code="config", fault=Fault.OPERATOR, status="FAILED_PRECONDITION"):
    """A setting is unknown, has the wrong type, is out of range or conflicts with another one."""


class ProtocolError(IskanderError, code="protocol", fault=Fault.SERVER, status="INTERNAL"):
    """The other process uses another protocol version or sent an invalid message."""


class SegmentError(IskanderError, code="segment", fault=Fault.SERVER, status="INTERNAL"):
    """The system refused memory, or a range was accessed without a lease."""
