"""Client for asyncio with a real server: order, errors, cancellation, and a free loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually, running

from iskander.client import AsyncClient, Client
from iskander.client.calls.cancellation import Cancellation
from iskander.errors import Cancelled, ContractError, DeadlineExceeded, IskanderError, ModelNotFound

WITHIN_S = 60.0
UNITS = 100_000
"""Input of `slow` that runs for longer than a test."""
LARGE_ROWS = 4_000_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("client-aio")
    served: list[dict[str, Any]] = [
        {"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1},
        {"name": "slow", "path": str(models.slow(folder / "slow", 100)), "intra_threads": 1},
    ]
    with running(folder, served, workers={"groups": ["0"]}) as ready:
        yield ready


@pytest.fixture(autouse=True)
def idle(gateway: Gateway) -> Iterator[None]:
    """Every test leaves an idle server, and no thread of the client."""
    before = set(threading.enumerate())
    yield
    gateway.wait_idle()
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("iskander")] == []


def run(
    gateway: Gateway, test: Callable[[AsyncClient], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S), AsyncClient(gateway.address, **options) as client:
            await test(client)

    asyncio.run(main())


def batch(first: int, rows: int = 128) -> pa.RecordBatch:
    return pa.record_batch({"x": np.arange(first, first + rows)})


def is_right(result: pa.RecordBatch, first: int, rows: int = 128) -> bool:
    return bool(result["y"].to_pylist() == (3 * np.arange(first, first + rows) + 1).tolist())


def withdrawn(gateway: Gateway) -> int:
    return int(gateway.stats()["lanes"]["slow/1"].get("withdrawn", 0))


def is_computing(gateway: Gateway) -> bool:
    return any(worker["in_flight"] for worker in gateway.stats()["workers"])


async def until(predicate: Callable[..., Any], *arguments: Any) -> None:
    """Wait for a fact of the server, without blocking the loop."""
    await asyncio.to_thread(eventually, lambda: predicate(*arguments))


async def batches(count: int) -> AsyncIterator[pa.RecordBatch]:
    for number in range(count):
        await asyncio.sleep(0)
        yield batch(number)


def test_all_calls_have_the_answers_of_the_client(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        assert (await client.health())["ready"]
        assert {entry["name"] for entry in await client.models()} == {"ids", "slow"}
        assert "ids/1" in (await client.stats())["lanes"]
        model = await client.model("ids")
        assert model.versions == ("1",)
        assert is_right(await model.score(batch(5)), 5)
        assert [is_right(each, 0) async for each in model.stream([batch(0)])] == [True]
        for call in (client.load("absent"), client.unload("absent"), client.model("absent")):
            with pytest.raises(IskanderError):
                await call

    run(gateway, check)


def test_table_of_many_batches_is_scored_in_order(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        scored = await client.score("ids", pa.table({"x": np.arange(300_000)}))
        assert scored["y"].to_numpy().tolist() == (3 * np.arange(300_000) + 1).tolist()
        assert (await client.score("ids", {"x": np.arange(3)}))["y"].tolist() == [1, 4, 7]

    run(gateway, check)


def test_each_of_many_concurrent_calls_gets_its_own_result_or_error(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        async def call(number: int) -> bool:
            if number % 8 == 3:
                with pytest.raises(ContractError):
                    await client.score("ids", pa.record_batch({"z": [number]}))
                return True
            if number % 8 == 5:
                with pytest.raises(ModelNotFound):
                    await client.score("absent", batch(number))
                return True
            return is_right(await client.score("ids", batch(number)), number)

        async def caller(first: int) -> list[bool]:
            return [await call(first + 64 * turn) for turn in range(10)]

        answers = await asyncio.gather(*map(caller, range(64)))
        assert all(all(each) for each in answers)

    run(gateway, check)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_stream_yields_results_in_order(gateway: Gateway, is_async: bool) -> None:
    async def check(client: AsyncClient) -> None:
        sent: Any = batches(400) if is_async else map(batch, range(400))
        results = [each async for each in client.stream("ids", sent)]
        assert len(results) == 400
        assert all(is_right(each, number) for number, each in enumerate(results))

    run(gateway, check)


def test_concurrent_streams_have_their_own_results(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        async def read(first: int) -> bool:
            sent = (batch(first + number) for number in range(30))
            results = [each async for each in client.stream("ids", sent)]
            return len(results) == 30 and all(
                is_right(each, first + number) for number, each in enumerate(results)
            )

        assert all(await asyncio.gather(*(read(1000 * number) for number in range(8))))

    run(gateway, check)


def test_next_batch_may_depend_on_the_result_before(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        values: asyncio.Queue[int] = asyncio.Queue()

        async def source() -> AsyncIterator[pa.RecordBatch]:
            for _ in range(5):
                yield pa.record_batch({"x": [await values.get()]})

        got = []
        values.put_nowait(1)
        async for result in client.stream("ids", source()):
            got.append(result["y"][0].as_py())
            values.put_nowait(got[-1])
        assert got == [4, 13, 40, 121, 364]

    run(gateway, check)


def test_outcomes_has_errors_of_batches_in_their_places(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        items = [(batch(n), {"deadline_ms": 0} if n % 3 == 0 else {}) for n in range(30)]
        outcomes = [each async for each in client.outcomes("ids", items)]
        for number, outcome in enumerate(outcomes):
            if number % 3 == 0:
                assert isinstance(outcome, IskanderError)
            else:
                assert is_right(outcome, number)

    run(gateway, check)


def test_error_of_a_stream_is_raised(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        with pytest.raises(ModelNotFound):
            await anext(client.stream("absent", batches(3)))

    run(gateway, check)


# ---- Cancellation


@pytest.mark.parametrize("kind", ["batch", "table", "stream"])
def test_cancelled_task_withdraws_its_request_and_ends_its_run(gateway: Gateway, kind: str) -> None:
    before = withdrawn(gateway)
    slow = pa.record_batch({"x": [UNITS]})

    async def check(client: AsyncClient) -> None:
        async def call() -> None:
            if kind == "stream":
                async for _ in client.stream("slow", [slow]):
                    raise AssertionError
            elif kind == "table":
                await client.score("slow", pa.Table.from_batches([slow]))
            else:
                await client.score("slow", slow)

        task = asyncio.create_task(call())
        await until(is_computing, gateway)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: withdrawn(gateway) == before + 1)
        await until(lambda: not is_computing(gateway))
        assert is_right(await client.score("ids", batch(1)), 1)

    run(gateway, check)


def test_cancelled_waiting_call_reaches_no_server(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        before = gateway.stats()["lanes"]["ids/1"].get("requests", 0)
        running_call = asyncio.create_task(client.score("slow", pa.record_batch({"x": [UNITS]})))
        await until(is_computing, gateway)
        waiting = asyncio.create_task(client.score("ids", batch(1)))
        await asyncio.sleep(0.05)
        for task in (waiting, running_call):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: not is_computing(gateway))
        assert gateway.stats()["lanes"]["ids/1"].get("requests", 0) == before

    run(gateway, check, calls_max=1)


def test_cancelled_call_opens_no_other_call(gateway: Gateway) -> None:
    with Client(gateway.address) as client, Cancellation() as cancellation:
        client.model("ids")
        cancellation.cancel()
        with pytest.raises(Cancelled):
            client.score("ids", batch(1))


def test_deadline_withdraws_the_request(gateway: Gateway) -> None:
    before = withdrawn(gateway)

    async def check(client: AsyncClient) -> None:
        await client.model("slow")
        with pytest.raises(DeadlineExceeded):
            await client.score("slow", pa.record_batch({"x": [UNITS]}), timeout_s=0.5)
        await until(lambda: withdrawn(gateway) == before + 1)

    run(gateway, check)


def test_close_ends_calls_and_streams(gateway: Gateway) -> None:
    async def check(client: AsyncClient) -> None:
        slow = pa.record_batch({"x": [UNITS]})
        call = asyncio.create_task(client.score("slow", slow))
        stream = asyncio.ensure_future(anext(client.stream("slow", [slow])))
        await until(lambda: gateway.stats()["streams"] == 2)
        await client.close()
        for task in (call, stream):
            with pytest.raises(Cancelled, match="the client was closed"):
                await task

    run(gateway, check)


def test_calls_cancelled_at_any_time_leave_the_others_alone(gateway: Gateway) -> None:
    random = np.random.default_rng(3)

    async def check(client: AsyncClient) -> None:
        await client.model("ids")

        async def cancelled(number: int) -> None:
            async def read() -> None:
                if number % 2:
                    await client.score("ids", batch(number))
                else:
                    async for _ in client.stream("ids", batches(20)):
                        pass

            task = asyncio.create_task(read())
            await asyncio.sleep(random.uniform(0, 0.02))
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None

        async def caller(number: int) -> None:
            for turn in range(20):
                if number % 2:
                    await cancelled(number // 2 + turn)
                else:
                    assert is_right(await client.score("ids", batch(number)), number)

        await asyncio.gather(*map(caller, range(32)))

    run(gateway, check)


# ---- Loop


@pytest.mark.slow
def test_loop_runs_other_tasks_while_large_tables_are_scored(gateway: Gateway) -> None:
    """Compared with a loop that waits for the tables, which runs them once for each table."""
    count = 5

    async def check(client: AsyncClient) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        ticker = asyncio.create_task(tick())
        table = pa.table({"x": np.arange(LARGE_ROWS)})
        with Client(gateway.address) as blocking:
            before = ticks
            for _ in range(count):
                blocking.score("ids", table)
                await asyncio.sleep(0)
            blocked = ticks - before
        before = ticks
        for _ in range(count):
            assert (await client.score("ids", table)).num_rows == LARGE_ROWS
        assert ticks - before >= 4 * max(blocked, count)
        ticker.cancel()

    run(gateway, check)
