"""Requests/s and CPU of the Python client, next to calls that are written by hand.

    python -m benchmarks.client_calls [--seconds 2] [--rounds 5]

Each way scores with the model of the quickstart, in a process of its own, in alternating rounds
against one gateway with one worker. Batches of 128 rows:

- one caller, one call at a time: `pyarrow.flight` by hand, and `Client.score`
- 64 requests in progress: four threads with one `Client`; `AsyncClient` on one loop; and grpc.aio
  with messages that were encoded before and results that are not decoded, which is an upper bound
  of a client on grpc.aio

A table of a million rows: `Client.score`, and `Client.stream` of the batches that it would send.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from iskander.lake.run.server import private_server

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "configs" / "models" / "movielens-two-tower" / "1"
NAME = "movielens-two-tower"
ROWS = 128
IN_PROGRESS = 64
THREADS = 4
TABLE_ROWS = 1_000_000


def batch_of_ids() -> pa.RecordBatch:
    """Random users and items."""
    random = np.random.default_rng(7)
    columns = {"user_id": random.integers(1, 610, ROWS), "item_id": random.integers(1, 9724, ROWS)}
    return pa.record_batch(columns)


def by_hand(address: str, seconds: float) -> int:
    """Open a stream for each batch with `pyarrow.flight`."""
    from pyarrow import flight

    batch = batch_of_ids()
    descriptor = flight.FlightDescriptor.for_path(NAME)
    with flight.connect(location_of(address)) as client:

        def call() -> None:
            writer, reader = client.do_exchange(descriptor)
            with writer:
                writer.begin(batch.schema)
                writer.write_batch(batch)
                writer.done_writing()
                assert reader.read_chunk().data.num_rows == ROWS

        return repeated(call, seconds)


def score(address: str, seconds: float) -> int:
    """Call `Client.score`."""
    from iskander.client import Client

    batch = batch_of_ids()
    with Client(address) as client:

        def call() -> None:
            assert client.score(NAME, batch).num_rows == ROWS

        return repeated(call, seconds)


def threads(address: str, seconds: float) -> int:
    """Call `Client.score` in four threads."""
    from iskander.client import Client

    batch = batch_of_ids()
    counts: list[int] = []
    with Client(address) as client:

        def call() -> None:
            assert client.score(NAME, batch).num_rows == ROWS

        callers = [
            threading.Thread(target=lambda: counts.append(repeated(call, seconds)))
            for _ in range(THREADS)
        ]
        for each in callers:
            each.start()
        for each in callers:
            each.join()
    return sum(counts)


def async_client(address: str, seconds: float) -> int:
    """Call `AsyncClient.score` in 64 tasks."""
    from iskander.client import AsyncClient

    batch = batch_of_ids()

    async def main() -> int:
        async with AsyncClient(address) as client:

            async def call() -> None:
                assert (await client.score(NAME, batch)).num_rows == ROWS

            return await repeated_tasks(call, seconds)

    return asyncio.run(main())


def grpc_aio(address: str, seconds: float) -> int:
    """Send encoded messages with grpc.aio in 64 tasks, without decoding the results."""
    import grpc  # type: ignore[import-untyped]

    from iskander._generated import flight_pb2

    batch = batch_of_ids()
    kind = flight_pb2.FlightDescriptor
    messages = []
    for raw in (batch.schema.serialize().to_pybytes(), batch.serialize().to_pybytes()):
        # A continuation marker, the size of the metadata, the metadata, and the body.
        end = 8 + int.from_bytes(raw[4:8], "little")
        messages.append(flight_pb2.FlightData(data_header=raw[8:end], data_body=raw[end:]))
    messages[0].flight_descriptor.CopyFrom(kind(type=kind.PATH, path=[NAME]))
    encoded = [each.SerializeToString() for each in messages]

    async def main() -> int:
        async with grpc.aio.insecure_channel(address) as channel:
            exchange = channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange")

            async def call() -> None:
                # Schema and batch.
                assert len([each async for each in exchange(iter(encoded))]) >= 2

            return await repeated_tasks(call, seconds)

    return asyncio.run(main())


def table_of_ids() -> pa.Table:
    """Random users and items."""
    random = np.random.default_rng(7)
    users, items = random.integers(1, 610, TABLE_ROWS), random.integers(1, 9724, TABLE_ROWS)
    return pa.table({"user_id": users, "item_id": items})


def score_table(address: str, seconds: float) -> int:
    """Score a table of a million rows."""
    from iskander.client import Client

    table = table_of_ids()
    with Client(address) as client:

        def call() -> None:
            assert client.score(NAME, table).num_rows == TABLE_ROWS

        return repeated(call, seconds)


def stream_table(address: str, seconds: float) -> int:
    """Stream the batches of a million rows."""
    from iskander.client import Client
    from iskander.client.slicing import cut_and_join

    table = table_of_ids()
    with Client(address) as client:
        limits = client.model(NAME).description.limits
        batches = list(
            cut_and_join(
                table.to_batches(),
                rows_max=limits["rows"],
                bytes_max=limits["bytes"],
                string_bytes_max=limits["string_bytes"],
            )
        )

        def call() -> None:
            assert sum(each.num_rows for each in client.stream(NAME, batches)) == TABLE_ROWS

        return repeated(call, seconds)


WAYS: dict[str, Callable[[str, float], int]] = {
    "by hand": by_hand,
    "Client.score": score,
    "four threads": threads,
    "AsyncClient": async_client,
    "grpc.aio, no Arrow": grpc_aio,
    "stream of a million": stream_table,
    "score of a million": score_table,
}


def location_of(address: str) -> str:
    """Address for `pyarrow.flight`."""
    return f"grpc+{address}" if address.startswith("unix:") else f"grpc://{address}"


def repeated(call: Callable[[], None], seconds: float) -> int:
    """Call until the time is over; return the number of calls."""
    end = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end:
        call()
        count += 1
    return count


async def repeated_tasks(call: Callable[[], object], seconds: float) -> int:
    """Call in 64 tasks until the time is over; return the number of calls."""
    end = time.perf_counter() + seconds
    counts = [0] * IN_PROGRESS

    async def caller(index: int) -> None:
        while time.perf_counter() < end:
            await call()  # type: ignore[misc]
            counts[index] += 1

    await asyncio.gather(*(caller(index) for index in range(IN_PROGRESS)))
    return sum(counts)


def measure(way: str, address: str, seconds: float) -> tuple[float, float]:
    """Measure one way in this process: requests/s, and CPU of the client in us for each request."""
    WAYS[way](address, min(0.3, seconds))
    cpu_s, begun = time.process_time(), time.perf_counter()
    count = WAYS[way](address, seconds)
    passed, used = time.perf_counter() - begun, time.process_time() - cpu_s
    return count / passed, used / count * 1e6


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.address, arguments.seconds)))
        return
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with private_server(str(MODEL)) as server:
        for _ in range(arguments.rounds):
            for way, runs in measured.items():
                command = [sys.executable, "-m", "benchmarks.client_calls", "--way", way]
                command += ["--address", server.address, "--seconds", str(arguments.seconds)]
                done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
                runs.append(tuple(json.loads(done.stdout)))
    for way, runs in measured.items():
        rate, cpu_us = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{way:<20} {rate:>8,.0f} requests/s  {cpu_us:>6.0f} us CPU of the client")
    extra = [
        own[1] - other[1]
        for own, other in zip(measured["Client.score"], measured["by hand"], strict=True)
    ]
    print(f"Client.score above by hand: median {statistics.median(extra):.0f} us")
    times = [
        other[0] / own[0]
        for own, other in zip(
            measured["score of a million"], measured["stream of a million"], strict=True
        )
    ]
    print(f"score of a million in the time of its stream: median {statistics.median(times):.2f}")
    for way in ("AsyncClient", "grpc.aio, no Arrow"):
        shares = [
            own[0] / other[0]
            for own, other in zip(measured[way], measured["four threads"], strict=True)
        ]
        print(f"{way} in four threads' requests/s: median {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
