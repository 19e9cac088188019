"""A small Flight client: batches in, predictions out, errors by name.

Nothing here is special to this server's inside: it is pyarrow.flight, with reading and writing at
once (a client that writes everything before it reads stops for ever on flow control) and with the
server's error detail turned back into `IskanderError`.

Runs on: the caller's threads; never in the gateway.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from pyarrow import flight

from iskander.errors import ConfigError, IskanderError, NotReady, ProtocolError

CALL_TIMEOUT_S = 10.0
FEEDER_STOP_S = 1.0

Item: TypeAlias = pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, Any]]
"""A batch, or a batch and its terms, such as `{"deadline_ms": 20, "priority": 0}`."""

_TOKEN = re.compile(r"[!-~]+")
_FLIGHT_ERRORS = (flight.FlightError, pa.ArrowException, OSError)


class Tls(NamedTuple):
    """How a server is spoken to over TLS: PEM files.

    Attributes:
        roots: Of whom to believe that a server is who it says; None: the system's.
        certificate: That is shown to a server that wants one; with its `key`.
        key: Of the certificate.
    """

    roots: Path | None = None
    certificate: Path | None = None
    key: Path | None = None

    def options(self) -> dict[str, bytes]:
        """As pyarrow takes them.

        Raises:
            ConfigError: A file cannot be read.
        """
        named = {"tls_root_certs": self.roots, "cert_chain": self.certificate}
        named["private_key"] = self.key
        try:
            return {name: path.read_bytes() for name, path in named.items() if path is not None}
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None


class Client:
    """A connection to one gateway.

    Args:
        address: `HOST:PORT` or `unix:PATH`.
        timeout_s: For calls that answer at once; streams have their own.
        token: Shown with every call, where the server wants one.
        tls: The server is spoken to over TLS; None: in the clear.

    Raises:
        ConfigError: What is to be shown cannot be.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("the token has letters that no token has, such as a line's end")
        self._address = address
        self._details = _Details(token)
        self._flight = flight.FlightClient(
            _location(address, is_secret=tls is not None),
            middleware=[self._details],
            **({} if tls is None else tls.options()),
        )
        self._options = flight.FlightCallOptions(timeout=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._flight.close()

    def health(self) -> dict[str, Any]:
        """Whether every model is ready: `{"ready": bool, "models": {...}}`.

        Raises:
            NotReady: Nobody answers at the address.
        """
        return dict(self._action("health"))

    def load(self, model: str) -> list[str]:
        """Have what is there of a model loaded; the versions that are served then.

        Raises:
            IskanderError: Why something of it is not.
        """
        return list(self._action("load", {"model": model})["versions"])

    def unload(self, model: str, *, version: str | None = None) -> list[str]:
        """Have a model, or one version of it, served no longer; the versions that are let go.

        Raises:
            IskanderError: Why not.
        """
        return list(self._action("unload", {"model": model, "version": version})["versions"])

    def models(self) -> list[dict[str, Any]]:
        """What is served, with contracts, and what is on its way or does not load."""
        return list(self._action("models"))

    def stats(self) -> dict[str, Any]:
        """Counters of lanes, workers and memory."""
        return dict(self._action("stats"))

    def score(
        self, model: str, data: pa.RecordBatch | pa.Table, *, version: str | None = None
    ) -> pa.Table:
        """Score one batch, or a table batch by batch.

        Strings come back as `utf8` or `binary`, as the contract says. bfloat16 comes and goes as
        uint16 in a field with the metadata `ARROW:extension:name` = `iskander.bfloat16`.

        Raises:
            IskanderError: As the server named it.
        """
        batches = [data] if isinstance(data, pa.RecordBatch) else data.to_batches()
        batches = batches or [pa.RecordBatch.from_pylist([], data.schema)]
        return pa.Table.from_batches(list(self.stream(model, batches, version=version)))

    def stream(
        self,
        model: str,
        batches: Iterable[Item],
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Score batches as they come; results in the same order, one for each.

        Args:
            model: Name of the model.
            batches: All of one schema; drawn from in a thread of its own, ahead of the results by
                what the server lets in. A batch may come with terms of its own.
            version: Of the model; the highest without.
            terms: Of every batch: `client`, `priority`, `urgency`, `deadline_ms`, `ttl_ms`,
                `steps_remaining`, `newest_wins`.
            timeout_s: For the whole stream.

        Raises:
            IskanderError: As the server named it.
        """
        headers = _headers(terms or {})
        return self._exchange(model, batches, version, headers, timeout_s)

    def outcomes(
        self,
        model: str,
        batches: Iterable[Item],
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[pa.RecordBatch | IskanderError]:
        """As `stream`, for those who go on after an error: it comes in its batch's place.

        For overload, deadlines and bad batches; what breaks the stream itself is still raised.
        """
        headers = _headers({**(terms or {}), "errors": "in-band"})
        return self._exchange(model, batches, version, headers, timeout_s)

    def _exchange(
        self,
        model: str,
        batches: Iterable[Item],
        version: str | None,
        headers: list[tuple[bytes, bytes]],
        timeout_s: float | None,
    ) -> Iterator[Any]:
        feed = map(_with_metadata, batches)
        first = next(feed, None)
        if first is None:
            return
        path = [model] if version is None else [model, version]
        options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except _FLIGHT_ERRORS as error:
            # Refused before the descriptor was written.
            raise self._details.latest().named(error) from error
        detail = self._details.latest()
        feeder = _Feeder(writer, reader, first, feed)
        feeder.start()
        try:
            for chunk in reader:
                yield _outcome(chunk)
                if feeder.is_last_result():
                    feeder.has_ended_call = True
                    writer.done_writing()
        except _FLIGHT_ERRORS as error:
            # After the last result it does not matter how the call ends.
            if not feeder.has_ended_call:
                feeder.finish()
                raise feeder.error or detail.named(error) from error
        finally:
            reader.cancel()  # Ends the call where the caller stopped early.
            feeder.finish()
        if feeder.error is not None:
            raise feeder.error
        if not feeder.has_ended_call:
            raise ProtocolError("the stream ended before every batch had its result")

    def _action(self, name: str, said: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        body = b"" if said is None else json.dumps(said).encode()
        try:
            results = self._flight.do_action(flight.Action(name, body), self._options)
            bodies = [result.body.to_pybytes() for result in results]
        except _FLIGHT_ERRORS as error:
            named = self._details.latest().named(error)
            if isinstance(named, IskanderError):
                raise named from error
            text = str(error).split("\n", 1)[0]
            raise NotReady(f"no gateway answers at {self._address}: {text}") from error
        return json.loads(bodies[0])


class _Detail(flight.ClientMiddleware):  # type: ignore[misc]
    """What the server said beside a call's status, and what is shown to it.

    Read from the trailers, since pyarrow hands `extra_info` on for some statuses only.
    """

    def __init__(self, shown: dict[str, str]) -> None:
        super().__init__()
        self._shown = shown
        self._wire: bytes = b""

    def sending_headers(self) -> dict[str, str]:
        return self._shown

    def received_headers(self, headers: dict[str, list[Any]]) -> None:
        for value in headers.get("grpc-status-details-bin", ()):
            self._wire = value

    def named(self, error: Exception) -> Exception:
        """The server's own error where it sent one; else the error as it is."""
        try:
            wire = json.loads(self._wire)
        except ValueError:
            return error
        return IskanderError.from_wire(wire) if isinstance(wire, dict) else error


class _Details(flight.ClientMiddlewareFactory):  # type: ignore[misc]
    """Gives each call its detail; a call begins on the thread that asks for `latest`."""

    def __init__(self, token: str | None) -> None:
        super().__init__()
        self._shown = {} if token is None else {"authorization": f"Bearer {token}"}
        self._thread = threading.local()

    def start_call(self, info: Any) -> _Detail:  # noqa: ANN401
        detail = self._thread.latest = _Detail(self._shown)
        return detail

    def latest(self) -> _Detail:
        """Of the call that this thread began last."""
        detail: _Detail = self._thread.latest
        return detail


class _Feeder(threading.Thread):
    """Writes a stream's batches while its results are read.

    It never says that writing is done: where a call fails, the reading thread closes the writing
    side too, and gRPC ends the process of whoever closes it twice. The reading thread says so
    after the last result. Where the results were there before the feed had ended, there is nobody
    to say it, and the call is cancelled, which costs nothing any more.
    """

    def __init__(
        self,
        writer: Any,  # noqa: ANN401
        reader: Any,  # noqa: ANN401
        first: tuple[pa.RecordBatch, bytes],
        rest: Iterator[tuple[pa.RecordBatch, bytes]],
    ) -> None:
        super().__init__(name="iskander-feeder", daemon=True)
        self._writer = writer
        self._reader = reader
        self._feed = itertools.chain([first], rest)
        self._schema = first[0].schema
        self._lock = threading.Lock()
        self._sent = 0
        self._received = 0
        self._is_exhausted = False
        self.error: Exception | None = None
        self.has_ended_call = False

    def run(self) -> None:
        try:
            self._writer.begin(self._schema)
            for batch, metadata in self._feed:
                self._sent += 1
                if metadata:
                    self._writer.write_with_metadata(batch, metadata)
                else:
                    self._writer.write_batch(batch)
        except _FLIGHT_ERRORS:
            return  # The call has ended; the reader is told why.
        except Exception as error:
            self.error = error
        with self._lock:
            self._is_exhausted = True
            self.has_ended_call = self.error is not None or self._received == self._sent
        if self.has_ended_call:
            self._reader.cancel()

    def is_last_result(self) -> bool:
        """Count a result; whether it was the last one that will come."""
        with self._lock:
            self._received += 1
            return self._is_exhausted and self._received == self._sent

    def finish(self) -> None:
        """Wait for the thread, and take the call's error once more.

        Where nobody asks for it, Arrow prints it to stderr. A feed that blocks keeps its thread
        until it yields; that thread's next write fails and ends it.
        """
        self.join(FEEDER_STOP_S)
        if not self.is_alive():
            with contextlib.suppress(*_FLIGHT_ERRORS):
                self._writer.close()


def _location(address: str, *, is_secret: bool) -> str:
    if address.startswith("unix:"):
        return f"grpc+unix://{address.removeprefix('unix:')}"
    return f"grpc{'+tls' if is_secret else ''}://{address}"


def _headers(terms: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Terms of a whole call, as the server reads them from its headers."""
    return [
        (f"iskander-{name.replace('_', '-')}".encode(), _text(value).encode())
        for name, value in terms.items()
    ]


def _text(value: Any) -> str:  # noqa: ANN401
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _with_metadata(item: Item) -> tuple[pa.RecordBatch, bytes]:
    if isinstance(item, tuple):
        batch, terms = item
        return batch, json.dumps({"iskander": dict(terms)}).encode()
    return item, b""


def _outcome(chunk: Any) -> pa.RecordBatch | IskanderError:  # noqa: ANN401
    """A result, or the error that came in its place."""
    if chunk.data.num_rows == 0 and chunk.app_metadata is not None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return IskanderError.from_wire(
                json.loads(bytes(chunk.app_metadata))["iskander"]["error"]
            )
    return chunk.data
