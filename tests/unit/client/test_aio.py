"""Client for asyncio with a fake `Client`: calls, cancellation, deadlines, streams, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from iskander.client import AsyncClient, Client, aio, aio_stream
from iskander.client.calls import cancellation
from iskander.errors import (
    Cancelled,
    ConfigError,
    ContractError,
    DeadlineExceeded,
    IskanderError,
    LimitExceeded,
    QueueFull,
)

WITHIN_S = 20.0
OPENED = 4


def batch(number: int) -> pa.RecordBatch:
    return pa.record_batch({"x": [number]})


def number_of(result: pa.RecordBatch) -> int:
    number: int = result["x"][0].as_py()
    return number


class Reader:
    """The reader of a call: blocks until it is cancelled or the test lets it answer."""

    def __init__(self) -> None:
        self._go_on = threading.Event()
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self._go_on.set()

    def answer(self) -> None:
        self._go_on.set()

    def read(self) -> None:
        assert self._go_on.wait(WITHIN_S)
        if self.is_cancelled:
            raise Cancelled("cancelled")


class FakeClient:
    """A `Client` that returns its input. A batch below 0 waits for the test."""

    made: ClassVar[list[FakeClient]] = []

    def __init__(self, address: Any, **options: Any) -> None:
        self.address = address
        self.options = options
        self.readers: list[Reader] = []
        self.scored: list[int] = []
        self.taken: list[int] = []
        self.timeouts_s: list[float | None] = []
        self.stream_options: list[dict[str, Any]] = []
        self.closed_streams = 0
        self.is_closed = False
        self.made.append(self)

    def close(self) -> None:
        self.is_closed = True

    def score(self, model: str, data: Any, *, timeout_s: float | None, **options: Any) -> Any:
        self.timeouts_s.append(timeout_s)
        if isinstance(data, Exception | type):
            raise data
        self.scored.append(number_of(data))
        self._open(number_of(data))
        return data

    def stream(self, model: str, batches: Iterable[Any], **options: Any) -> Iterator[Any]:
        self.timeouts_s.append(options["timeout_s"])
        self.stream_options.append(options)
        try:
            for each in batches:
                self.taken.append(number_of(each))
                self._open(number_of(each))
                yield each
        finally:
            self.closed_streams += 1

    def outcomes(self, model: str, batches: Iterable[Any], **options: Any) -> Iterator[Any]:
        for each in self.stream(model, batches, **options):
            yield QueueFull("full") if number_of(each) % 2 else each

    def _open(self, number: int) -> None:
        current = cancellation.current()
        assert current is not None
        current.require_none()
        if number < 0:
            self.readers.append(Reader())
            current.enter(self.readers[-1])
            self.readers[-1].read()


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test ends without a thread of the client."""
    monkeypatch.setattr(aio, "Client", FakeClient)
    before = set(threading.enumerate())
    yield
    assert [thread.name for thread in set(threading.enumerate()) - before] == []


def run(
    test: Callable[[AsyncClient, FakeClient], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S), AsyncClient("host:1", **options) as client:
            await test(client, FakeClient.made[-1])
        assert FakeClient.made[-1].is_closed

    asyncio.run(main())


async def until(predicate: Callable[[], Any]) -> None:
    while not predicate():
        await asyncio.sleep(0.001)


async def numbers(count: int) -> AsyncIterator[pa.RecordBatch]:
    for number in range(count):
        await asyncio.sleep(0)
        yield batch(number)


# ---- Calls


def test_options_are_those_of_the_client() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        assert fake.address == "host:1"
        assert fake.options == {"token": "secret", "timeout_s": 3.0}

    run(check, token="secret", timeout_s=3.0)


def test_each_caller_gets_its_own_result_or_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        data = [ContractError(str(n)) if n % 3 == 0 else batch(n) for n in range(60)]
        calls = (client.score("m", each) for each in data)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for number, (sent, result) in enumerate(zip(data, results, strict=True)):
            if isinstance(sent, ContractError):
                assert result is sent
            else:
                assert number_of(result) == number

    run(check)


def test_calls_above_the_limit_wait_in_order() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        calls = [asyncio.create_task(client.score("m", batch(-n))) for n in range(1, 6)]
        await until(lambda: len(fake.readers) == 2)
        assert sorted(fake.scored) == [-2, -1]
        for count in range(1, 6):
            while len(fake.readers) < count:
                await asyncio.sleep(0.001)
            fake.readers[count - 1].answer()
        assert [number_of(await call) for call in calls] == [-1, -2, -3, -4, -5]
        assert len([t for t in threading.enumerate() if t.name.startswith("iskander-call")]) == 2

    run(check, calls_max=2)


def test_cancelled_task_cancels_its_call_only() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        first = asyncio.create_task(client.score("m", batch(-1)))
        await until(lambda: len(fake.readers) == 1)
        second = asyncio.create_task(client.score("m", batch(-2)))
        await until(lambda: len(fake.readers) == 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert [reader.is_cancelled for reader in fake.readers] == [True, False]
        fake.readers[1].answer()
        assert number_of(await second) == -2
        assert number_of(await client.score("m", batch(3))) == 3

    run(check, calls_max=2)


def test_cancelled_waiting_call_sends_nothing() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        first = asyncio.create_task(client.score("m", batch(-1)))
        await until(lambda: fake.readers)
        waiting = asyncio.create_task(client.score("m", batch(7)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        fake.readers[0].answer()
        await first
        await client.score("m", batch(8))
        assert fake.scored == [-1, 8]

    run(check, calls_max=1)


@pytest.mark.parametrize("is_waiting", [False, True], ids=["sent", "waiting"])
def test_deadline_ends_a_call(is_waiting: bool) -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        blocker = asyncio.create_task(client.score("m", batch(-1)))
        await until(lambda: fake.readers)
        with pytest.raises(DeadlineExceeded):
            await client.score("m", batch(-2), timeout_s=0.02)
        assert fake.scored == ([-1] if is_waiting else [-1, -2])
        if not is_waiting:
            assert fake.readers[1].is_cancelled
        fake.readers[0].answer()
        await blocker

    run(check, calls_max=1 if is_waiting else 2)


def test_timeout_of_a_call_includes_its_wait_for_a_thread() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        blocker = asyncio.create_task(client.score("m", batch(-1)))
        await until(lambda: fake.readers)
        waiting = asyncio.create_task(client.score("m", batch(1), timeout_s=WITHIN_S))
        await asyncio.sleep(0.05)
        fake.readers[0].answer()
        await asyncio.gather(blocker, waiting)
        assert fake.timeouts_s[0] is None
        assert fake.timeouts_s[1] is not None
        assert fake.timeouts_s[1] <= WITHIN_S - 0.05

    run(check, calls_max=1)


def test_timeout_error_of_the_data_is_no_deadline() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        with pytest.raises(TimeoutError, match="disk"):
            await client.score("m", TimeoutError("disk"))

    run(check)


def test_stop_iteration_of_the_data_is_a_runtime_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await client.score("m", StopIteration())
        assert number_of(await client.score("m", batch(1))) == 1

    run(check)


def test_error_is_freed_without_a_garbage_collection() -> None:
    freed: list[Any] = []

    class Failure(Exception):
        def __init__(self) -> None:
            freed.append(weakref.ref(self))

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        with contextlib.suppress(Failure):
            await client.score("m", Failure)
        await client.score("m", batch(1))  # The thread holds nothing of the call before.
        assert [each() for each in freed] == [None]

    gc.disable()
    try:
        run(check, calls_max=1)
    finally:
        gc.enable()


def test_threads_start_when_calls_need_them() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        for number in range(5):
            await client.score("m", batch(number))
        assert len([t for t in threading.enumerate() if t.name == "iskander-call"]) == 1

    run(check)


def test_client_that_is_not_closed_ends_its_idle_threads() -> None:
    async def main() -> threading.Thread:
        client = AsyncClient("host:1")
        await client.score("m", batch(1))
        (thread,) = [t for t in threading.enumerate() if t.name == "iskander-call"]
        return thread

    thread = asyncio.run(main())
    gc.collect()
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_client_works_in_one_loop_after_another() -> None:
    client = AsyncClient("host:1")
    for number in range(2):
        assert number_of(asyncio.run(client.score("m", batch(number)))) == number
    asyncio.run(client.close())


# ---- Closing


def test_close_ends_running_and_waiting_calls_with_an_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        calls = [asyncio.create_task(client.score("m", batch(-n))) for n in (1, 2)]
        await until(lambda: fake.readers)
        await client.close()
        for call in calls:
            with pytest.raises(Cancelled, match="the client was closed"):
                await call
        assert fake.scored == [-1]
        with pytest.raises(Cancelled, match="the client is closed"):
            await client.score("m", batch(1))
        with pytest.raises(Cancelled, match="the client is closed"):
            await anext(client.stream("m", [batch(1)]))
        await client.close()

    run(check, calls_max=1)


@contextlib.contextmanager
def blocked_source() -> Iterator[tuple[Any, threading.Event]]:
    """Data whose first use blocks until the end of the context, and the event of that use."""
    is_used, go_on = threading.Event(), threading.Event()

    class Blocked:
        def __getitem__(self, name: str) -> Any:
            is_used.set()
            assert go_on.wait(WITHIN_S)
            raise Cancelled("late")

    try:
        yield Blocked(), is_used
    finally:
        go_on.set()


@pytest.mark.parametrize("calls_max", [1, 3])
def test_close_leaves_a_thread_that_does_not_end(
    calls_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job that ends the late thread must not end the one that closes the client."""
    monkeypatch.setattr(aio, "JOIN_S", 0.1)

    async def check() -> None:
        client = AsyncClient("host:1", calls_max=calls_max, timeout_s=0.0)
        fake = FakeClient.made[-1]
        with blocked_source() as (data, is_used):
            late = asyncio.create_task(client.score("m", data))
            await until(is_used.is_set)
            behind = asyncio.create_task(client.score("m", batch(-1)))
            await asyncio.sleep(0.01)
            await client.close()
            assert fake.is_closed
            for call in (late, behind):
                with pytest.raises(Cancelled, match="the client was closed"):
                    await call
            await client.close()
            threads = [t for t in threading.enumerate() if t.name == "iskander-call"]
            assert len(threads) == 1
        threads[0].join(WITHIN_S)

    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await check()

    asyncio.run(main())


def test_close_of_the_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio, "JOIN_S", 0.05)
    go_on = threading.Event()

    def close(_: FakeClient) -> None:
        assert go_on.wait(WITHIN_S)

    monkeypatch.setattr(FakeClient, "close", close)

    async def main() -> threading.Thread:
        client = AsyncClient("host:1")
        async with asyncio.timeout(WITHIN_S):
            await client.close()
        (thread,) = [t for t in threading.enumerate() if t.name == "iskander-call"]
        return thread

    thread = asyncio.run(main())
    go_on.set()
    thread.join(WITHIN_S)


def test_close_ends_open_streams_with_an_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", [batch(1), batch(-1)])
        assert number_of(await anext(results)) == 1
        pending = asyncio.ensure_future(anext(results))
        await until(lambda: fake.readers)
        await client.close()
        with pytest.raises(Cancelled, match="the client was closed"):
            await pending
        assert fake.readers[0].is_cancelled

    run(check)


# ---- Streams


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_stream_yields_the_results_in_order(is_async: bool) -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        items: Any = numbers(500) if is_async else map(batch, range(500))
        got = [number_of(each) async for each in client.stream("m", items, timeout_s=9.0)]
        assert got == list(range(500))
        assert 8.0 < fake.timeouts_s[0] <= 9.0

    run(check)


def test_outcomes_has_errors_in_place_of_results() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        outcomes = [each async for each in client.outcomes("m", map(batch, range(6)))]
        kinds = [isinstance(each, IskanderError) for each in outcomes]
        assert kinds == [False, True] * 3

    run(check)


def test_stream_of_a_slow_consumer_stays_within_its_bounds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio_stream, "RESULTS_MAX", 5)

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        produced: list[int] = []

        async def source() -> AsyncIterator[pa.RecordBatch]:
            for number in range(100):
                produced.append(number)
                yield batch(number)

        results = client.stream("m", source())
        await anext(results)
        await asyncio.sleep(0.1)
        # One returned, five stored, one that waits for space, and those that are read ahead.
        assert len(fake.taken) <= 1 + 5 + 1
        assert len(produced) <= len(fake.taken) + aio_stream.ITEMS_AHEAD + 1
        assert len([each async for each in results]) == 99

    run(check)


def test_large_results_wait_for_the_consumer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aio_stream, "RESULTS_BYTES", batch(0).nbytes)

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", map(batch, range(20)))
        await anext(results)
        await asyncio.sleep(0.1)
        assert len(fake.taken) <= 3
        assert len([each async for each in results]) == 19

    run(check)


def test_other_tasks_run_while_results_are_waiting() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticker = asyncio.create_task(tick())
        results = client.stream("m", map(batch, range(50)))
        await anext(results)
        await asyncio.sleep(0.05)  # All results are waiting.
        before = ticks
        assert len([each async for each in results]) == 49
        assert ticks - before >= 49
        ticker.cancel()

    run(check)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_error_of_the_iterable_is_raised_unchanged(is_async: bool) -> None:
    failure = KeyError("mine")

    async def fail_async() -> AsyncIterator[pa.RecordBatch]:
        yield batch(1)
        raise failure

    def fail() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise failure

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", fail_async() if is_async else fail())
        assert number_of(await anext(results)) == 1
        with pytest.raises(KeyError) as caught:
            await anext(results)
        assert caught.value is failure

    run(check)


@pytest.mark.parametrize("is_before_the_first", [False, True])
def test_cancelled_iterable_is_an_error_and_no_end(is_before_the_first: bool) -> None:
    """Results would be missing without an error."""

    async def source() -> AsyncIterator[pa.RecordBatch]:
        if not is_before_the_first:
            yield batch(0)
        inner = asyncio.get_running_loop().create_future()
        inner.cancel()
        await inner
        yield batch(1)

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        got = []
        with pytest.raises(Cancelled, match="the iterable of batches was cancelled"):
            async for each in client.stream("m", source()):
                got.append(number_of(each))
        assert got == ([] if is_before_the_first else [0])

    run(check)


def test_task_of_an_iterable_that_another_task_cancels_is_an_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        before = asyncio.all_tasks()
        results = client.stream("m", endless(asyncio.Event()))
        assert number_of(await anext(results)) == 0
        (reading,) = asyncio.all_tasks() - before
        reading.cancel()
        with pytest.raises(Cancelled, match="the iterable of batches was cancelled"):
            await asyncio.wait_for(drained(results), WITHIN_S)

    run(check)


async def drained(results: AsyncIterator[Any]) -> None:
    async for _ in results:
        pass


async def endless(has_ended: asyncio.Event) -> AsyncIterator[pa.RecordBatch]:
    """Never waits, so it is between two batches whenever its task is cancelled."""
    try:
        for number in itertools.count():
            yield batch(number)
    finally:
        has_ended.set()


def test_end_of_a_stream_closes_the_generator_of_its_batches() -> None:
    """Not only when the garbage collector finds it."""

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        has_ended = asyncio.Event()
        source = endless(has_ended)
        results = client.stream("m", source)
        await anext(results)
        await results.aclose()
        assert has_ended.is_set()
        assert await anext(source, None) is None

    run(check)


def test_error_of_a_sync_iterable_that_is_no_exception_is_raised() -> None:
    class Stop(BaseException):
        pass

    def source() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        raise Stop

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", source())
        await anext(results)
        with pytest.raises(Stop):
            await asyncio.wait_for(anext(results), WITHIN_S)

    run(check)


def test_cancelled_consumer_cancels_the_call_and_ends_the_iterable() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        ended = asyncio.Event()

        async def source() -> AsyncIterator[pa.RecordBatch]:
            try:
                yield batch(-1)
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def consume() -> None:
            async for _ in client.stream("m", source()):
                raise AssertionError

        task = asyncio.create_task(consume())
        await until(lambda: fake.readers)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fake.readers[0].is_cancelled
        assert fake.closed_streams == 1
        assert ended.is_set()

    run(check)


def test_stream_that_waits_for_its_iterable_is_cancelled() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        async def source() -> AsyncIterator[pa.RecordBatch]:
            yield batch(1)
            await asyncio.Event().wait()

        results = client.stream("m", source())
        assert number_of(await anext(results)) == 1
        await results.aclose()
        assert fake.closed_streams == 1

    run(check)


def test_consumer_that_stops_early_closes_the_stream() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        async with contextlib.aclosing(client.stream("m", map(batch, range(10_000)))) as results:
            async for each in results:
                if number_of(each) == 3:
                    break
        assert fake.closed_streams == 1
        assert len(fake.taken) < 10_000

    run(check)


def test_deadline_ends_a_stream_that_waits_for_its_iterable() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        async def source() -> AsyncIterator[pa.RecordBatch]:
            await asyncio.Event().wait()
            yield batch(1)

        with pytest.raises(DeadlineExceeded):
            await anext(client.stream("m", source(), timeout_s=0.02))

    run(check)


@pytest.mark.parametrize("kind", ["call", "stream"])
def test_deadline_is_the_reason_of_the_cancellation_that_it_causes(kind: str) -> None:
    """A gateway that did not answer in time may hang, and one whose caller is gone does not."""
    reasons: list[bool] = []

    class Watched(Reader):
        def read(self) -> None:
            try:
                super().read()
            finally:
                current = cancellation.current()
                assert current is not None
                reasons.append(current.has_expired)

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        await client.score("m", batch(1))
        for timeout_s in (0.5, None):
            if kind == "call":
                call = asyncio.ensure_future(client.score("m", batch(-1), timeout_s=timeout_s))
            else:
                stream = client.stream("m", [batch(-1)], timeout_s=timeout_s)
                call = asyncio.ensure_future(anext(stream))
            await until(lambda: len(fake.readers) == len(reasons) + 1)
            if timeout_s is None:
                call.cancel()
            with pytest.raises(asyncio.CancelledError if timeout_s is None else DeadlineExceeded):
                await call
            if kind == "stream":
                await stream.aclose()
            await until(lambda: len(reasons) == len(fake.readers))
        assert reasons == [True, False]

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "Reader", Watched)
        run(check)


def test_deadline_of_a_stream_begins_with_its_call() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", [batch(1)], timeout_s=0.02)
        await asyncio.sleep(0.05)
        with pytest.raises(DeadlineExceeded):
            await anext(results)
        assert fake.timeouts_s == []

    run(check)


def test_options_of_a_stream_are_those_of_the_client() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        given: Any = {"version": "2", "terms": {"priority": 1}, "resume": False}
        await drained(client.stream("m", [], **given))
        assert fake.stream_options == [given | {"timeout_s": None}]

    run(check)


def test_invalid_timeout_of_a_stream_is_an_error_of_its_call() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        with pytest.raises(ConfigError, match="timeout_s"):
            client.stream("m", [batch(1)], timeout_s=float("inf"))

    run(check)


def test_administrative_calls_are_those_of_the_client() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        fake.unload = lambda model, *, version=None: [model, version]  # type: ignore[attr-defined]
        assert await client.unload("m", version="3") == ["m", "3"]
        assert AsyncClient.unload.__doc__ == Client.unload.__doc__

    run(check)


def test_streams_above_the_limit_are_an_error() -> None:
    async def check(client: AsyncClient, fake: FakeClient) -> None:
        opened = [client.stream("m", map(batch, (1, -1))) for _ in range(OPENED)]
        for each in opened:
            await anext(each)
        with pytest.raises(LimitExceeded, match=r"4 streams are open, limit 4 \(`streams_max`\)"):
            await anext(client.stream("m", [batch(1)]))
        await opened.pop().aclose()
        assert len([each async for each in client.stream("m", [batch(1)])]) == 1
        for each in opened:
            await each.aclose()

    run(check, streams_max=OPENED)


def test_sync_iterable_that_blocks_delays_closing_by_its_limit_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aio_stream, "JOIN_S", 0.05)
    blocked, go_on = threading.Event(), threading.Event()

    def source() -> Iterator[pa.RecordBatch]:
        yield batch(1)
        blocked.set()
        assert go_on.wait(WITHIN_S)

    async def check(client: AsyncClient, fake: FakeClient) -> None:
        results = client.stream("m", source())
        await anext(results)
        await until(blocked.is_set)
        await results.aclose()
        assert fake.closed_streams == 0
        with pytest.raises(LimitExceeded):  # Its thread still counts.
            await anext(client.stream("m", [batch(1)]))
        go_on.set()
        await until(lambda: fake.closed_streams == 1)

    run(check, streams_max=1)
