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

from iskander.client.call_details import CallDetail, CallDetails
from iskander.client.cancellation import current
from iskander.client.credentials import Credentials
from iskander.client.flight_errors import FLIGHT_ERRORS, add_model, text_of, to_named
from iskander.client.resume import Outcome
from iskander.client.stream_writer import Feed, StreamWriter
from iskander.client.targets import Address
from iskander.client.trace_context import trace_headers
from iskander.errors import (
    Cancelled,
    ConfigError,
    IskanderError,
    NotReady,
    ProtocolError,
    RegionNotFound,
    Unauthenticated,
)

if TYPE_CHECKING:
    from iskander.client.shared_memory import Region, RegionPool

ResultT = TypeVar("ResultT")

CALL_TIMEOUT_S = 10.0
SHARED_BYTES = 64 << 20
"""Size of a stream's shared memory without a setting."""
RECONNECT_MAX_MS = 1000
"""Maximum wait of gRPC between connection attempts; a call in between fails. Its own is 120 s."""

Headers: TypeAlias = list[tuple[bytes, bytes]]

_NO_SHARED_MEMORY = (
    "no shared memory: it needs Linux and the distribution `iskander`, and `iskander-client` is "
    "installed; set `shared_bytes` to 0 or leave it out"
)
_REGION_GONE = "the process with this client's shared memory has ended, or another answers; retry"
_TERM_NAME = re.compile(r"[a-z_]+")
_TERM_TEXT = re.compile(r"[ -~]*")


class Tls(NamedTuple):
    """PEM files of a TLS connection.

    Attributes:
        roots: CA certificates for the server's certificate; None: the system's.
        certificate: Client certificate for mutual TLS; needs `key`.
    """

    roots: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def options(self) -> dict[str, bytes]:
        """Read the TLS arguments of `FlightClient`; raise ConfigError for a file that is no PEM."""
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
        tls: TLS files; None: plaintext.
        shared_bytes: Size of each stream's shared memory; 0: none; None: `SHARED_BYTES` if the
            server is on this machine and offers it.

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
    ) -> None:
        self._address = address.text
        self._credentials = credentials
        self._details = CallDetails(credentials)
        self._is_closed = False
        secrecy: dict[str, Any] = {} if tls is None else dict(tls.options())
        if tls is not None and address.name is not None:
            secrecy["override_hostname"] = address.name
        try:
            self._flight = flight.FlightClient(
                _uri(address.text, is_tls=tls is not None),
                middleware=[self._details],
                generic_options=[("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS)],
                **secrecy,
            )
        except pa.ArrowException as error:
            raise ConfigError(f"invalid address {address.text}: {text_of(error)}") from error
        self._is_automatic = shared_bytes is None
        is_possible = sys.platform == "linux" and _is_local(address.text)
        automatic_bytes = SHARED_BYTES if is_possible else 0
        self._shared_bytes = automatic_bytes if shared_bytes is None else shared_bytes
        self._timeout_s = timeout_s
        self._pool: RegionPool | None = None
        self._options = flight.FlightCallOptions(timeout=timeout_s)
        self._no_options = flight.FlightCallOptions()

    @property
    def regions(self) -> RegionPool:
        """Shared-memory regions of this connection's gateway, whose module is imported here."""
        if self._pool is None:
            try:
                from iskander.client.shared_memory import RegionPool
            except ImportError:
                raise ConfigError(_NO_SHARED_MEMORY) from None

            length_bytes = self._shared_bytes
            if self._is_automatic:
                offered_bytes = decode_result(self.action("shared-memory"), int, "region_bytes")
                length_bytes = min(length_bytes, offered_bytes)
            self._pool = RegionPool(self._request_region_socket, length_bytes, self._timeout_s)
        return self._pool

    def close(self) -> None:
        """Close the connection and release idle shared memory."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
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
        """Run an action; return its results, JSON or IPC messages.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
        """
        body = b"" if fields is None else json.dumps(fields).encode()
        options, headers = self._options, trace_headers()
        if headers or timeout_s is not None:
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            options = flight.FlightCallOptions(timeout=limit_s, headers=headers)
        self._details.prepare()
        try:
            results = self._flight.do_action(flight.Action(name, body), options)
            return [result.body.to_pybytes() for result in results]
        except FLIGHT_ERRORS as error:
            raise self._named(error, self._details.latest()) from error

    def may_share(self, batch: pa.RecordBatch) -> bool:
        """Whether a stream that begins with this batch may use shared memory."""
        regions = self._usable_regions()
        return regions is not None and regions.is_suitable(batch)

    def score(
        self, path: list[str], batch: pa.RecordBatch, headers: Headers, timeout_s: float | None
    ) -> pa.RecordBatch:
        """Score one batch without a thread: the server sends nothing before it has the batch.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
        """
        writer, reader, detail = self._open(path, headers, timeout_s)
        is_answered = False
        try:
            with contextlib.suppress(*FLIGHT_ERRORS):  # The reader receives the reason.
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
            result = reader.read_chunk().data
            is_answered = True
        except StopIteration:
            raise ProtocolError("the stream ended before the result of its batch") from None
        except FLIGHT_ERRORS as error:
            raise self._named(error, detail) from error
        finally:
            if not is_answered:
                reader.cancel()
            # Retrieves the status of the call, which Arrow otherwise prints if it is an error.
            with contextlib.suppress(*FLIGHT_ERRORS):
                writer.close()
        return result

    def exchange(
        self, path: list[str], feed: Feed, headers: Headers, timeout_s: float | None
    ) -> Iterator[Outcome]:
        """Send the batches of a feed; yield an outcome for each, in order.

        Raises:
            IskanderError: The server's error, or ConnectionFailed.
            Exception: The error of the feed.
        """
        first = next(feed, None)
        if first is None:
            return
        region = self._acquire(first[0])
        if region is not None:
            from iskander.control.shared_regions import REGION_HEADER

            headers = [*headers, (REGION_HEADER.encode(), region.name.encode())]
        try:
            writer, reader, detail = self._open(path, headers, timeout_s)
        except BaseException:
            self._release(region, is_usable=True)
            raise
        feeder = StreamWriter(writer, reader, first, feed, region)
        feeder.start()
        is_usable = True
        try:
            for chunk in reader:
                feeder.on_result()
                yield _outcome(chunk, path[0])
                if feeder.is_last_result():
                    feeder.has_ended_call = True
                    writer.done_writing()
        except FLIGHT_ERRORS as error:
            # After the last result, the status of the call is irrelevant.
            if not feeder.has_ended_call:
                feeder.finish()
                named = feeder.error or self._named(error, detail)
                if isinstance(named, RegionNotFound):
                    is_usable, named = False, NotReady(_REGION_GONE)
                raise named from error
        finally:
            reader.cancel()  # Ends the call if the caller stopped early.
            feeder.finish()
            self._release(region, is_usable=is_usable and not feeder.is_alive())
        if feeder.error is not None:
            raise feeder.error
        if not feeder.has_ended_call:
            raise ProtocolError("the stream ended before the result of every batch")

    def _usable_regions(self) -> RegionPool | None:
        """Return the regions; None if shared memory is off or, without a setting, not possible."""
        if not self._shared_bytes and self._pool is None:
            return None
        try:
            return self.regions
        except IskanderError:
            self._require_setting()
            return None

    def _acquire(self, first: pa.RecordBatch) -> Region | None:
        """Return a region for a stream that begins with this batch, if it uses one."""
        regions = self._usable_regions()
        try:
            return None if regions is None else regions.acquire(first)
        except IskanderError:
            self._require_setting()
            return None

    def _require_setting(self) -> None:
        """Use no shared memory from here on; raise the error again if the caller asked for it."""
        if not self._is_automatic:
            raise  # noqa: PLE0704
        if self._pool is not None:
            self._pool.close()
        self._pool, self._shared_bytes = None, 0

    def _release(self, region: Region | None, *, is_usable: bool) -> None:
        if region is not None:
            self.regions.release(region, is_usable=is_usable)

    def _open(self, path: list[str], headers: Headers, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Begin a call; return its writer, its reader and its detail."""
        options = self._no_options
        if headers or timeout_s is not None:
            options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        cancellation = current()
        if cancellation is not None:
            cancellation.require_none()
        self._details.prepare()
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except FLIGHT_ERRORS as error:
            # The call failed before the descriptor was written.
            raise self._named(error, self._details.latest()) from error
        if cancellation is not None:
            cancellation.enter_call(reader)
        return writer, reader, self._details.latest()

    def _named(self, error: Exception, detail: CallDetail | None) -> IskanderError:
        """Return the server's error for an error of a call; without one, that of its status."""
        if self._is_closed:
            return Cancelled("the client is closed")
        named = None if detail is None else detail.server_error()
        named = named or to_named(error, self._address)
        if isinstance(named, Unauthenticated) and detail is not None:
            named.has_new_token = self._credentials.has_other_than(detail.token)
        return named

    def _request_region_socket(self) -> Path:
        return Path(decode_result(self.action("shared-memory"), str, "path"))


def _is_local(address: str) -> bool:
    """Whether an address is of this machine."""
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("127.0.0.1", "localhost", "::1")


def _uri(address: str, *, is_tls: bool) -> str:
    if address.startswith("unix:"):
        return f"grpc+unix://{address.removeprefix('unix:')}"
    return f"grpc{'+tls' if is_tls else ''}://{address}"


def encode_terms(terms: Mapping[str, Any]) -> Headers:
    """Encode the terms of a call as headers.

    Raises:
        ConfigError: A term cannot be sent in a header.
    """
    texts = {k: json.dumps(v) if isinstance(v, bool) else str(v) for k, v in terms.items()}
    for name, text in texts.items():
        if not (_TERM_NAME.fullmatch(name) and _TERM_TEXT.fullmatch(text)):
            raise ConfigError(f"invalid term {name!r}: only printable ASCII is allowed")
    return [(f"iskander-{k.replace('_', '-')}".encode(), v.encode()) for k, v in texts.items()]


def decode_result(results: Sequence[bytes], kind: type[ResultT], key: str | None = None) -> ResultT:
    """Decode the JSON result of an action, or one key of it.

    Raises:
        ProtocolError: There is no such result; the server may be no gateway.
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
    """Return the result or the error of a batch."""
    if chunk.data.num_rows == 0 and chunk.app_metadata is not None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            metadata = json.loads(bytes(chunk.app_metadata))
            return add_model(IskanderError.from_wire(metadata["iskander"]["error"]), model)
    return chunk.data
