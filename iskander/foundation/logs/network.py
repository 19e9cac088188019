"""Events of connections, TLS and tokens."""

from __future__ import annotations

from iskander.foundation.logs.event import Source

access = Source("iskander.access")
audit = Source("iskander.audit")
connections = Source("iskander.connections")
event_stream = Source("iskander.event_stream")
http1 = Source("iskander.http")
http2 = Source("iskander.http2")
local_listener = Source("iskander.local_listener")
tls = Source("iskander.tls")


@access.error("reason")
def tokens_rejected(*, reason: str) -> str:
    """The changed file of tokens is invalid.

    Do: Correct the file; it is read again when it changes.
    """
    return f"access.tokens: {reason}; the previous tokens stay in force"


@access.info()
def tokens_reloaded(*, file: str, tokens: int) -> str:
    """The changed file of tokens is applied."""
    return f"{file} was reloaded: {tokens} tokens"


@tls.error("reason")
def tls_rejected(*, reason: str) -> str:
    """The changed certificate or key cannot be used.

    Do: Correct the files; they are read again when they change.
    """
    return f"TLS reload failed: {reason}; the previous files stay in use"


@tls.info()
def tls_reloaded() -> str:
    """The changed certificate and key are applied to new connections."""
    return "TLS certificate and key reloaded"


@connections.error("reason")
def accept_failed(*, reason: str, times: int, limit: int) -> str:
    """Connections cannot be accepted, mostly for lack of descriptors.

    Do: Raise the limit (`LimitNOFILE=`, `ulimit -n`) or lower `limits.connections`.
    """
    return (
        f"accept failed: {reason} ({times} times since the last such line); "
        f"limit {limit} file descriptors (RLIMIT_NOFILE)"
    )


@connections.error()
def connection_setup_failed(*, error: BaseException) -> str:
    """The setup of an accepted connection raised an exception.

    Do: Report a bug with the traceback.
    """
    return "connection setup failed"


@event_stream.warning()
def subscriber_rejected(*, limit: int) -> str:
    """A subscriber of the event stream was rejected, because there are too many.

    Do: End subscribers, or raise `events.subscribers`.
    """
    return f"subscriber of events rejected: limit {limit} (`events.subscribers`)"


@event_stream.error("reason")
def events_not_sent(*, reason: str) -> str:
    """The events of a gateway process do not reach its parent, nor the subscribers.

    Do: Restart the server. Report a bug if its runtime directory was not deleted.
    """
    return f"events of a process do not reach the subscribers: {reason}"


@local_listener.error("reason")
def local_accept_failed(*, reason: str, pause_s: float) -> str:
    """A connection of a worker or another local process cannot be accepted.

    Do: Raise the limit of file descriptors (`LimitNOFILE=`, `ulimit -n`).
    """
    return f"accept failed for a local process: {reason}; retry in {pause_s:g} s"


@http2.info()
def connections_aborted(*, count: int) -> str:
    """Connections were still open at the end of a drain."""
    return f"connections aborted: {count} still open after the drain"


@http2.error()
def grpc_connection_failed(*, error: BaseException) -> str:
    """A gRPC connection raised an exception and is closed.

    Do: Report a bug with the traceback.
    """
    return "gRPC connection failed"


@http1.error()
def http_connection_failed(*, error: BaseException) -> str:
    """An HTTP/1.1 connection raised an exception and is closed.

    Do: Report a bug with the traceback.
    """
    return "HTTP/1.1 connection failed"


@http1.error()
def http_application_failed(*, error: BaseException) -> str:
    """An HTTP request raised an exception; its client got status 500 or a part of the response.

    Do: Report a bug with the traceback.
    """
    return "HTTP request failed"


@audit.info("record")
def audit_record(*, record: str) -> str:
    """An entry of the audit log, as JSON; `access.audit_file` is empty."""
    return record


@audit.error("record")
def audit_record_not_written(*, record: str) -> str:
    """An entry of the audit log, as JSON, that its file lacks.

    Do: Correct the cause, which `audit_write_failed` has.
    """
    return record


@audit.error("file")
def audit_write_failed(*, file: str, reason: str) -> str:
    """The file of the audit log cannot be written; its records go to the log.

    Do: Free space on its file system, or correct the path and the permissions.
    """
    return f"audit log: {file} cannot be written: {reason}; the records go to this log"
