"""Client of gateways: tables of any library in, results of the same library out.

    score    ->  open_source -> Matching -> slices -> a call or a stream -> restore
    stream   ->  batches as they are, pipelined; resumed after a retryable failure

Runs on: the caller's threads.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import pyarrow as pa

from iskander.client.calls.cancellation import OpenCalls
from iskander.client.calls.connection import (
    CALL_TIMEOUT_S,
    Connection,
    Headers,
    Tls,
    decode_result,
    encode_terms,
)
from iskander.client.calls.credentials import Credentials, Token
from iskander.client.calls.flight_errors import add_model
from iskander.client.calls.resume import (
    WINDOW_BATCHES,
    WINDOW_BYTES,
    Item,
    Outcome,
    ResumeWindow,
    WindowFeed,
    resume_until_complete,
    shorten_deadline,
)
from iskander.client.calls.retry import OFF, Attempts, Deadline, Retry, RetryBudget, require_seconds
from iskander.client.calls.targets import Address, Route, Targets
from iskander.client.calls.trace_context import trace_headers
from iskander.client.matching import Matching
from iskander.client.model import Model, ModelDescription, read_description
from iskander.client.slicing import ROWS_MIN, cut_and_join, join_to_one
from iskander.client.tables import InputTable, open_source
from iskander.errors import (
    ConfigError,
    ContractError,
    ExecutionFailed,
    IskanderError,
    LimitExceeded,
    ModelMoved,
    ModelNotFound,
    shorten,
)
from iskander.foundation import clock

ResultT = TypeVar("ResultT")

BATCH_ROWS = 65_536
"""Rows of the batches into which a table is cut, if the server accepts so many."""
_Key: TypeAlias = tuple[str, str | None]
"""Name and version of a model, as the caller gives them."""
_Columns: TypeAlias = tuple[tuple[str, str], ...]
DEFAULT_RETRY = Retry()
CACHED_MAX = 256
"""Limit of the cached descriptions of a client, and of its cached matchings."""
_STALE = (ContractError, LimitExceeded, ModelMoved, ModelNotFound)
"""Errors that may occur because the model has changed since it was described."""


class StreamOptions(TypedDict, total=False):
    """Options of `Client.stream`."""

    version: str | None
    terms: Mapping[str, Any] | None
    timeout_s: float | None
    resume: bool


class Client:
    """Client of one gateway, or of several with the same models.

    Args:
        address: `HOST:PORT` or `unix:PATH`, or several of them.
        preferred: Address of the gateway that gets all calls while it is ready, such as one on this
            machine; it need not be in `address`. While it is not ready, others get the calls.
        timeout_s: Timeout of calls other than `score`, `stream` and `outcomes`, and of the requests
            for the contract and for shared memory. A slow `load` needs a longer timeout.
        token: Token sent with every call, or a function that returns the current token. The
            function is called for every attempt of a call, on the thread of the call.
        tls: TLS files; None: plaintext. Unix sockets have no TLS.
        shared_bytes: Size of each stream's shared memory, for large batches to a server on this
            machine. None: 64 MiB if the server offers shared memory; 0: no shared memory.
        retry: Retries of `score`, `stream` and `outcomes`; `OFF` for no retries.
        is_resolved: Whether every IP address of a host name is used as a separate gateway.
        is_matched: Whether `score` matches columns with the model's contract before it sends them,
            with lossless casts and errors that name the column. Otherwise the server checks them.

    Raises:
        ConfigError: The token, the timeout, an address or a TLS file is invalid.
    """

    def __init__(  # noqa: PLR0913 - all but the first by keyword
        self,
        address: str | Sequence[str],
        *,
        preferred: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        token: Token = None,
        tls: Tls | None = None,
        shared_bytes: int | None = None,
        retry: Retry = DEFAULT_RETRY,
        is_resolved: bool = False,
        is_matched: bool = True,
    ) -> None:
        require_seconds(timeout_s, "timeout_s")
        credentials = Credentials(token)
        self._calls = OpenCalls()

        def connect(address: Address) -> Connection:
            return Connection(
                address,
                timeout_s=timeout_s,
                credentials=credentials,
                tls=tls,
                shared_bytes=shared_bytes,
                calls=self._calls,
            )

        self._targets = Targets(address, connect, preferred=preferred, is_resolved=is_resolved)
        self._retry = retry
        self._budget = RetryBudget(retry.budget)
        self._timeout_s = timeout_s
        self._is_matched = is_matched
        self._lock = threading.Lock()
        self._descriptions: dict[_Key, ModelDescription] = {}
        self._matchings: dict[tuple[_Key, bytes, _Columns], Matching] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls, streams and waits with `Cancelled`, and close the connections.

        The call of an action, such as `load`, ends with its timeout.
        """
        self._calls.close()
        self._targets.close()

    def health(self) -> dict[str, Any]:
        """Return the readiness of every model: `{"ready": bool, "models": {...}}`.

        Raises:
            ConnectionFailed: No gateway answers at the address.
        """
        return self._action("health", dict)

    def load(self, model: str) -> list[str]:
        """Load the current files of a model; return the served versions.

        Raises:
            IskanderError: The load of a version failed.
        """
        return self._action("load", list, model, key="versions")

    def unload(self, model: str, *, version: str | None = None) -> list[str]:
        """Stop serving a model, or one version of it; return the unloaded versions.

        Raises:
            IskanderError: The model cannot be unloaded.
        """
        return self._action("unload", list, model, key="versions", version=version)

    def drain(self) -> dict[str, Any]:
        """Stop the server as SIGTERM does: it finishes accepted batches and exits.

        Raises:
            PermissionDenied: The token may not manage all models, or the server has no tokens.
        """
        return self._action("drain", dict)

    def reload(self) -> dict[str, Any]:
        """Apply the changed settings of the server's configuration file.

        Returns:
            `{"changed": [...]}`, or `{"state": "reloading"}` if the server has several processes,
            which continue without the caller.

        Raises:
            ConfigError: The file is invalid, or a change in it needs a restart; nothing changed.
            PermissionDenied: As for `drain`.
        """
        return self._action("reload", dict)

    def models(self) -> list[dict[str, Any]]:
        """Return all models: served with a contract, loading, or failed to load."""
        return self._action("models", list)

    def stats(self) -> dict[str, Any]:
        """Return counters of lanes, workers and memory."""
        return self._action("stats", dict)

    def model(self, name: str, *, version: str | int | None = None) -> Model:
        """Return a model with its contract as schemas, and its calls.

        Raises:
            IskanderError: There is no such model, or it is not loaded.
        """
        try:
            key = (name, _version_text(version))
            self._forget(key)
            description = self._describe(key, Deadline(self._timeout_s))
        except IskanderError as error:
            add_model(error, name)
            raise
        return Model(self, description, version=key[1])

    def score(
        self,
        model: str,
        data: Any,  # noqa: ANN401
        *,
        version: str | int | None = None,
        columns: Mapping[str, str] | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Score a table; return the results as a table of the same library, in its order.

        Result strings are `utf8` or `binary`, as in the contract. bfloat16 is uint16 in a field
        with the metadata `ARROW:extension:name` = `iskander.bfloat16`.

        Args:
            model: Name of the model.
            data: A pyarrow, Polars, pandas, DuckDB or Ibis table, any object with
                `__arrow_c_stream__` or `__arrow_c_array__`, or a dict of NumPy arrays. The table is
                cut into batches within the server's limits.
            version: A version, as text or number, or an alias; None: the server's routing decides.
            columns: Input name to column name, where they differ.
            terms: Terms of all batches, as for `stream`.
            timeout_s: Timeout of the whole call with its retries.

        Raises:
            ConfigError: `version` or `columns` is invalid.
            ContractError: The data is no table, or its columns do not match the model.
            ConnectionFailed: No gateway answers, or the connection failed, in all attempts.
            IskanderError: The server's error.
        """
        try:
            key = (model, _version_text(version))
            return self._score(key, data, columns, terms or {}, Deadline(timeout_s))
        except IskanderError as error:
            add_model(error, model)
            raise

    def _score(
        self,
        key: _Key,
        data: Any,  # noqa: ANN401
        columns: Mapping[str, str] | None,
        terms: Mapping[str, Any],
        deadline: Deadline,
    ) -> Any:  # noqa: ANN401
        source = open_source(data)
        path = _descriptor_path(*key)
        try:
            batches = source.batches
            if self._is_matched:
                batches = self._match_and_cut(key, source, columns, deadline)
            first = next(batches)
            # The next batch of a live reader may come much later, so it is not awaited.
            is_single = not (source.is_live and first.num_rows >= ROWS_MIN)
            second = next(batches, None) if is_single else None
            if second is not None or not is_single:
                ahead = [first] if second is None else [first, second]
                if self._is_matched:
                    # The server may have another version of the model by now.
                    terms = {**terms, **self._describe(key, deadline).cut_terms}
                sent, headers = itertools.chain(ahead, batches), _headers(terms)
                results = self._stream(path, sent, terms, headers, deadline, resume=True)
                results = _with_first_row(results)
            else:
                results = iter([self._score_one(path, first, terms, deadline)])
            result = next(results)
        except _STALE:
            self._forget(key)
            raise
        return source.restore(result.schema, self._until_stale(key, result, results))

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
        """Score a stream of batches; yield one result for each batch, in order.

        Args:
            model: Name of the model.
            batches: Batches of one schema, with or without terms. A separate thread reads them as
                far ahead of the results as the server's flow control allows. With retries, batches
                are kept until their results arrive, at most `WINDOW_BATCHES` and `WINDOW_BYTES`.
            version: A version or an alias; None: the server's routing decides.
            terms: Terms of all batches: `client`, `priority`, `urgency`, `deadline_ms`, `ttl_ms`,
                `steps_remaining`, `newest_wins`, `route_key`; terms of a single batch may include
                `timestamp_ns`.
            timeout_s: Timeout of the whole stream with its retries.
            resume: Whether the stream continues on another connection after a retryable failure, if
                retries are on.

        Raises:
            ConnectionFailed: The connection failed, and the stream is not resumed.
            IskanderError: The server's error.
        """
        path, terms = _descriptor_path(model, version), terms or {}
        deadline, headers = Deadline(timeout_s), _headers(terms)
        return self._stream(path, batches, terms, headers, deadline, resume=resume)

    def outcomes(
        self,
        model: str,
        batches: Iterable[Item],
        **options: Unpack[StreamOptions],
    ) -> Iterator[pa.RecordBatch | IskanderError]:
        """Score as `stream`, but yield the error of a batch in place of its result.

        This covers overload, deadlines and invalid batches; errors of the stream are raised.

        Args:
            model: Name of the model.
            batches: Batches, as for `stream`.
            options: Options of `stream`.
        """
        options["terms"] = {**(options.get("terms") or {}), "errors": "in-band"}
        return self.stream(model, batches, **options)

    def _match_and_cut(
        self, key: _Key, source: InputTable, columns: Mapping[str, str] | None, deadline: Deadline
    ) -> Iterator[pa.RecordBatch]:
        """Return batches of the model's columns within the server's limits."""
        matching, first, rows = self._match_first(key, source, columns, deadline)
        batches = itertools.chain([first], _match_batches(matching, source.batches, rows))
        limits = matching.model.limits
        bytes_max, string_bytes_max = limits["bytes"], limits["string_bytes"]
        if not matching.model.ranked_within and not matching.model.is_whole:
            rows_max = min(limits["rows"], BATCH_ROWS)
            return cut_and_join(
                batches,
                rows_max=rows_max,
                bytes_max=bytes_max,
                string_bytes_max=string_bytes_max,
                strings=matching.strings,
            )
        # Ranks and results that depend on other rows need all rows in one batch.
        try:
            batch = join_to_one(
                batches,
                rows_max=limits["rows"],
                bytes_max=bytes_max,
                string_bytes_max=string_bytes_max,
                rows_setting=matching.model.rows_setting,
            )
        except LimitExceeded as error:
            raise matching.model.whole_error(error) from None
        return iter([batch])

    def _match_first(
        self, key: _Key, source: InputTable, columns: Mapping[str, str] | None, deadline: Deadline
    ) -> tuple[Matching, pa.RecordBatch, int]:
        """Return the matching of a table, its first batch as sent, and the rows of that batch.

        Data that does not match a cached contract is matched again with the current contract.
        """
        is_cached, first = key in self._descriptions, None
        try:
            matching = self._matching(key, source.schema, columns, deadline)
            first = next(source.batches)
            return matching, matching.apply(first), first.num_rows
        except ContractError:
            if not is_cached:
                raise
            self._forget(key)
            matching = self._matching(key, source.schema, columns, deadline)
            if first is None:
                first = next(source.batches, None)
            if first is None:  # The table itself raised the error.
                raise
            return matching, matching.apply(first), first.num_rows

    def _matching(
        self,
        key: _Key,
        schema: pa.Schema,
        columns: Mapping[str, str] | None,
        deadline: Deadline,
    ) -> Matching:
        """Return the matching of a schema, which is cached."""
        # Serialized, because equal schemas may differ in the metadata of extension types.
        fields = (schema.remove_metadata() if schema.metadata else schema).serialize().to_pybytes()
        matching_key = (key, fields, _column_pairs(columns) if columns else ())
        matching = self._matchings.get(matching_key)
        if matching is None:
            matching = Matching(self._describe(key, deadline), schema, columns=columns)
            with self._lock:
                if len(self._matchings) >= CACHED_MAX:
                    self._matchings.clear()
                self._matchings[matching_key] = matching
        return matching

    def _describe(self, key: _Key, deadline: Deadline) -> ModelDescription:
        description = self._descriptions.get(key)
        if description is None:
            fields = {"model": key[0], "version": key[1]}

            def describe(connection: Connection, left_s: float | None) -> list[bytes]:
                return connection.action("contract", fields, timeout_s=left_s)

            description = read_description(self._call(describe, 0, deadline))
            with self._lock:
                if len(self._descriptions) >= CACHED_MAX:
                    self._descriptions.clear()
                self._descriptions[key] = description
        return description

    def _forget(self, key: _Key) -> None:
        """Forget what the server said about a model, because the model may have changed."""
        with self._lock:
            self._descriptions.pop(key, None)
            for each in [
                matching_key for matching_key in self._matchings if matching_key[0] == key
            ]:
                del self._matchings[each]

    def _until_stale(
        self, key: _Key, first: pa.RecordBatch, results: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Yield results; forget the model after an error that a change of it may have caused."""
        yield first
        try:
            yield from results
        except _STALE:
            self._forget(key)
            raise

    def _score_one(
        self, path: list[str], batch: pa.RecordBatch, terms: Mapping[str, Any], deadline: Deadline
    ) -> pa.RecordBatch:
        began_ns, sent = clock.now_ns(), itertools.count()

        def remaining_terms() -> Mapping[str, Any]:
            if not next(sent):
                return terms
            waited_ms = (clock.now_ns() - began_ns) / clock.NS_PER_MS
            return shorten_deadline(terms, None, waited_ms) or {}

        def score(connection: Connection, left_s: float | None) -> pa.RecordBatch | None:
            if connection.may_share(batch):
                return None
            return connection.score(path, batch, _headers(remaining_terms()), left_s)

        result = self._call(score, batch.num_rows, deadline)
        if result is None:
            left = remaining_terms()
            (result,) = self._stream(path, [batch], left, _headers(left), deadline, resume=True)
        return result

    def _call(
        self,
        call: Callable[[Connection, float | None], ResultT],
        rows: int,
        deadline: Deadline,
    ) -> ResultT:
        """Make a call on a target; make it again after a retryable failure."""
        route = Route(self._targets)
        attempts = Attempts(self._retry, self._budget, deadline, self._calls.pause)
        while True:
            left_s = deadline.remaining_s()
            try:
                with route.attempt(rows) as lease:
                    result = call(lease.connection, left_s)
                attempts.succeed()
                return result
            except IskanderError as error:
                attempts.wait_after(error)

    def _stream(
        self,
        path: list[str],
        batches: Iterable[Item],
        terms: Mapping[str, Any],
        headers: Headers,
        deadline: Deadline,
        *,
        resume: bool,
    ) -> Iterator[Any]:
        retry = self._retry if resume else OFF
        window = ResumeWindow(
            iter(batches),
            deadline,
            deadline_ms=terms.get("deadline_ms"),
            batches_max=WINDOW_BATCHES if retry.is_enabled else None,
            bytes_max=WINDOW_BYTES if retry.is_enabled else None,
        )
        route = Route(self._targets, window.has_caused)
        attempts = Attempts(retry, self._budget, deadline, self._calls.pause)

        def connect(feed: WindowFeed) -> Iterator[Outcome]:
            with route.attempt(window.rows) as lease:
                feed.load = lease
                yield from lease.connection.exchange(path, feed, headers, deadline)

        try:
            yield from resume_until_complete(connect, window, attempts)
        except IskanderError as error:
            add_model(error, path[0])
            raise

    def _action(
        self,
        name: str,
        kind: type[ResultT],
        model: str | None = None,
        *,
        key: str | None = None,
        **fields: Any,  # noqa: ANN401
    ) -> ResultT:
        """Run an action, for `model` if it is given; return its result, or one key of it."""
        sent = None if model is None else {"model": model, **fields}
        try:
            with self._targets.pick() as lease:
                return decode_result(lease.connection.action(name, sent), kind, key)
        except IskanderError as error:
            if model is not None:
                add_model(error, model)
            raise


def _match_batches(
    matching: Matching, batches: Iterable[pa.RecordBatch], row: int
) -> Iterator[pa.RecordBatch]:
    """Yield batches with the columns that are sent; `row` is the number of the first row."""
    for batch in batches:
        yield matching.apply(batch, first_row=row)
        row += batch.num_rows


def _column_pairs(columns: Any) -> _Columns:  # noqa: ANN401
    """Return the pairs of the argument `columns`, sorted."""
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
        if all(isinstance(name, str) for pair in pairs for name in pair):
            return tuple(sorted(pairs))
    text = "expected a dict from names of inputs to names of columns"
    raise ConfigError(f"`columns` is {columns!r}; {text}")


def _version_text(version: Any) -> str | None:  # noqa: ANN401
    if version is None or isinstance(version, str):
        return version
    if isinstance(version, int) and not isinstance(version, bool):
        return str(version)
    raise ConfigError(f"`version` is {version!r}; expected a version or an alias")


def _headers(terms: Mapping[str, Any]) -> Headers:
    """Return the headers of a call with these terms, and its trace context."""
    return [*encode_terms(terms), *trace_headers()]


def _descriptor_path(model: str, version: str | int | None) -> list[str]:
    text = _version_text(version)
    return [model] if text is None else [model, text]


def _with_first_row(results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield results of a table's batches; add the batch's first row in the table to an error.

    The server numbers rows within a batch only.
    """
    rows = 0
    try:
        for result in results:
            rows += result.num_rows
            yield result
    except (ContractError, ExecutionFailed) as error:
        if rows:
            text = f"{error.message}. Its batch begins in row {rows:,} of the table"
            error.message = shorten(text)
            error.fields["first_row"] = rows
            error.args = (error.message,)
        raise
