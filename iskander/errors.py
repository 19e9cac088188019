"""Every failure with a name: whose fault, whether to retry, its status on each front door.

Two kinds of failure are never mixed. An `AssertionError` says that this program is wrong: a worker
ends and is started again, in the gateway the call that met it ends, and the log says where. An
`IskanderError` says that the world is as it is: it is handled, counted and told to the caller.
Pure; any process may import it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, TypeVar

ErrorT = TypeVar("ErrorT", bound=BaseException)
MESSAGE_BYTES_MAX = 900
"""gRPC sends the text twice beside the detail and drops the status when headers pass 8 KiB."""


FIELD_BYTES_MAX = 150
_JSON_BYTES_MAX = 6


class Fault(StrEnum):
    """Who has to change something for the same request to succeed."""

    CLIENT = "client"
    MODEL = "model"
    NOBODY = "nobody"
    OPERATOR = "operator"
    SERVER = "server"


class IskanderError(Exception):
    """A named failure; by itself, one of the server's own that has no other name.

    Class attributes: `code` is stable and part of the interface; `retryable` says whether the very
    same request may succeed later; `status` is the gRPC status, and `flight_status` the one used
    where pyarrow clients are the readers (they show RESOURCE_EXHAUSTED as a bad argument);
    `http_status` is the one over HTTP.

    Args:
        message: What, where, wanted and got, in words. Never a traceback, path or address.
        retry_after_ms: When a retry is worth it, if that is known.
        fields: Named facts for programs, such as `column="user_id"`; str, int or None.
    """

    code: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = Fault.SERVER
    retryable: ClassVar[bool] = False
    status: ClassVar[str] = "INTERNAL"
    flight_status: ClassVar[str | None] = None
    http_status: ClassVar[int] = 500

    _by_code: ClassVar[dict[str, type[IskanderError]]] = {}

    def __init_subclass__(cls) -> None:
        """Enter the class in the table that `from_wire` looks up."""
        assert cls.code not in IskanderError._by_code, f"two errors are called {cls.code}"
        IskanderError._by_code[cls.code] = cls

    def __init__(self, message: str, *, retry_after_ms: int | None = None, **fields: Any) -> None:  # noqa: ANN401
        self.message = shorten(message)
        self.retry_after_ms = retry_after_ms
        self.fields = {key: value for key, value in fields.items() if value is not None}
        super().__init__(self.message)

    def to_wire(self) -> dict[str, Any]:
        """The error as plain values, for JSON and msgpack."""
        wire: dict[str, Any] = {
            "code": self.code,
            "fault": self.fault.value,
            "retryable": self.retryable,
            "message": self.message,
        }
        if self.retry_after_ms is not None:
            wire["retry_after_ms"] = self.retry_after_ms
        return wire | {key: _shorten_field(value) for key, value in self.fields.items()}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> IskanderError:
        """The error that `to_wire` described; an unknown code gives a plain `IskanderError`."""
        known = ("code", "fault", "retryable", "message", "retry_after_ms")
        fields = {key: value for key, value in wire.items() if key not in known}
        kind = IskanderError._by_code.get(wire.get("code", ""), IskanderError)
        return kind(wire.get("message", ""), retry_after_ms=wire.get("retry_after_ms"), **fields)


def shorten(text: str, bytes_max: int = MESSAGE_BYTES_MAX) -> str:
    """Cut a text to what fits into an error, by the bytes that it takes as JSON in UTF-8."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) * _JSON_BYTES_MAX <= bytes_max:
        return text
    total = fitting = 0
    for kept, letter in enumerate(text, start=1):
        total += _json_bytes(letter)
        if total > bytes_max:
            return text[:fitting] + "..."
        if total <= bytes_max - 3:
            fitting = kept
    return text


def _json_bytes(letter: str) -> int:
    if letter < " ":
        return _JSON_BYTES_MAX
    return 2 if letter in '"\\' else len(letter.encode())


def _shorten_field(value: Any) -> Any:  # noqa: ANN401
    return shorten(value, FIELD_BYTES_MAX) if isinstance(value, str) else value


class ContractError(IskanderError):
    """Names, types, shapes or rows of a request do not meet the model's contract."""

    code = "contract"
    fault = Fault.CLIENT
    status = "INVALID_ARGUMENT"
    http_status = 400


class MalformedInput(IskanderError):
    """The bytes are not the messages that they claim to be."""

    code = "malformed"
    fault = Fault.CLIENT
    status = "INVALID_ARGUMENT"
    http_status = 400


class LimitExceeded(IskanderError):
    """The request is larger than this server is configured to take; it will never fit."""

    code = "limit"
    fault = Fault.CLIENT
    status = "INVALID_ARGUMENT"
    http_status = 413


class ModelNotFound(IskanderError):
    """No model of that name or version is configured."""

    code = "model_not_found"
    fault = Fault.CLIENT
    status = "NOT_FOUND"
    http_status = 404


class Unauthenticated(IskanderError):
    """The server wants a token, and none was shown that is valid."""

    code = "unauthenticated"
    fault = Fault.CLIENT
    status = "UNAUTHENTICATED"
    http_status = 401


class PermissionDenied(IskanderError):
    """The token that was shown is for other models, or not for that."""

    code = "permission_denied"
    fault = Fault.CLIENT
    status = "PERMISSION_DENIED"
    http_status = 403


class RegionNotFound(IskanderError):
    """The shared memory that a stream names is not lent here, or no longer."""

    code = "region_not_found"
    fault = Fault.CLIENT
    status = "NOT_FOUND"
    http_status = 404


class ModelMoved(IskanderError):
    """The model version was replaced, or given up, while a stream or request was under way."""

    code = "model_moved"
    fault = Fault.NOBODY
    retryable = True
    status = "UNAVAILABLE"
    http_status = 503


class Unsupported(IskanderError):
    """The call exists in the protocol and this server does not offer it."""

    code = "unsupported"
    fault = Fault.CLIENT
    status = "UNIMPLEMENTED"
    http_status = 501


class Overloaded(IskanderError):
    """As many streams, calls, connections or bytes are there as there may be."""

    code = "overloaded"
    fault = Fault.NOBODY
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 503


class QueueFull(IskanderError):
    """The model's queue is at its limit of requests, rows or bytes."""

    code = "queue_full"
    fault = Fault.NOBODY
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 503


class ClientOverShare(IskanderError):
    """The client has as many requests outstanding as one may."""

    code = "client_over_share"
    fault = Fault.CLIENT
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 429


class ArenaFull(IskanderError):
    """There was no room in shared memory within the time to wait."""

    code = "arena_full"
    fault = Fault.NOBODY
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 503


class DroppedFromQueue(IskanderError):
    """The queue was full and its policy gave this request's place to another."""

    code = "dropped"
    fault = Fault.NOBODY
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 503


class Superseded(IskanderError):
    """A newer request of the same client took this one's place before it ran."""

    code = "superseded"
    fault = Fault.CLIENT
    status = "ABORTED"
    http_status = 409


class DeadlineUnreachable(IskanderError):
    """By what the model is known to cost, the request could not be done in time; it never ran."""

    code = "deadline_unreachable"
    fault = Fault.NOBODY
    retryable = True
    status = "RESOURCE_EXHAUSTED"
    flight_status = "UNAVAILABLE"
    http_status = 503


class DeadlineExceeded(IskanderError):
    """The deadline, or the time that a request may wait or be old, passed before it ran."""

    code = "deadline_exceeded"
    fault = Fault.NOBODY
    status = "DEADLINE_EXCEEDED"
    http_status = 504


class Cancelled(IskanderError):
    """The caller left."""

    code = "cancelled"
    fault = Fault.CLIENT
    status = "CANCELLED"
    http_status = 499


class NotReady(IskanderError):
    """The model has no warmed worker now."""

    code = "not_ready"
    fault = Fault.OPERATOR
    retryable = True
    status = "UNAVAILABLE"
    http_status = 503


class Draining(IskanderError):
    """The server finishes what it accepted and takes no more."""

    code = "draining"
    fault = Fault.NOBODY
    retryable = True
    status = "UNAVAILABLE"
    http_status = 503


class PoisonedRequest(IskanderError):
    """Two workers died while they ran this request; it is not given to a third."""

    code = "poisoned"
    fault = Fault.MODEL
    status = "INTERNAL"


class ModelQuarantined(IskanderError):
    """Batches of this model ended several workers; its requests are refused for a while."""

    code = "model_quarantined"
    fault = Fault.MODEL
    retryable = True
    status = "UNAVAILABLE"
    http_status = 503


class ExecutionFailed(IskanderError):
    """The runtime refused to compute this batch with this model."""

    code = "execution_failed"
    fault = Fault.MODEL
    status = "INTERNAL"


class ManifestError(IskanderError):
    """A model or its manifest is outside what can be served."""

    code = "manifest"
    fault = Fault.OPERATOR
    status = "FAILED_PRECONDITION"


class ConfigError(IskanderError):
    """A setting is unknown, of the wrong type, out of range or against another one."""

    code = "config"
    fault = Fault.OPERATOR
    status = "FAILED_PRECONDITION"


class ProtocolError(IskanderError):
    """The other process speaks another version, or says what cannot be."""

    code = "protocol"


class SegmentError(IskanderError):
    """The system refused memory, or a range of it was used without a right to it."""

    code = "segment"


def detach(error: ErrorT) -> ErrorT:
    """Prepare an error to be kept: drop the frames that it went through, and their variables.

    They would keep what they refer to, such as a message, until a garbage collection.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error
