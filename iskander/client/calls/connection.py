"""Connection to one gateway: actions, single calls and streams, with typed errors.

Runs on: the caller's threads.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import flight

from iskander.client.calls.call_details import CallDetail, CallDetails
from iskander.client.calls.cancellation import OpenCalls, current
from iskander.client.calls.credentials import Credentials
from iskander.client.calls.flight_errors import (
    FLIGHT_ERRORS,
    add_model,
    message_of,
    to_iskander_error,
)
from iskander.client.calls.resume import Outcome, WindowFeed
from iskander.client.calls.retry import Deadline
from iskander.client.calls.sharing import Sharing
from iskander.client.calls.stream_writer import StreamWriter
from iskander.client.calls.targets import Address
from iskander.client.calls.trace_context import trace_headers
from iskander.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    IskanderError,
    ProtocolError,
    RegionNotFound,
    Unauthenticated,
)

if TYPE_CHECKING:
    from iskander.client.calls.shared_memory import RegionLease, RegionPool

ResultT = TypeVar("ResultT")

CALL_TIMEOUT_S = 10.0
SHARED_BYTES = 64 << 20
"""Size of a stream's shared memory, if the caller sets none."""
RECONNECT_MAX_MS = 500
"""Maximum wait of gRPC between connection attempts, during which calls fail; gRPC's default is 120
s."""
KEEPALIVE_MS = 20_000
"""Time without data in an open call after which gRPC sends a PING. It sends at most two until the
client sends data again, because some gRPC servers close a connection at the third PING."""
KEEPALIVE_ANSWER_MS = 10_000
"""Maximum wait for the answer to a PING. After it the gateway counts as hung, and its calls
fail."""

Headers: TypeAlias = list[tuple[bytes, bytes]]

_UNIX = "unix:"
_NOT_INSTALLED = (
    "no shared memory: it needs Linux and the distribution `iskander`, and `iskander-client` is "
    "installed; set `shared_bytes` to 0 or leave it out"
)
_REGION_GONE = "the process with this client's shared memory has ended, or another answers; retry"
_TERM_NAME = re.compile(r"[a-z_]+")
_TERM_TEXT = re.compile(r"[ -~]*")


class Tls(NamedTuple):
    """PEM files of a TLS connection.

    Attributes:
        roots: CA certificates that verify the server; None: certificates of the system.
        certificate: Client certificate for mutual TLS; needs `key`.
    """

    roots: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def options(self) -> dict[str, bytes]:
        """Return the TLS arguments of `FlightClient`; raise ConfigError for an invalid file."""
        names = ("tls_root_certs", "cert_chain", "private_key")
        given = {name: path for name, path in zip(names, self, strict=True) if path is not None}
        try:
            files = {name: path.read_bytes() for name, path in given.items()}
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
        for name, pem in files.items():
            if b"-----BEGIN " not in pem:
                raise ConfigError(f"{given[name]} is no PEM file")
        return files


class Connection:
    """A connection to one address; all threads of a client share it.

    Args:
        address: The gateway.
        timeout_s: Timeout of each action.
        credentials: Tokens of the calls.
        tls: TLS files; None: plaintext. A unix socket has no TLS.
        shared_bytes: Size of each stream's shared memory; 0: no shared memory; None:
            `SHARED_BYTES` if the server is on this machine and offers shared memory.
        calls: Set of open calls to which the calls of this connection are added.

    Raises:
        ConfigError: The address is invalid, or a TLS file cannot be read.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float,
        credentials: Credentials,
        tls: Tls | None,
        shared_bytes: int | None,
        calls: OpenCalls,
    ) -> None:
        self._address = address.text
        self._credentials = credentials
        self._details = CallDetails(credentials)
        self._calls = calls
        tls_options: dict[str, Any] = {}
        if tls is not None and not address.text.startswith(_UNIX):
            tls_options = dict(tls.options())
            if address.name is not None:
                tls_options["override_hostname"] = address.name
        try:
            self._flight = flight.FlightClient(
                _uri(address.text, is_tls=tls is not None),
                middleware=[self._details],
                generic_options=[
                    ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
                    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                    ("grpc.keepalive_timeout_ms", KEEPALIVE_ANSWER_MS),
                    # The gRPC in pyarrow waits for the longer of these two timeouts.
                    ("grpc.http2.ping_timeout_ms", KEEPALIVE_ANSWER_MS),
                ],
                **tls_options,
            )
        except pa.ArrowException as error:
            raise ConfigError(f"invalid address {address.text}: {message_of(error)}") from error
        is_possible = sys.platform == "linux" and _is_local(address.text)
        automatic_bytes = SHARED_BYTES if is_possible else 0
        is_automatic = shared_bytes is None
        length_bytes = automatic_bytes if shared_bytes is None else shared_bytes

        def open_pool() -> RegionPool:
            try:
                from iskander.client.calls.shared_memory import RegionPool
            except ImportError:
                raise ConfigError(_NOT_INSTALLED) from None
            return RegionPool(self._ask_for_regions, length_bytes, is_reduced=is_automatic)

        self._sharing = Sharing(
            open_pool if length_bytes else None, is_required=not is_automatic, timeout_s=timeout_s
        )
        self._timeout_s = timeout_s
        self._options = flight.FlightCallOptions(timeout=timeout_s)
        self._no_options = flight.FlightCallOptions()

    def close(self) -> None:
        """Close the connection and release idle shared memory."""
        self._sharing.close()
        self._flight.close()

    def health(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the readiness of every model.

        Raises:
            ConnectionFailed: No gateway answers at the address.
        """
        return decode_result(self.action("health", timeout_s=timeout_s), dict)

    def action(
        self,
        name: str,
        fields: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[bytes]:
        """Run an action; return its results, which are JSON or IPC messages.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
        """
        body = b"" if fields is None else json.dumps(fields).encode()
        options, headers = self._options, trace_headers()
        if headers or timeout_s is not None:
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            options = flight.FlightCallOptions(timeout=limit_s, headers=headers)
        self._calls.require_open()
        self._details.prepare()
        try:
            results = self._flight.do_action(flight.Action(name, body), options)
            return [result.body.to_pybytes() for result in results]
        except FLIGHT_ERRORS as error:
            raise self._to_named_error(error, self._details.latest()) from error

    def may_share(self, batch: pa.RecordBatch) -> bool:
        """Whether a stream that begins with this batch may use shared memory."""
        return self._sharing.is_suitable(batch)

    def score(
        self, path: list[str], batch: pa.RecordBatch, headers: Headers, timeout_s: float | None
    ) -> pa.RecordBatch:
        """Score one batch.

        No writer thread is needed, because the server replies only after the whole batch.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
        """
        writer, reader, detail = self._open(path, headers, timeout_s)
        is_answered = False
        try:
            with contextlib.suppress(*FLIGHT_ERRORS):  # The reader raises the reason.
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
            result = reader.read_chunk().data
            is_answered = True
        except StopIteration:
            raise ProtocolError("the stream ended before the result of its batch") from None
        except FLIGHT_ERRORS as error:
            raise self._to_named_error(error, detail) from error
        finally:
            self._calls.leave(reader)
            if not is_answered:
                reader.cancel()
            # Retrieves the status of the call, which Arrow otherwise prints if it is an error.
            with contextlib.suppress(*FLIGHT_ERRORS):
                writer.close()
        return result

    def exchange(
        self, path: list[str], feed: WindowFeed, headers: Headers, deadline: Deadline
    ) -> Iterator[Outcome]:
        """Send the batches of a feed; yield an outcome for each batch, in order.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
            BaseException: The error of the feed.
        """
        first = next(feed, None)
        if first is None:
            return
        with self._sharing.lease(first[0], deadline) as lease:
            region = None if lease is None else lease.region
            headers = headers if lease is None else headers + lease.headers
            writer, reader, detail = self._open(path, headers, deadline.remaining_s())
            feeder = StreamWriter(writer, reader, first, feed, region)
            feeder.start()
            try:
                for chunk in reader:
                    feeder.free_oldest()
                    yield _outcome(chunk, path[0])
                    if feeder.count_result():
                        feeder.must_cancel = True
                        writer.done_writing()
            except FLIGHT_ERRORS as error:
                # After the last result, the status of the call is irrelevant.
                if not feeder.must_cancel:
                    raise self._stream_error(error, feeder, detail, lease) from error
            finally:
                reader.cancel()  # Ends the call if the caller stopped early.
                self._calls.leave(reader)
                feeder.finish()
                if lease is not None and feeder.is_alive():
                    lease.is_usable = False
            if feeder.error is not None:
                raise feeder.error
            if not feeder.must_cancel:
                raise ProtocolError("the stream ended before the result of every batch")

    def _open(self, path: list[str], headers: Headers, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Begin a call; return its writer, its reader and its detail."""
        options = self._no_options
        if headers or timeout_s is not None:
            options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        self._calls.require_open()
        self._details.prepare()
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except FLIGHT_ERRORS as error:
            # The call failed before the descriptor was written.
            raise self._to_named_error(error, self._details.latest()) from error
        self._calls.enter(reader)
        return writer, reader, self._details.latest()

    def _stream_error(
        self,
        error: Exception,
        feeder: StreamWriter,
        detail: CallDetail | None,
        lease: RegionLease | None,
    ) -> BaseException:
        """Return the error of the feed, or else the error of a stream's call."""
        feeder.finish()
        if feeder.error is not None:
            return feeder.error
        named = self._to_named_error(error, detail)
        if lease is not None and isinstance(named, RegionNotFound):
            self._sharing.discard(lease)
            return RegionNotFound(_REGION_GONE)
        return named

    def _to_named_error(self, error: Exception, detail: CallDetail | None) -> IskanderError:
        """Return the server's error for a failed call; if it sent none, the error of the status."""
        if self._calls.is_closed:
            return Cancelled("the client is closed")
        named = None if detail is None else detail.server_error()
        if named is None:
            named = self._error_without_answer(error)
        if isinstance(named, Unauthenticated) and detail is not None:
            named.has_new_token = self._credentials.has_other_than(detail.token)
        return named

    def _error_without_answer(self, error: Exception) -> IskanderError:
        """Return the named error of a failed call for which the server sent no error."""
        cancellation = current()
        if cancellation is not None and cancellation.has_expired:
            named: IskanderError = DeadlineExceeded("the call's deadline has passed")
        else:
            named = to_iskander_error(error, self._address)
        if isinstance(named, DeadlineExceeded):
            named.is_unanswered = True
        return named

    def _ask_for_regions(self, timeout_s: float) -> tuple[Path, int]:
        answer = self.action("shared-memory", timeout_s=timeout_s)
        return Path(decode_result(answer, str, "path")), decode_result(answer, int, "region_bytes")


def _is_local(address: str) -> bool:
    """Whether an address is on this machine."""
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith(_UNIX) or host in ("127.0.0.1", "localhost", "::1")


def _uri(address: str, *, is_tls: bool) -> str:
    if address.startswith(_UNIX):
        return f"grpc+unix://{address.removeprefix(_UNIX)}"
    return f"grpc{'+tls' if is_tls else ''}://{address}"


def encode_terms(terms: Mapping[str, Any]) -> Headers:
    """Encode the terms of a call as headers; leave out terms that are None.

    Raises:
        ConfigError: A term cannot be sent in a header.
    """
    if not terms:
        return []
    if not isinstance(terms, Mapping):
        raise ConfigError(f"invalid terms: {terms!r}; expected a mapping")
    texts = {
        name: json.dumps(value) if isinstance(value, bool) else str(value)
        for name, value in terms.items()
        if value is not None
    }
    for name, text in texts.items():
        if not (
            isinstance(name, str) and _TERM_NAME.fullmatch(name) and _TERM_TEXT.fullmatch(text)
        ):
            allowed = "a name has a-z and _ only, a value printable ASCII only"
            raise ConfigError(f"invalid term {name!r}: {allowed}")
    return [(f"iskander-{k.replace('_', '-')}".encode(), v.encode()) for k, v in texts.items()]


def decode_result(results: Sequence[bytes], kind: type[ResultT], key: str | None = None) -> ResultT:
    """Decode the JSON result of an action, or one key of it.

    Raises:
        ProtocolError: The result is missing or has another form; the server may be no gateway.
    """
    try:
        result = json.loads(results[0])
        value = result if key is None else result[key]
        if isinstance(value, kind):
            return value
        reason = f"expected {kind.__name__}, got {type(value).__name__}"
    except (ValueError, LookupError, TypeError) as error:
        reason = f"{type(error).__name__} {error}"
    text = f"the server's result cannot be read: {reason}"
    raise ProtocolError(f"{text}; it may be no gateway, or of another version")


def _outcome(chunk: Any, model: str) -> Outcome:  # noqa: ANN401
    """Return the outcome of a batch, its result or its error, from a message of the stream."""
    if chunk.data.num_rows == 0 and chunk.app_metadata is not None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            metadata = json.loads(bytes(chunk.app_metadata))
            return add_model(IskanderError.from_wire(metadata["iskander"]["error"]), model)
    return chunk.data
