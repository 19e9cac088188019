"""Stream of `AsyncClient`: one thread runs the stream of a `Client` for a loop.

    AsyncItems (the caller's async iterable) -> Client.stream -> StreamThread -> the loop

Runs on: the loop of `AsyncClient`, and a thread for each stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterator
from typing import Any, NamedTuple

from iskander.client.calls.cancellation import Cancellation
from iskander.client.calls.retry import Deadline
from iskander.errors import Cancelled, DeadlineExceeded, IskanderError

JOIN_S = 2.0
"""Maximum wait for a stream's thread and for the caller's iterable, after a cancellation."""
RESULTS_MAX = 64
"""Limit of the results of a stream that the loop has not taken."""
RESULTS_BYTES = 16 << 20
"""Limit of the bytes of those results; a single result may be larger."""
ITEMS_AHEAD = 2
"""Number of items of an async iterable that are read before the stream asks for them."""
_END = object()


class _Failure(NamedTuple):
    """An error that the caller's iterable raised."""

    error: BaseException


class AsyncItems:
    """Sync iterator for a thread over an async iterable, which a task of the loop reads.

    Args:
        items: The caller's iterable.
        loop: The running loop.
    """

    def __init__(self, items: AsyncIterable[Any], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()  # At most ITEMS_AHEAD + 1.
        self._wanted = asyncio.Semaphore(ITEMS_AHEAD)
        self._is_cancelled = False
        self._task = loop.create_task(self._read(items))
        # A callback, because a task that is cancelled before its first step runs no code.
        self._task.add_done_callback(self._end)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:  # noqa: ANN401
        item = self._ready.get()
        if item is _END:
            raise StopIteration
        if isinstance(item, _Failure):
            raise item.error
        with contextlib.suppress(RuntimeError):  # The loop is closed: the task has ended.
            self._loop.call_soon_threadsafe(self._wanted.release)
        return item

    def cancel(self) -> None:
        """Cancel the task, which ends this iterator."""
        self._is_cancelled = True
        self._task.cancel()

    async def join(self) -> None:
        """Wait for the end of the task."""
        await asyncio.wait([self._task], timeout=JOIN_S)

    async def _read(self, items: AsyncIterable[Any]) -> None:
        async with _closing(items):
            async for item in items:
                self._ready.put(item)
                await self._wanted.acquire()

    def _end(self, task: asyncio.Task[None]) -> None:
        """End this iterator, with the error of the iterable if there is one."""
        error: BaseException | None = None
        if not task.cancelled():
            error = task.exception()
        elif not self._is_cancelled:
            error = Cancelled("the iterable of batches was cancelled")
        if error is not None:
            self._ready.put(_Failure(error))
        self._ready.put(_END)


@contextlib.asynccontextmanager
async def _closing(items: AsyncIterable[Any]) -> AsyncGenerator[None, None]:
    """Close an async generator after the block; other iterables have nothing to close."""
    try:
        yield
    finally:
        if isinstance(items, AsyncGenerator):
            await items.aclose()


class StreamThread(threading.Thread):
    """Thread that reads the results of a stream for the loop that creates it.

    Args:
        open_results: Opens the stream; called on the thread.
        items: Reader of the caller's async iterable; None for a sync iterable.
        deadline: Deadline of the stream.
        context: Context variables of the caller, for the thread.
    """

    def __init__(
        self,
        open_results: Callable[[], Iterator[Any]],
        items: AsyncItems | None,
        deadline: Deadline,
        context: contextvars.Context,
    ) -> None:
        super().__init__(name="iskander-stream", daemon=True)
        self._open_results = open_results
        self._items = items
        self._deadline = deadline
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._has_change = asyncio.Event()
        self._cancellation = Cancellation()
        self._taken = threading.Condition()
        self._results: deque[tuple[Any, int]] = deque()
        self._bytes = 0
        self._has_ended = asyncio.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Read results until the stream ends or is cancelled."""
        self._context.run(self._read)

    def _read(self) -> None:
        try:
            with self._cancellation, contextlib.closing(self._open_results()) as results:  # type: ignore[type-var]
                for result in results:
                    if not self._put(result):
                        break
        except BaseException as error:  # Raised again on the loop, whatever it is.
            self._error = error
        self._notify_loop(self._has_ended)
        self._notify_loop(self._has_change)

    async def results(self) -> AsyncGenerator[Any, None]:
        """Yield the results as they arrive.

        Raises:
            Cancelled: The client was closed.
            DeadlineExceeded: The stream's deadline has passed.
            BaseException: The error of the stream.
        """
        while True:
            with self._taken:
                has_ended = self._has_ended.is_set()
                result, size_bytes = self._results.popleft() if self._results else (_END, 0)
                self._bytes -= size_bytes
                self._taken.notify()
                if result is _END:
                    self._has_change.clear()
            if result is not _END:
                yield result
                await asyncio.sleep(0)  # Lets other tasks run while results are waiting.
            elif has_ended:
                break
            else:
                await self._wait()
        if self._cancellation.has_expired:
            raise DeadlineExceeded("the call's deadline has passed") from self._error
        if self._cancellation.is_requested:
            raise Cancelled("the client was closed") from self._error
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Cancel the call at the server, and end all waits."""
        self._cancellation.cancel()
        if self._items is not None:
            self._items.cancel()
        with self._taken:
            self._taken.notify()

    async def stop(self) -> None:
        """Cancel the stream and wait for its thread, up to `JOIN_S` if its iterable blocks."""
        self.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_S):
                await self._has_ended.wait()
        if self._has_ended.is_set():
            self.join()
        if self._items is not None:
            await self._items.join()

    async def _wait(self) -> None:
        """Wait for a result or the end of the stream; cancel the stream at its deadline."""
        try:
            async with asyncio.timeout(self._deadline.remaining_s()):
                await self._has_change.wait()
        except TimeoutError:
            self._cancellation.cancel(has_expired=True)

    def _put(self, result: Any) -> bool:  # noqa: ANN401
        """Wait for space and add a result; return whether the stream continues."""
        size_bytes = 0 if isinstance(result, IskanderError) else result.nbytes
        with self._taken:
            while not self._has_space() and not self._cancellation.is_requested:
                self._taken.wait(self._deadline.remaining_s())
            self._results.append((result, size_bytes))
            self._bytes += size_bytes
        self._notify_loop(self._has_change)
        return not self._cancellation.is_requested

    def _has_space(self) -> bool:
        if not self._results:
            return True
        return len(self._results) < RESULTS_MAX and self._bytes < RESULTS_BYTES

    def _notify_loop(self, event: asyncio.Event) -> None:
        try:
            self._loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # The loop is closed.
            self._cancellation.cancel()
