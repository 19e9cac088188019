"""Client of gateways: calls and streams, with typed errors; `Connection` is to one address.

Runs on: the caller's threads.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa
from pyarrow import flight

from iskander.client.call_details import CallDetails
from iskander.client.resume import (
    CALL_ERRORS,
    WINDOW_BATCHES,
    WINDOW_BYTES,
    Item,
    Outcome,
    Window,
    WindowFeed,
    resumable,
)
from iskander.client.retry import OFF, Attempts, Deadline, Retry, RetryBudget
from iskander.client.stream_writer import FLIGHT_ERRORS, Feed, StreamWriter
from iskander.client.targets import Address, Route, Targets
from iskander.errors import ConfigError, IskanderError, NotReady, ProtocolError, RegionNotFound

if TYPE_CHECKING:
    from iskander.client.shared_memory import Region, RegionPool

ResultT = TypeVar("ResultT")

CALL_TIMEOUT_S = 10.0
RECONNECT_MAX_MS = 1000
"""Maximum wait of gRPC between connection attempts; a call in between fails. Its own is 120 s."""

Headers: TypeAlias = list[tuple[bytes, bytes]]

_REGION_GONE = "the process with this client's shared memory has ended, or another answers; retry"
_TOKEN = re.compile(r"[!-~]+")


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
        """Read the TLS arguments of `FlightClient`; raise ConfigError if a file cannot be read."""
        names = ("tls_root_certs", "cert_chain", "private_key")
        files = zip(names, self, strict=True)
        try:
            return {name: path.read_bytes() for name, path in files if path is not None}
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None


class Connection:
    """A connection to one address; all threads of a client share it.

    Args:
        address: The gateway.
        timeout_s: Timeout of each action.
        token: Token sent with every call.
        tls: TLS files; None: plaintext.
        shared_bytes: Size of each stream's shared memory; 0: none.

    Raises:
        ConfigError: A TLS file cannot be read.
    """

    def __init__(
        self,
        address: Address,
        *,
        timeout_s: float,
        token: str | None,
        tls: Tls | None,
        shared_bytes: int,
    ) -> None:
        self._address = address.text
        self._details = CallDetails(token)
        secrecy: dict[str, Any] = {} if tls is None else dict(tls.options())
        if tls is not None and address.name is not None:
            secrecy["override_hostname"] = address.name
        self._flight = flight.FlightClient(
            _uri(address.text, is_tls=tls is not None),
            middleware=[self._details],
            generic_options=[("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS)],
            **secrecy,
        )
        self._shared_bytes = shared_bytes
        self._timeout_s = timeout_s
        self._pool: RegionPool | None = None
        self._options = flight.FlightCallOptions(timeout=timeout_s)
        self._no_options = flight.FlightCallOptions()

    @property
    def regions(self) -> RegionPool:
        """Shared-memory regions of this connection's gateway, whose module is imported here."""
        if self._pool is None:
            from iskander.client.shared_memory import RegionPool

            locate = self._request_region_socket
            self._pool = RegionPool(locate, self._shared_bytes, self._timeout_s)
        return self._pool

    def close(self) -> None:
        """Close the connection and release idle shared memory."""
        if self._pool is not None:
            self._pool.close()
        self._flight.close()

    def health(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the readiness of every model.

        Raises:
            NotReady: No gateway answers at the address.
        """
        return dict(self.action("health", timeout_s=timeout_s))

    def action(
        self,
        name: str,
        fields: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an action; return its first result.

        Raises:
            IskanderError: The server's error, or NotReady if no gateway answers.
        """
        body = b"" if fields is None else json.dumps(fields).encode()
        is_usual = timeout_s is None
        options = self._options if is_usual else flight.FlightCallOptions(timeout=timeout_s)
        try:
            results = self._flight.do_action(flight.Action(name, body), options)
            bodies = [result.body.to_pybytes() for result in results]
        except FLIGHT_ERRORS as error:
            named = self._details.latest().to_named(error)
            if isinstance(named, IskanderError):
                raise named from error
            text = str(error).split("\n", 1)[0]
            raise NotReady(f"no gateway answers at {self._address}: {text}") from error
        return json.loads(bodies[0])

    def may_share(self, batch: pa.RecordBatch) -> bool:
        """Whether a stream that begins with this batch may use shared memory."""
        return self._has_regions and self.regions.is_suitable(batch)

    def score(
        self, path: list[str], batch: pa.RecordBatch, headers: Headers, timeout_s: float | None
    ) -> pa.RecordBatch:
        """Score one batch without a thread: the server sends nothing before it has the batch.

        Raises:
            IskanderError: The server's error.
            FlightError: The connection failed.
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
            raise detail.to_named(error) from error
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
            IskanderError: The server's error.
            FlightError: The connection failed.
            Exception: The error of the feed.
        """
        first = next(feed, None)
        if first is None:
            return
        region = self.regions.acquire(first[0]) if self._has_regions else None
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
                yield _outcome(chunk)
                if feeder.is_last_result():
                    feeder.has_ended_call = True
                    writer.done_writing()
        except FLIGHT_ERRORS as error:
            # After the last result, the status of the call is irrelevant.
            if not feeder.has_ended_call:
                feeder.finish()
                named = feeder.error or detail.to_named(error)
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

    @property
    def _has_regions(self) -> bool:
        return self._shared_bytes > 0 or self._pool is not None

    def _release(self, region: Region | None, *, is_usable: bool) -> None:
        if region is not None:
            self.regions.release(region, is_usable=is_usable)

    def _open(self, path: list[str], headers: Headers, timeout_s: float | None) -> Any:  # noqa: ANN401
        """Begin a call; return its writer, its reader and its detail."""
        options = self._no_options
        if headers or timeout_s is not None:
            options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except FLIGHT_ERRORS as error:
            # The call failed before the descriptor was written.
            raise self._details.latest().to_named(error) from error
        return writer, reader, self._details.latest()

    def _request_region_socket(self) -> Path:
        return Path(self.action("shared-memory")["path"])


class Client:
    """Client of one gateway, or of several with the same models.

    Args:
        address: `HOST:PORT` or `unix:PATH`, or several of them.
        timeout_s: Timeout of each call except streams. A slow `load` needs a longer one.
        token: Token sent with every call.
        tls: TLS files; None: plaintext.
        shared_bytes: Size of each stream's shared memory, for large batches to a server on this
            machine; 0: none.
        retry: Retries of `score`, `stream` and `outcomes`; off by default.
        is_resolved: Use each IP address of a host name as a gateway of its own.

    Raises:
        ConfigError: The token, an address or a TLS file is invalid.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        token: str | None = None,
        tls: Tls | None = None,
        shared_bytes: int = 0,
        retry: Retry = OFF,
        is_resolved: bool = False,
    ) -> None:
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("invalid token: only printable ASCII without spaces is allowed")

        def connect(each: Address) -> Connection:
            return Connection(
                each, timeout_s=timeout_s, token=token, tls=tls, shared_bytes=shared_bytes
            )

        self._targets = Targets(
            [address] if isinstance(address, str) else address, connect, is_resolved=is_resolved
        )
        self._retry = retry
        self._budget = RetryBudget()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and release idle shared memory."""
        self._targets.close()

    def health(self) -> dict[str, Any]:
        """Return the readiness of every model: `{"ready": bool, "models": {...}}`.

        Raises:
            NotReady: No gateway answers at the address.
        """
        return dict(self._action("health"))

    def load(self, model: str) -> list[str]:
        """Load the current files of a model; return the served versions.

        Raises:
            IskanderError: The load of a version failed.
        """
        return list(self._action("load", {"model": model})["versions"])

    def unload(self, model: str, *, version: str | None = None) -> list[str]:
        """Stop serving a model, or one version of it; return the unloaded versions.

        Raises:
            IskanderError: It cannot be unloaded.
        """
        return list(self._action("unload", {"model": model, "version": version})["versions"])

    def models(self) -> list[dict[str, Any]]:
        """Return all models: served with a contract, loading, or failed to load."""
        return list(self._action("models"))

    def stats(self) -> dict[str, Any]:
        """Return counters of lanes, workers and memory."""
        return dict(self._action("stats"))

    def score(
        self,
        model: str,
        data: pa.RecordBatch | pa.Table,
        *,
        version: str | None = None,
        timeout_s: float | None = None,
    ) -> pa.Table:
        """Score one batch, or a table batch by batch.

        Result strings are `utf8` or `binary`, as in the contract. bfloat16 is uint16 in a field
        with the metadata `ARROW:extension:name` = `iskander.bfloat16`.

        Args:
            model: Name of the model.
            data: A batch or a table.
            version: A version or an alias; None: the server's routing decides.
            timeout_s: Timeout of the whole call with its retries.

        Raises:
            IskanderError: The server's error.
        """
        batches = [data] if isinstance(data, pa.RecordBatch) else data.to_batches()
        batches = batches or [pa.RecordBatch.from_pylist([], data.schema)]
        if len(batches) == 1:
            result = self._score_one(model, batches[0], version=version, timeout_s=timeout_s)
            return pa.Table.from_batches([result])
        results = self.stream(model, batches, version=version, timeout_s=timeout_s)
        return pa.Table.from_batches(list(results))

    def stream(
        self,
        model: str,
        batches: Iterable[Item],
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Score a stream of batches; yield one result for each, in order.

        Args:
            model: Name of the model.
            batches: Batches of one schema, with or without terms. A separate thread reads them as
                far ahead of the results as the server's flow control allows; with retries, at most
                `WINDOW_BATCHES` and `WINDOW_BYTES`, which are kept until their results arrive.
            version: A version or an alias; None: the server's routing decides.
            terms: Terms of all batches: `client`, `priority`, `urgency`, `deadline_ms`, `ttl_ms`,
                `steps_remaining`, `newest_wins`, `route_key`; a batch's own may include
                `timestamp_ns`.
            timeout_s: Timeout of the whole stream with its retries.
            resume: Continue on another connection after a retryable failure, if retries are on.

        Raises:
            IskanderError: The server's error.
        """
        path = _descriptor_path(model, version)
        return self._stream(path, batches, terms or {}, timeout_s=timeout_s, resume=resume)

    def outcomes(
        self,
        model: str,
        batches: Iterable[Item],
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
        resume: bool = True,
    ) -> Iterator[pa.RecordBatch | IskanderError]:
        """Score as `stream`, but yield the error of a batch in place of its result.

        This covers overload, deadlines and invalid batches; errors of the stream are raised.
        """
        path = _descriptor_path(model, version)
        terms = {**(terms or {}), "errors": "in-band"}
        return self._stream(path, batches, terms, timeout_s=timeout_s, resume=resume)

    @property
    def _regions(self) -> Any:  # noqa: ANN401
        """Regions of a target."""
        lease = self._targets.pick()
        self._targets.release(lease)
        return lease.connection.regions

    def _score_one(
        self, model: str, batch: pa.RecordBatch, *, version: str | None, timeout_s: float | None
    ) -> pa.RecordBatch:
        path = _descriptor_path(model, version)

        def score(connection: Connection, left_s: float | None) -> pa.RecordBatch | None:
            if connection.may_share(batch):
                return None
            return connection.score(path, batch, [], left_s)

        deadline = Deadline(timeout_s)
        result = self._call(score, batch.num_rows, deadline)
        if result is None:
            (result,) = self._stream(path, [batch], {}, timeout_s=timeout_s, resume=True)
        return result

    def _call(
        self,
        call: Callable[[Connection, float | None], ResultT],
        rows: int,
        deadline: Deadline,
    ) -> ResultT:
        """Make a call on a target, and again after a retryable failure."""
        route = Route(self._targets)
        attempts = Attempts(self._retry, self._budget, deadline)
        while True:
            failure: Exception | None = None
            lease = route.begin(rows)
            try:
                result = call(lease.connection, deadline.remaining_s())
                attempts.succeed()
                return result
            except CALL_ERRORS as error:
                failure = error
            finally:
                route.end(lease, failure)
            attempts.wait_after(failure)

    def _stream(
        self,
        path: list[str],
        batches: Iterable[Item],
        terms: Mapping[str, Any],
        *,
        timeout_s: float | None,
        resume: bool,
    ) -> Iterator[Any]:
        deadline = Deadline(timeout_s)
        retry = self._retry if resume else OFF
        window = Window(
            iter(batches),
            deadline,
            deadline_ms=terms.get("deadline_ms"),
            batches_max=WINDOW_BATCHES if retry.is_enabled else None,
            bytes_max=WINDOW_BYTES if retry.is_enabled else None,
        )
        headers = _headers(terms)
        route = Route(self._targets)

        def connect(feed: WindowFeed) -> Iterator[Outcome]:
            failure: Exception | None = None
            feed.load = lease = route.begin(window.rows)
            try:
                yield from lease.connection.exchange(path, feed, headers, deadline.remaining_s())
            except CALL_ERRORS as error:
                failure = None if error is window.error else error
                raise
            finally:
                route.end(lease, failure)

        yield from resumable(connect, window, Attempts(retry, self._budget, deadline))

    def _action(self, name: str, fields: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        lease = self._targets.pick()
        try:
            return lease.connection.action(name, fields)
        finally:
            self._targets.release(lease)


def _descriptor_path(model: str, version: str | None) -> list[str]:
    return [model] if version is None else [model, version]


def _uri(address: str, *, is_tls: bool) -> str:
    if address.startswith("unix:"):
        return f"grpc+unix://{address.removeprefix('unix:')}"
    return f"grpc{'+tls' if is_tls else ''}://{address}"


def _headers(terms: Mapping[str, Any]) -> Headers:
    """Encode the terms of a call as headers."""
    texts = {k: json.dumps(v) if isinstance(v, bool) else str(v) for k, v in terms.items()}
    return [(f"iskander-{k.replace('_', '-')}".encode(), v.encode()) for k, v in texts.items()]


def _outcome(chunk: Any) -> Outcome:  # noqa: ANN401
    """Return the result or the error of a batch."""
    if chunk.data.num_rows == 0 and chunk.app_metadata is not None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            metadata = json.loads(bytes(chunk.app_metadata))
            return IskanderError.from_wire(metadata["iskander"]["error"])
    return chunk.data
