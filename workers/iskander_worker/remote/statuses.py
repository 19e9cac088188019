"""Conversion of failed calls to a remote server to errors with the server and the model.

Connections that fail and servers that reject both have the status UNAVAILABLE, and gRPC does not
tell them apart. The texts of gRPC and of proxies for lost connections do.

Pure. Source: gRPC's status codes; gRFC A6 (`grpc-retry-pushback-ms`); RFC 9110 (`retry-after`);
Iskander's own trailers (`iskander-code`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from iskander.errors import (
    Draining,
    IskanderError,
    ModelMoved,
    ModelNotFound,
    ModelQuarantined,
    NotReady,
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

TARGET: Final = "remote model"
RETRY_AFTER_MAX_MS: Final = 60_000
_DETAIL_CHARACTERS: Final = 300
_TEXT_CHARACTERS: Final = 16_384
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequences for colors, which texts of Ray contain."""
_CONNECTION_TEXTS: Final = (
    "connect", "resolv", "socket", "recvmsg", "sendmsg", "stream removed", "goaway", "upstream",
    "http2 header", "transport", "handshake", "ssl", "endpoint", "name resolution",
)  # fmt: skip
_TOO_LARGE: Final = "larger than max"
_OWN_LIMIT: Final = "CLIENT: "
"""gRPC's prefix for a limit of the client: `remote.message_bytes`."""
_BY_STATUS: Final[Mapping[str, type[IskanderError]]] = {
    "INVALID_ARGUMENT": RemoteRejected,
    "OUT_OF_RANGE": RemoteRejected,
    "NOT_FOUND": RemoteNotReady,
    "UNAUTHENTICATED": RemoteDenied,
    "PERMISSION_DENIED": RemoteDenied,
    "DEADLINE_EXCEEDED": RemoteTimeout,
    "RESOURCE_EXHAUSTED": RemoteOverloaded,
}
_BY_CODE: Final[Mapping[str, type[IskanderError]]] = {
    each.code: RemoteNotReady for each in (ModelMoved, ModelNotFound, ModelQuarantined, NotReady)
} | {
    Draining.code: RemoteOverloaded,
    RemoteLoop.code: RemoteLoop,
    # The remote server reports about its own remote server.
    RemoteUnavailable.code: RemoteNotReady,
    RemoteNotReady.code: RemoteNotReady,
    RemoteDenied.code: RemoteDenied,
}
"""Errors for codes of another Iskander, which tell more than the status."""
_TEXTS: Final[Mapping[type[IskanderError], str]] = {
    RemoteUnavailable: "cannot be reached",
    RemoteOverloaded: "is overloaded or stopping",
    RemoteNotReady: "does not serve the model now",
    RemoteDenied: "does not accept the credentials (`remote.token_file`, `remote.tls`)",
    RemoteTimeout: "did not answer in time",
    RemoteLoop: "forms a loop of remote models",
    RemoteRejected: "rejected the batch",
    RemoteFailed: "failed",
    RemoteAnswerInvalid: "sent an invalid answer",
}


def error_of(status: str, detail: str, trailers: Mapping[str, str], target: str) -> IskanderError:
    """Return the named error of a failed call; `target` is from `target_text`."""
    kind = _error_class(status, detail, trailers.get("iskander-code", ""))
    if kind is RemoteAnswerInvalid:
        return answer_error(f"{_one_line(detail)} (`remote.message_bytes`)", target)
    reason = _one_line(detail) or status
    is_complete = kind is RemoteLoop and TARGET in detail  # A server of the loop passed it on.
    text = reason if is_complete else f"{target} {_TEXTS[kind]}: {reason}"
    wait_ms = retry_after_ms(trailers) if kind.retryable else None
    return kind(text, retry_after_ms=wait_ms, remote_status=status)


def answer_error(problem: str, target: str) -> RemoteAnswerInvalid:
    """Return the error of an answer that does not match the contract."""
    return RemoteAnswerInvalid(f"{target} {_TEXTS[RemoteAnswerInvalid]}: {problem}")


def target_text(model: str, version: str, address: str) -> str:
    """Name a model and its server in errors."""
    name = f"{model}/{version}" if version else model
    return f"{TARGET} `{name}` at {address}"


def retry_after_ms(trailers: Mapping[str, str]) -> int | None:
    """Return the wait that a server asks for, at most `RETRY_AFTER_MAX_MS`; None without one."""
    names = (("iskander-retry-after-ms", 1), ("grpc-retry-pushback-ms", 1), ("retry-after", 1000))
    for name, factor in names:
        text = trailers.get(name, "")
        if text.isascii() and text.isdecimal():
            return min(int(text[:12]) * factor, RETRY_AFTER_MAX_MS)
    return None


def _one_line(detail: str) -> str:
    """Return one line of a text: the last one of a Python traceback, else the first."""
    text = _ESCAPES.sub("", detail[-_TEXT_CHARACTERS:])
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    is_traceback = any(line.startswith(("Traceback ", "File ")) for line in lines)
    return lines[-1 if is_traceback else 0][:_DETAIL_CHARACTERS]


def _error_class(status: str, detail: str, code: str) -> type[IskanderError]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status == "UNAVAILABLE":
        lowered = detail.lower()
        is_lost = not detail or any(text in lowered for text in _CONNECTION_TEXTS)
        return RemoteUnavailable if is_lost else RemoteOverloaded
    if status == "RESOURCE_EXHAUSTED" and _TOO_LARGE in detail:
        return RemoteAnswerInvalid if _OWN_LIMIT in detail else RemoteRejected
    return _BY_STATUS.get(status, RemoteFailed)
