"""The client: calls, streams, and errors by name.

Runs on: the caller's threads.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from pyarrow import flight

from iskander.client.call_details import Details
from iskander.client.shared_memory import Regions
from iskander.client.stream_writer import FLIGHT_ERRORS, StreamWriter
from iskander.control.shared_regions import REGION_HEADER
from iskander.errors import ConfigError, IskanderError, NotReady, ProtocolError, RegionNotFound

CALL_TIMEOUT_S = 10.0

Item: TypeAlias = pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, Any]]
"""A batch, or a batch and its terms, such as `{"deadline_ms": 20, "priority": 0}`."""

_LENDER_GONE = "the process that lent this client memory has gone, or another answers; ask again"
_TOKEN = re.compile(r"[!-~]+")


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
        timeout_s: For all calls but streams, which have their own. `load` waits until the model is
            served, and may need more.
        token: Shown with every call, where the server wants one.
        tls: The server is spoken to over TLS; None: in the clear.
        shared_bytes: Of memory, for each stream, in which large batches are handed over to a
            server on this machine that lends some; 0: all go over the connection.

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
        shared_bytes: int = 0,
    ) -> None:
        if token is not None and not _TOKEN.fullmatch(token):
            raise ConfigError("the token has letters that no token has, such as a line's end")
        self._address = address
        self._details = Details(token)
        self._flight = flight.FlightClient(
            _location(address, is_secret=tls is not None),
            middleware=[self._details],
            **({} if tls is None else tls.options()),
        )
        self._regions = Regions(self._lender, shared_bytes, timeout_s)
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
        """Close the connection, and give back memory that no stream is using."""
        self._regions.close()
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
            version: Of the model, or an alias; without, what the server's routing says.
            terms: Of every batch: `client`, `priority`, `urgency`, `deadline_ms`, `ttl_ms`,
                `steps_remaining`, `newest_wins`, `route_key`; a batch's own may have a
                `timestamp_ns` too.
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
        region = self._regions.for_stream(first[0])
        if region is not None:
            headers.append((REGION_HEADER.encode(), region.name.encode()))
        path = [model] if version is None else [model, version]
        options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except FLIGHT_ERRORS as error:
            # Refused before the descriptor was written.
            raise self._details.latest().named(error) from error
        detail = self._details.latest()
        feeder = StreamWriter(writer, reader, first, feed, region)
        feeder.start()
        is_lent = True
        try:
            for chunk in reader:
                feeder.on_result()
                yield _outcome(chunk)
                if feeder.is_last_result():
                    feeder.has_ended_call = True
                    writer.done_writing()
        except FLIGHT_ERRORS as error:
            # After the last result it does not matter how the call ends.
            if not feeder.has_ended_call:
                feeder.finish()
                named = feeder.error or detail.named(error)
                if isinstance(named, RegionNotFound):
                    is_lent, named = False, NotReady(_LENDER_GONE)
                raise named from error
        finally:
            reader.cancel()  # Ends the call where the caller stopped early.
            feeder.finish()
            if region is not None:
                self._regions.put_by(region, is_usable=is_lent and not feeder.is_alive())
        if feeder.error is not None:
            raise feeder.error
        if not feeder.has_ended_call:
            raise ProtocolError("the stream ended before every batch had its result")

    def _lender(self) -> Path:
        return Path(self._action("shared-memory")["path"])

    def _action(self, name: str, said: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        body = b"" if said is None else json.dumps(said).encode()
        try:
            results = self._flight.do_action(flight.Action(name, body), self._options)
            bodies = [result.body.to_pybytes() for result in results]
        except FLIGHT_ERRORS as error:
            named = self._details.latest().named(error)
            if isinstance(named, IskanderError):
                raise named from error
            text = str(error).split("\n", 1)[0]
            raise NotReady(f"no gateway answers at {self._address}: {text}") from error
        return json.loads(bodies[0])


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
