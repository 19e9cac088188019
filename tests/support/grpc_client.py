"""Scenarios of grpcio's clients, sync and aio, in their own process.

grpcio and pyarrow.flight must not share a process; pyarrow alone is safe.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import queue
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import numpy as np
import pyarrow as pa
from grpc import aio

sys.path.insert(0, str(Path(__file__).parent.parent))
from support import raw, reference_client
from support.reference_client import TIMEOUT_S, Facts

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
WIDTH = 256
ALONE = ("grpc.use_local_subchannel_pool", 1)
"""Without it grpcio's channels to one address share a connection."""
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ALONE]
COMPRESSIONS = {"gzip": grpc.Compression.Gzip, "deflate": grpc.Compression.Deflate}

Options: TypeAlias = list[tuple[str, Any]]


class ReferenceClient(reference_client.ReferenceClient):
    """The reference's process, from the test's view."""

    def __init__(self) -> None:
        super().__init__(__file__)


def ids_batch(start: int, rows: int) -> pa.RecordBatch:
    return pa.record_batch({"x": np.arange(start, start + rows)})


def wide_batch(rows: int) -> pa.RecordBatch:
    """1 KiB a row."""
    values = pa.array(np.random.default_rng(rows).normal(size=rows * WIDTH).astype(np.float32))
    return pa.record_batch({"x": pa.FixedSizeListArray.from_arrays(values, WIDTH)})


def opening(model: str, batch: pa.RecordBatch) -> bytes:
    return raw.descriptor(model) + raw.schema_data(batch.schema)


def is_tripled(frame: bytes, schema_frame: bytes, sent: pa.RecordBatch) -> bool:
    ((got,), _) = raw.read_batches([schema_frame, frame])
    return bool((got["y"].to_numpy() == 3 * sent["x"].to_numpy() + 1).all())


def unary(address: str) -> Facts:
    """Health check by the sync client and by the aio client."""

    async def by_aio() -> Facts:
        async with aio.insecure_channel(address, options=[ALONE]) as channel:
            call = channel.unary_unary(CHECK)(b"", timeout=TIMEOUT_S)
            return [(await call).hex(), (await call.code()).name]

    with grpc.insecure_channel(address, options=[ALONE]) as channel:
        answer, call = channel.unary_unary(CHECK).with_call(b"", timeout=TIMEOUT_S)
    return {"sync": [answer.hex(), call.code().name], "aio": asyncio.run(by_aio())}


def watchers(address: str, count: int, rounds: int) -> Facts:
    """Open watches on one connection, and cancel them after the first response; repeat."""

    async def reference() -> Facts:
        async with aio.insecure_channel(address, options=[ALONE]) as channel:
            heard, codes = [], []
            for _ in range(rounds):
                calls = [channel.unary_stream(WATCH)(b"") for _ in range(count)]
                heard += [(await call.read()).hex() for call in calls]
                for call in calls:
                    call.cancel()
                codes += [(await call.code()).name for call in calls]
            return {"heard": Counter(heard), "codes": Counter(codes)}

    return asyncio.run(reference())


def interleaved(address: str, streams: int, batches: int) -> Facts:
    """Concurrent streams on one connection; each sends a batch after the last result."""

    async def reference() -> Facts:
        all_open = asyncio.Barrier(streams)
        async with aio.insecure_channel(address, options=[*UNLIMITED]) as channel:

            async def stream(number: int) -> Facts:
                call = channel.stream_stream(raw.EXCHANGE)(timeout=TIMEOUT_S)
                await call.write(opening("ids", ids_batch(0, 1)))
                schema = await call.read()
                await all_open.wait()
                right = 0
                for turn in range(batches):
                    sent = ids_batch(number << 32 | turn << 16, 1 + 97 * (number + turn) % 3000)
                    await call.write(raw.batch_data(sent))
                    right += is_tripled(await call.read(), schema, sent)
                await call.done_writing()
                assert await call.read() is aio.EOF
                return [right, (await call.code()).name]

            return await asyncio.gather(*map(stream, range(streams)))

    return asyncio.run(reference())


def large(
    address: str, rows: int, count: int, options: Options, is_awaiting_worker: bool = False
) -> Facts:
    """Echo batches of 1 KiB a row; the input ends at once, or after the last result."""
    sent = wide_batch(rows)
    is_back = threading.Event()

    def frames() -> Iterator[bytes]:
        yield opening("same", sent)
        frame = raw.batch_data(sent)
        for _ in range(count):
            yield frame
        if is_awaiting_worker:
            is_back.wait(TIMEOUT_S)

    received: list[bytes] = []
    with grpc.insecure_channel(address, options=[*UNLIMITED, *map(tuple, options)]) as channel:
        call = channel.stream_stream(raw.EXCHANGE)(frames(), timeout=TIMEOUT_S)
        with contextlib.suppress(grpc.RpcError):
            for frame in call:
                received.append(frame)
                if len(received) > count:
                    is_back.set()
        is_back.set()
        results = raw.read_batches(received)[0] if received else []
        return {
            "code": call.code().name,
            "details": call.details(),
            "right": sum(result["y"].equals(sent["x"]) for result in results),
        }


def compressed(address: str, kind: str) -> Facts:
    """A unary call and a stream with compressed messages; the large one spans many frames."""
    sent = ids_batch(7, 20_000)
    frames = [opening("ids", sent), raw.batch_data(sent)]
    with grpc.insecure_channel(
        address, options=UNLIMITED, compression=COMPRESSIONS[kind]
    ) as channel:
        name = raw.field(1, b"ids" + b"\0" * 1000)
        unknown = _outcome(channel, CHECK, [name])
        schema, result = channel.stream_stream(raw.EXCHANGE)(iter(frames), timeout=TIMEOUT_S)
    return {"unary": unknown["code"], "is_right": is_tripled(result, schema, sent)}


def deadline(address: str, model: str, units: int, timeout_s: float) -> Facts:
    """A batch that runs much longer than its call's timeout."""
    sent = ids_batch(units, 1)
    frames = [opening(model, sent), raw.batch_data(sent)]
    with grpc.insecure_channel(address, options=[ALONE]) as channel:
        return _outcome(channel, raw.EXCHANGE, frames, timeout=timeout_s)


def cancelled(address: str, count: int) -> Facts:
    """Streams on one connection, cancelled during a batch; then a complete one."""
    sent = ids_batch(3, 5)
    with grpc.insecure_channel(address, options=[ALONE]) as channel:
        codes = []
        for _ in range(count):
            done = threading.Event()
            call = channel.stream_stream(raw.EXCHANGE)(_kept_open(sent, done), timeout=TIMEOUT_S)
            next(call)
            call.cancel()
            done.set()
            codes.append(call.code().name)
        frames = [opening("ids", sent), raw.batch_data(sent)]
        after = _outcome(channel, raw.EXCHANGE, frames)
        return {"codes": Counter(codes), "after": after["code"]}


def outcome(
    address: str,
    method: str,
    frames: list[str],
    metadata: list[tuple[str, str]] = [],  # noqa: B006
) -> Facts:
    """One call by the sync client; values of `-bin` headers are base64."""
    said = [
        (name, base64.b64decode(value) if name.endswith("-bin") else value)
        for name, value in metadata
    ]
    with grpc.insecure_channel(address, options=[ALONE]) as channel:
        messages = [bytes.fromhex(frame) for frame in frames]
        first = _outcome(channel, method, messages, metadata=said)
        # The connection must still work.
        return first | {"next": _outcome(channel, CHECK, [b""])["code"]}


def unknown_by_aio(address: str, method: str) -> Facts:
    async def reference() -> Facts:
        async with aio.insecure_channel(address, options=[ALONE]) as channel:
            call = channel.unary_unary(method)(b"", timeout=TIMEOUT_S)
            return (await call.code()).name

    return asyncio.run(reference())


def keepalive(address: str, quiet_s: float) -> Facts:
    """State changes of a connection without calls that sends a ping every second.

    Reports after `quiet_s`; then returns the next state change.
    """
    options = [
        ALONE,
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 1000),
        ("grpc.http2.ping_timeout_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    states: queue.Queue[grpc.ChannelConnectivity] = queue.Queue()
    with grpc.insecure_channel(address, options=options) as channel:
        channel.subscribe(states.put, try_to_connect=True)
        while states.get(timeout=TIMEOUT_S) is not grpc.ChannelConnectivity.READY:
            pass
        assert _outcome(channel, CHECK, [b""])["code"] == "OK"
        meanwhile = []
        with contextlib.suppress(queue.Empty):
            meanwhile.append(states.get(timeout=quiet_s).name)
        code = _outcome(channel, CHECK, [b""])["code"]
        reference_client.send({"facts": {"meanwhile": meanwhile, "code": code}})
        return {"then": states.get(timeout=TIMEOUT_S).name}


def wait_for_ready(address: str) -> Facts:
    """Wait for a server that starts later."""
    with grpc.insecure_channel(
        address, options=[ALONE, ("grpc.max_reconnect_backoff_ms", 200)]
    ) as channel:
        impatient = _outcome(channel, CHECK, [b""], wait_for_ready=False)["code"]
        reference_client.send({"facts": {"impatient": impatient}})
        return _outcome(channel, CHECK, [b""], wait_for_ready=True)


def short_connections(address: str, count: int) -> Facts:
    """Connect, call, close; every other connection leaves a stream open."""
    codes: Counter[str] = Counter()
    for number in range(count):
        with grpc.insecure_channel(address, options=[ALONE]) as channel:
            if number % 2:
                watch = channel.unary_stream(WATCH)(b"", timeout=TIMEOUT_S)
                next(watch)
            codes[_outcome(channel, CHECK, [b""])["code"]] += 1
    return codes


def idle_streams(address: str, count: int, batches: int) -> Facts:
    """Idle streams, each on its own connection, while one is active; then all are active."""

    async def reference() -> Facts:
        async with contextlib.AsyncExitStack() as stack:
            sent = ids_batch(11, 100)
            calls = []
            for _ in range(count):
                channel = await stack.enter_async_context(
                    aio.insecure_channel(address, options=[ALONE])
                )
                call = channel.stream_stream(raw.EXCHANGE)(timeout=TIMEOUT_S)
                await call.write(opening("ids", sent))
                calls.append(call)
            schemas = await asyncio.gather(*(call.read() for call in calls))
            worked = 0
            for turn in range(batches):
                batch = ids_batch(turn, 1000)
                await calls[0].write(raw.batch_data(batch))
                worked += is_tripled(await calls[0].read(), schemas[0], batch)

            async def use(call: Any) -> str:
                await call.write(raw.batch_data(sent))
                assert is_tripled(await call.read(), schemas[0], sent)
                await call.done_writing()
                assert await call.read() is aio.EOF
                return (await call.code()).name

            codes = await asyncio.gather(*map(use, calls))
            return {"worked": worked, "codes": Counter(codes)}

    return asyncio.run(reference())


def hammer(address: str, connections: int, streams: int, rows: int) -> Facts:
    """Repeated streams and checks on persistent connections, until the server stops.

    Reports when each has a response. A call that fails with `draining` is repeated at once, until
    the server is unreachable.
    """
    outcomes: Counter[str] = Counter()
    wrong: list[str] = []
    latest: dict[threading.Thread, Any] = {}
    under_way = threading.Barrier(connections * (streams + 1) + 1)
    sent = wide_batch(rows)
    exchange = (raw.EXCHANGE, [opening("same", sent), *[raw.batch_data(sent)] * 3], 4)
    check = (CHECK, [b""], 1)

    def use(channel: grpc.Channel, method: str, frames: list[bytes], wanted: int) -> None:
        is_known = False
        while True:
            call = latest[threading.current_thread()] = _begin(channel, method, frames)
            found = _end(call)
            code, name = found["code"], found["trailers"].get("iskander-code", "")
            outcomes[f"{code} {name}".strip()] += 1
            if code == "OK" and found["frames"] != wanted:
                wrong.append(f"OK with {found['frames']} messages")
            if code not in ("OK", "UNAVAILABLE"):
                wrong.append(f"{code} {name} {found['details']}")
            if not is_known:
                under_way.wait(2 * TIMEOUT_S)
                is_known = True
            if code != "OK" and (code, name) != ("UNAVAILABLE", "draining"):
                return

    with contextlib.ExitStack() as stack:
        threads = []
        for _ in range(connections):
            channel = stack.enter_context(grpc.insecure_channel(address, options=UNLIMITED))
            for call in [exchange] * streams + [check]:
                thread = threading.Thread(target=use, args=(channel, *call), daemon=True)
                threads.append(thread)
                thread.start()
        try:
            under_way.wait(2 * TIMEOUT_S)
        except threading.BrokenBarrierError:
            raise AssertionError(f"a call hangs; so far {outcomes} {wrong}") from None
        reference_client.send({"facts": "under way"})
        for thread in threads:
            while thread.is_alive():
                call = latest[thread]
                thread.join(1.0)
                if thread.is_alive() and latest[thread] is call and not call.is_active():
                    # One call in ten thousand: grpcio 1.85 records the failed connection, and never
                    # notifies the reader.
                    outcomes[call.code().name] += 1
                    break
    return {"outcomes": outcomes, "wrong": wrong}


def _outcome(
    channel: grpc.Channel, method: str, frames: list[bytes], **options: Any
) -> dict[str, Any]:
    """One call and its outcome."""
    return _end(_begin(channel, method, frames, **options))


def _begin(channel: grpc.Channel, method: str, frames: list[bytes], **options: Any) -> Any:
    return channel.stream_stream(method)(iter(frames), **({"timeout": TIMEOUT_S} | options))


def _end(call: Any) -> dict[str, Any]:
    received = 0
    with contextlib.suppress(grpc.RpcError):
        for _ in call:
            received += 1
    trailers = {
        name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
        for name, value in call.trailing_metadata() or ()
    }
    return {
        "code": call.code().name,
        "details": call.details(),
        "frames": received,
        "trailers": trailers,
    }


def _kept_open(batch: pa.RecordBatch, done: threading.Event) -> Iterator[bytes]:
    yield opening("ids", batch)
    yield raw.batch_data(batch)
    done.wait(TIMEOUT_S)


if __name__ == "__main__":
    reference_client.serve(
        unary,
        watchers,
        interleaved,
        large,
        compressed,
        deadline,
        cancelled,
        outcome,
        unknown_by_aio,
        keepalive,
        wait_for_ready,
        short_connections,
        idle_streams,
        hammer,
    )
