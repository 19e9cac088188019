"""Client of a gateway: calls and streams, with typed errors.

Runs on: the caller's threads.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from pyarrow import flight

from iskander.client.call_details import CallDetails
from iskander.client.shared_memory import RegionPool
from iskander.client.stream_writer import FLIGHT_ERRORS, StreamWriter
from iskander.control.shared_regions import REGION_HEADER
from iskander.errors import ConfigError, IskanderError, NotReady, ProtocolError, RegionNotFound

CALL_TIMEOUT_S = 10.0

Item: TypeAlias = pa.RecordBatch | tuple[pa.RecordBatch, Mapping[str, Any]]
"""A batch, or a batch and its terms, such as `{"deadline_ms": 20, "priority": 0}`."""

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


class Client:
    """A connection to one gateway.

    Args:
        address: `HOST:PORT` or `unix:PATH`.
        timeout_s: Timeout of each call except streams. A slow `load` needs a longer one.
        token: Token sent with every call.
        tls: TLS files; None: plaintext.
        shared_bytes: Size of each stream's shared memory, for large batches to a server on this
            machine; 0: none.

    Raises:
        ConfigError: The token or a TLS file is invalid.
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
            raise ConfigError("invalid token: only printable ASCII without spaces is allowed")
        self._address = address
        self._details = CallDetails(token)
        self._flight = flight.FlightClient(
            _uri(address, is_tls=tls is not None),
            middleware=[self._details],
            **({} if tls is None else tls.options()),
        )
        self._regions = RegionPool(self._request_region_socket, shared_bytes, timeout_s)
        self._options = flight.FlightCallOptions(timeout=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and release idle shared memory."""
        self._regions.close()
        self._flight.close()

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
        self, model: str, data: pa.RecordBatch | pa.Table, *, version: str | None = None
    ) -> pa.Table:
        """Score one batch, or a table batch by batch.

        Result strings are `utf8` or `binary`, as in the contract. bfloat16 is uint16 in a field
        with the metadata `ARROW:extension:name` = `iskander.bfloat16`.

        Raises:
            IskanderError: The server's error.
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
        """Score a stream of batches; yield one result for each, in order.

        Args:
            model: Name of the model.
            batches: Batches of one schema, with or without terms. A separate thread reads them as
                far ahead of the results as the server's flow control allows.
            version: A version or an alias; None: the server's routing decides.
            terms: Terms of all batches: `client`, `priority`, `urgency`, `deadline_ms`, `ttl_ms`,
                `steps_remaining`, `newest_wins`, `route_key`; a batch's own may include
                `timestamp_ns`.
            timeout_s: Timeout of the whole stream.

        Raises:
            IskanderError: The server's error.
        """
        headers = _headers(terms or {})
        return self._exchange(_descriptor_path(model, version), batches, headers, timeout_s)

    def outcomes(
        self,
        model: str,
        batches: Iterable[Item],
        *,
        version: str | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Iterator[pa.RecordBatch | IskanderError]:
        """Score as `stream`, but yield the error of a batch in place of its result.

        This covers overload, deadlines and invalid batches; errors of the stream are raised.
        """
        headers = _headers({**(terms or {}), "errors": "in-band"})
        return self._exchange(_descriptor_path(model, version), batches, headers, timeout_s)

    def _exchange(
        self, path: list[str], batches: Iterable[Item], headers: Headers, timeout_s: float | None
    ) -> Iterator[Any]:
        feed = map(_encode_terms, batches)
        first = next(feed, None)
        if first is None:
            return
        region = self._regions.acquire(first[0])
        if region is not None:
            headers.append((REGION_HEADER.encode(), region.name.encode()))
        options = flight.FlightCallOptions(timeout=timeout_s, headers=headers)
        descriptor = flight.FlightDescriptor.for_path(*path)
        try:
            writer, reader = self._flight.do_exchange(descriptor, options)
        except FLIGHT_ERRORS as error:
            # The call failed before the descriptor was written.
            raise self._details.latest().to_named(error) from error
        detail = self._details.latest()
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
            if region is not None:
                self._regions.release(region, is_usable=is_usable and not feeder.is_alive())
        if feeder.error is not None:
            raise feeder.error
        if not feeder.has_ended_call:
            raise ProtocolError("the stream ended before the result of every batch")

    def _request_region_socket(self) -> Path:
        return Path(self._action("shared-memory")["path"])

    def _action(self, name: str, fields: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        body = b"" if fields is None else json.dumps(fields).encode()
        try:
            results = self._flight.do_action(flight.Action(name, body), self._options)
            bodies = [result.body.to_pybytes() for result in results]
        except FLIGHT_ERRORS as error:
            named = self._details.latest().to_named(error)
            if isinstance(named, IskanderError):
                raise named from error
            text = str(error).split("\n", 1)[0]
            raise NotReady(f"no gateway answers at {self._address}: {text}") from error
        return json.loads(bodies[0])


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


def _encode_terms(item: Item) -> tuple[pa.RecordBatch, bytes]:
    if isinstance(item, tuple):
        batch, terms = item
        return batch, json.dumps({"iskander": dict(terms)}).encode()
    return item, b""


def _outcome(chunk: Any) -> pa.RecordBatch | IskanderError:  # noqa: ANN401
    """Return the result or the error of a batch."""
    if chunk.data.num_rows == 0 and chunk.app_metadata is not None:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            metadata = json.loads(bytes(chunk.app_metadata))
            return IskanderError.from_wire(metadata["iskander"]["error"])
    return chunk.data
