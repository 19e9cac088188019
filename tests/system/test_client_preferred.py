"""Client with a preferred gateway, which is killed and started again under its calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support import models
from support.processes import Gateway, eventually

from iskander.client import AsyncClient, Client

THREADS = 4


def start(folder: Path, **server: Any) -> Gateway:
    """A gateway with its workers; `server` may name the address of an ended one."""
    folder.mkdir(exist_ok=True)
    served = [{"name": "ids", "path": str(models.row_ids(folder / "ids")), "intra_threads": 1}]
    return Gateway(
        folder,
        served,
        workers={"groups": ["0"], "reattach_s": 20.0},
        shared_memory={"path": str(folder / "memory")},
        server=server,
    ).start()


class Pair:
    """A preferred gateway on a unix socket, and another one."""

    def __init__(self, folder: Path) -> None:
        self.own = start(folder / "own", address=f"unix:{folder}/own.sock")
        self.other = start(folder / "other")
        self.options = {"address": self.other.address, "preferred": self.own.address}

    def kill(self) -> None:
        """Kill the preferred gateway."""
        self.own.signal(signal.SIGKILL)
        self.own.wait()

    def restart(self) -> None:
        """Start the preferred gateway again; it adopts the workers."""
        runtime = str(self.own.runtime)
        self.own = start(self.own.folder, address=self.own.address, runtime_directory=runtime)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    try:
        yield pair
    finally:
        pair.own.end()
        pair.other.end()


def requests(gateway: Gateway) -> int:
    return int(gateway.stats()["lanes"]["ids/1"].get("requests", 0))


def batch(first: int, rows: int = 100) -> pa.RecordBatch:
    return pa.record_batch({"x": np.arange(first, first + rows)})


def is_right(result: Any, first: int, rows: int = 100) -> bool:
    return bool(result["y"].to_pylist() == (3 * np.arange(first, first + rows) + 1).tolist())


class Load:
    """Calls of several threads, until the end of a block; `answers` has their outcomes."""

    def __init__(self, call: Callable[[int], bool]) -> None:
        self.answers: list[str] = []
        self._call = call
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index << 32,)) for index in range(THREADS)
        ]

    def _run(self, first: int) -> None:
        for number in itertools.count(first):
            if self._is_over.is_set():
                return
            try:
                self.answers.append("right" if self._call(number) else "WRONG")
            except Exception as error:
                self.answers.append(f"{type(error).__name__}: {error}")

    def __enter__(self) -> Load:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for each in self._threads:
            each.join(60)

    def goes_on(self, count: int) -> None:
        """Wait for further answers."""
        wanted = len(self.answers) + count
        eventually(lambda: len(self.answers) >= wanted, what="answers")


def require_away_and_back(pair: Pair, load: Load) -> None:
    """Kill and restart the preferred gateway under a load: the other one gets calls meanwhile."""
    before = requests(pair.other)
    load.goes_on(100)
    assert requests(pair.other) == before
    pair.kill()
    load.goes_on(100)
    assert requests(pair.other) > before
    pair.restart()
    eventually(lambda: requests(pair.own) > 20, what="requests at the new gateway")
    load.goes_on(2 * THREADS)  # Those that began before the return have ended.
    before = requests(pair.other)
    load.goes_on(100)
    assert requests(pair.other) == before


@pytest.mark.slow
def test_no_request_is_lost_and_the_preferred_gateway_is_used_again(pair: Pair) -> None:
    probes: list[int] = []
    with Client(**pair.options) as client:
        for target in client._targets._targets:
            connection = target.opened.connection
            connection.health = counted(connection.health, probes)
        with Load(lambda number: is_right(client.score("ids", batch(number)), number)) as load:
            require_away_and_back(pair, load)
    assert set(load.answers) == {"right"}
    assert probes and max(probes) == 1


def counted(probe: Callable[..., Any], running: list[int]) -> Callable[..., Any]:
    """Record how many probes run, the new one included."""
    now = itertools.count(), itertools.count()
    ended = [0]

    def health(timeout_s: float) -> Any:
        running.append(next(now[0]) + 1 - ended[0])
        try:
            return probe(timeout_s)
        finally:
            ended[0] = next(now[1]) + 1

    return health


@pytest.mark.slow
def test_no_request_of_an_async_client_is_lost(pair: Pair) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    client = AsyncClient(**pair.options)

    def call(number: int) -> bool:
        score = client.score("ids", batch(number))
        return is_right(asyncio.run_coroutine_threadsafe(score, loop).result(60), number)

    try:
        with Load(call) as load:
            require_away_and_back(pair, load)
    finally:
        asyncio.run_coroutine_threadsafe(client.close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
    assert set(load.answers) == {"right"}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [100, 20_000], ids=["small", "shared"])
def test_open_stream_leaves_the_preferred_gateway_and_returns(pair: Pair, rows: int) -> None:
    """Nothing is lost or returned twice, the order is kept, and the return sends nothing again."""
    taken, is_over = [0], threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        while not is_over.is_set():
            taken[0] += 1
            yield batch(taken[0] * rows, rows)

    def results(gateway: Gateway, count: int) -> None:
        """Read until a gateway has had a number of requests."""
        before = requests(gateway)
        while requests(gateway) < before + count:
            for _ in range(10):
                numbers.append(read())

    def read() -> int:
        number = len(numbers) + 1
        assert is_right(next(stream), number * rows, rows), number
        return number

    numbers: list[int] = []
    with Client(**pair.options) as client, contextlib.closing(client.stream("ids", batches())) as s:
        stream: Iterator[pa.RecordBatch] = s
        before = requests(pair.other)
        results(pair.own, 20)
        assert requests(pair.other) == before
        pair.kill()
        results(pair.other, 20)
        pair.restart()
        results(pair.own, 20)
        before = requests(pair.other)
        results(pair.own, 20)
        assert requests(pair.other) == before
        is_over.set()
        numbers.extend(len(numbers) + 1 for each in stream)
    assert len(numbers) == taken[0]
