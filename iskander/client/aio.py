"""Client for asyncio: the calls of `Client`, on a bounded number of threads.

    await score, ...  ->  a thread of the pool runs the call of `Client`
    stream, outcomes  ->  one thread for each open stream

A cancelled task cancels its call at the server. Long work does not run on the loop: tables are
read, matched and restored on the threads, with the context variables of the caller.

Runs on: the caller's loop, and the threads of the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypedDict, TypeVar, Unpack

import pyarrow as pa

from iskander.client.aio_calls import CallThreads
from iskander.client.aio_stream import JOIN_S, AsyncItems, StreamThread
from iskander.client.calls.connection import CALL_TIMEOUT_S, Tls
from iskander.client.calls.credentials import Token
from iskander.client.calls.flight_errors import add_model
from iskander.client.calls.resume import Item
from iskander.client.calls.retry import Deadline, Retry
from iskander.client.client import Client, StreamOptions
from iskander.client.model import Model
from iskander.errors import Cancelled, DeadlineExceeded, IskanderError, LimitExceeded

ResultT = TypeVar("ResultT")
Arguments = ParamSpec("Arguments")
Items: TypeAlias = Iterable[Item] | AsyncIterable[Item]

CALLS_MAX = 32
"""Number of threads, and limit of the calls at a time. With 64 tasks, 128 rows and two cores shared
with the server, the threads make about 0.9 times the requests per second of 4 threads without
asyncio.
"""
STREAMS_MAX = 32


class Options(TypedDict, total=False):
    """Arguments of `Client`."""

    preferred: str | None
    timeout_s: float
    token: Token
    tls: Tls | None
    shared_bytes: int | None
    retry: Retry
    is_resolved: bool
    is_matched: bool


def _on_thread(
    method: Callable[Concatenate[Client, Arguments], ResultT],
) -> Callable[Concatenate[AsyncClient, Arguments], Coroutine[Any, Any, ResultT]]:
    """Return a method of `AsyncClient` that runs a method of `Client` on a thread."""

    @functools.wraps(method)
    async def call(
        client: AsyncClient, /, *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> ResultT:
        bound = getattr(client._client, method.__name__)  # Tests replace the client's methods.
        found: ResultT = await client._run(functools.partial(bound, *arguments, **options))
        return found

    return call


class AsyncClient:
    """Client for asyncio of one gateway, or of several with the same models.

    The constructor reads TLS files, and resolves names with `is_resolved`. Administrative calls,
    such as `load`, work as in `Client`; if the task is cancelled, the server continues them.

    Args:
        address: `HOST:PORT` or `unix:PATH`, or several of them.
        calls_max: Maximum calls at a time, each on a thread. Further calls wait, in order.
        streams_max: Maximum open streams, each on a thread.
        options: Arguments of `Client`.

    Raises:
        ConfigError: The token, an address or a TLS file is invalid.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        calls_max: int = CALLS_MAX,
        streams_max: int = STREAMS_MAX,
        **options: Unpack[Options],
    ) -> None:
        self._client = Client(address, **options)
        self._close_s = options.get("timeout_s", CALL_TIMEOUT_S) + JOIN_S
        self._threads = CallThreads(calls_max)
        self._streams_max = streams_max
        self._streams: set[StreamThread] = set()
        self._is_closed = False

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel all calls and streams, close the connections, and end the threads.

        The call of an action, such as `load`, ends with its timeout. A thread that is blocked by
        its source of data for longer than `timeout_s` is left running.
        """
        self._is_closed = True
        self._threads.cancel()
        streams = [stream.stop() for stream in self._streams]
        await asyncio.gather(self._threads.stop(self._close_s), *streams)
        with contextlib.suppress(DeadlineExceeded):
            await self._threads.run(self._client.close, JOIN_S)
        await self._threads.stop(JOIN_S)

    health = _on_thread(Client.health)
    load = _on_thread(Client.load)
    unload = _on_thread(Client.unload)
    models = _on_thread(Client.models)
    stats = _on_thread(Client.stats)

    async def model(self, name: str, *, version: str | None = None) -> Model:
        """Return a model with its contract as schemas; its calls are calls of this client.

        Raises:
            IskanderError: There is no such model, or it is not loaded.
        """
        call = functools.partial(self._client.model, name, version=version)
        with _named_model(name):
            found = await self._run(call)
        return Model(self, found.description, version=version)

    async def score(
        self,
        model: str,
        data: Any,  # noqa: ANN401
        *,
        version: str | None = None,
        columns: Mapping[str, str] | None = None,
        terms: Mapping[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> Any:  # noqa: ANN401
        """Score a table as `Client.score`; return the results as a table of the same library.

        A cancelled task cancels the call at the server if the call has begun. A returned
        `RecordBatchReader` waits for results while it is read: read it on a thread.

        Args:
            model: Name of the model.
            data: A table, as for `Client.score`; it is read on a thread.
            version: A version or an alias; None: the server's routing decides.
            columns: Input name to column name, where they differ.
            terms: Terms of all batches, as for `stream`.
            timeout_s: Timeout of the whole call, including its wait for a thread and its retries.

        Raises:
            ContractError: The data is no table, or its columns do not match the model.
            Cancelled: The client was closed.
            IskanderError: The server's error.
        """
        deadline = Deadline(timeout_s)

        def score() -> Any:  # noqa: ANN401
            return self._client.score(
                model,
                data,
                version=version,
                columns=columns,
                terms=terms,
                timeout_s=deadline.remaining_s(),
            )

        with _named_model(model):
            return await self._run(score, timeout_s)

    def stream(
        self,
        model: str,
        batches: Items,
        **options: Unpack[StreamOptions],
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Score a stream of batches as `Client.stream`; yield one result for each batch, in order.

        Cancelling the task, or `aclose`, cancels the call at the server.

        Args:
            model: Name of the model.
            batches: Batches of one schema, with or without terms. A task of the loop reads an async
                iterable, and closes an async generator; a thread reads a sync iterable.
            options: `version`, `terms`, `timeout_s` and `resume`, as for `Client.stream`.

        Raises:
            LimitExceeded: `streams_max` streams are open.
            Cancelled: The client was closed, or the task of an async iterable was cancelled.
            IskanderError: The server's error.
        """
        return self._stream(self._client.stream, model, batches, options)

    def outcomes(
        self, model: str, batches: Items, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[pa.RecordBatch | IskanderError, None]:
        """Score as `stream`, but yield the error of a batch in place of its result.

        Args:
            model: Name of the model.
            batches: Batches, as for `stream`.
            options: Options of `stream`.
        """
        return self._stream(self._client.outcomes, model, batches, options)

    async def _run(self, call: Callable[[], ResultT], timeout_s: float | None = None) -> ResultT:
        """Run a call on a thread of the pool."""
        self._require_open()
        context = contextvars.copy_context()
        return await self._threads.run(functools.partial(context.run, call), timeout_s)

    def _stream(
        self,
        call: Callable[..., Iterator[Any]],
        model: str,
        batches: Items,
        options: StreamOptions,
    ) -> AsyncGenerator[Any, None]:
        """Return the results of a stream; its thread starts when the first result is awaited."""
        # The deadline and the context are taken now, not when the results are awaited.
        deadline = Deadline(options.get("timeout_s"))

        def open_results(source: Any) -> Iterator[Any]:  # noqa: ANN401
            left: StreamOptions = {"timeout_s": deadline.remaining_s()}
            return call(model, source, **{**options, **left})

        start = functools.partial(
            self._start_stream, open_results, batches, deadline, contextvars.copy_context()
        )
        return self._results(model, start)

    async def _results(
        self, model: str, start: Callable[[], StreamThread]
    ) -> AsyncGenerator[Any, None]:
        with _named_model(model):
            stream = start()
            try:
                async with contextlib.aclosing(stream.results()) as results:
                    async for result in results:
                        yield result
            finally:
                await stream.stop()
                if not stream.is_alive():
                    self._streams.discard(stream)

    def _start_stream(
        self,
        open_results: Callable[[Any], Iterator[Any]],
        batches: Items,
        deadline: Deadline,
        context: contextvars.Context,
    ) -> StreamThread:
        self._require_open()
        self._streams = {stream for stream in self._streams if stream.is_alive()}
        if len(self._streams) >= self._streams_max:
            text = f"{len(self._streams)} streams are open, limit {self._streams_max}"
            raise LimitExceeded(f"{text} (`streams_max`)")
        items = None
        if isinstance(batches, AsyncIterable):
            items = AsyncItems(batches, asyncio.get_running_loop())
        source = batches if items is None else items
        stream = StreamThread(functools.partial(open_results, source), items, deadline, context)
        self._streams.add(stream)
        stream.start()
        return stream

    def _require_open(self) -> None:
        if self._is_closed:
            raise Cancelled("the client is closed")


@contextlib.contextmanager
def _named_model(model: str) -> Iterator[None]:
    """Set the model of an error that has none."""
    try:
        yield
    except IskanderError as error:
        add_model(error, model)
        raise
