"""Flight streams: order of their messages, their error, and their memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs
from support.http2 import Peer, settings, until, window_update
from support.input_arena import in_loop
from support.lanes import lane_of
from support.raw import field

from iskander.arrow import ipc
from iskander.config.schema import Config
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import Draining, IskanderError, LimitExceeded, Overloaded, Unauthenticated
from iskander.gateway.auth.source import Source
from iskander.gateway.protocols.flight.codec import StreamCodec
from iskander.gateway.protocols.flight.data import read_flight_data
from iskander.gateway.protocols.flight.exchange import DESCRIPTOR_BYTES_MAX, Exchange, RejectedBatch
from iskander.gateway.protocols.flight.fair_threads import THREADS_MAX
from iskander.gateway.protocols.flight.plan import Plan
from iskander.gateway.protocols.flight.plans import Plans
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

CONTRACT = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
    passthrough="all",
)


def exchange_of(call: Any, plans: Any = None, **parts: Any) -> Exchange:
    """A stream of a call, with the parts that its test reaches."""
    unused = {"entry": None, "find": None, "region": None, "models": None}
    dispatcher: Any = SimpleNamespace(tracer=None, uses_contexts=False)
    return Exchange(
        call,
        dispatcher=dispatcher,
        limits=Config().limits,
        plans=plans or new_plans(),
        **(unused | parts),
    )


def new_plans() -> Plans:
    return Plans(Config().limits, ReceiveBudget(1 << 30))


async def failed_stream() -> weakref.ref[Exchange]:
    """Returns a weak reference to a stream that ended with an error."""
    call = SimpleNamespace(
        metadata=(), deadline_ns=None, source=Source(), has_input=False, is_blocked=False
    )
    stream = exchange_of(call)
    asyncio.get_running_loop().call_soon(stream._end, LimitExceeded("too large"))
    try:
        await stream.run()
    except LimitExceeded:
        return weakref.ref(stream)
    raise AssertionError("the stream ended without its error")


def test_error_does_not_keep_its_stream_alive() -> None:
    """The traceback references the stream; as a cycle, both would wait for a garbage collection."""

    async def run_test() -> None:
        gc.collect()
        gc.disable()
        try:
            reference = await failed_stream()
            await asyncio.sleep(0)
            assert reference() is None
        finally:
            gc.enable()

    asyncio.run(run_test())


def test_cancelled_admission_does_not_keep_its_stream_alive() -> None:
    """The error of a cancelled task references its frames, and they the stream."""

    async def cancelled_stream() -> weakref.ref[Exchange]:
        call: Any = SimpleNamespace(
            metadata=(), deadline_ns=None, source=Source(), has_input=False, caller="client"
        )
        plans = new_plans()
        stream = exchange_of(call, plans)
        build = stream._build_plan(lane_of(0, contract=CONTRACT), b"")
        for _ in range(THREADS_MAX):
            await plans.threads.turn("other").__aenter__()
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(0)
        stream._admission = asyncio.create_task(build)
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return weakref.ref(stream)

    async def run_test() -> None:
        gc.collect()
        gc.disable()
        try:
            reference = await cancelled_stream()
            for _ in range(5):
                await asyncio.sleep(0)
            assert reference() is None
        finally:
            gc.enable()

    asyncio.run(run_test())


def test_admission_of_the_first_batch_is_awaited_after_a_new_plan() -> None:
    """Else the next batch is read before it, and gets its place in the order of results."""

    async def run_test() -> None:
        call: Any = SimpleNamespace(
            metadata=(), deadline_ns=None, source=Source(), has_input=False, caller="client"
        )

        async def build(*_: object) -> None:
            """A plan, which no code of this test reads."""

        stream: Any = exchange_of(call, SimpleNamespace(build=build))

        def read() -> None:
            stream._admission = admission

        admission = asyncio.create_task(asyncio.sleep(0))
        stream._begin, stream._read = (lambda plan: None), read
        await stream._build_plan(lane_of(0, contract=CONTRACT), b"header")
        assert stream._admission is admission
        await admission

    asyncio.run(run_test())


def test_error_of_a_batch_is_kept_when_the_client_half_closes_at_that_moment() -> None:
    """The end of the input arrives after the failure, and before the stream's task continues."""

    async def run_test() -> None:
        call: Any = SimpleNamespace(
            metadata=(), deadline_ns=None, source=Source(), has_input=False, is_blocked=False
        )
        stream = exchange_of(call)
        stream._codec = SimpleNamespace()  # type: ignore[assignment]

        def receive() -> None:
            call.has_input = False

        def fail_and_half_close() -> None:
            stream._append(RejectedBatch(LimitExceeded("too large")))
            stream._write()
            call.receive, call.has_input = receive, True
            call.on_input()

        asyncio.get_running_loop().call_soon(fail_and_half_close)
        with pytest.raises(LimitExceeded, match="too large"):
            await stream.run()

    asyncio.run(run_test())


@in_loop
async def test_messages_of_a_response_are_sent_before_the_next_response() -> None:
    """A message above the frame size is sent at once, and then the call is writable."""
    dictionary, result, next_result = bytes(20_000), b"result", b"next"
    assert await sent([dictionary, result], [next_result]) == [dictionary, result, next_result]


@in_loop
async def test_any_number_of_large_responses_is_sent() -> None:
    responses = [[bytes(17_000)] for _ in range(200)]
    assert await sent(*responses) == [response for (response,) in responses]


@pytest.mark.parametrize("cause", ["limits.bytes", "receive memory"])
@in_loop
async def test_error_of_a_dictionary_ends_a_stream_with_in_band_errors(cause: str) -> None:
    """It has no result to replace, and the batches after it would use the dictionary before it."""
    schema, *first = frames_of("a", "b")
    large = frames_of("a" * 2000, "b", compression=None if cause == "limits.bytes" else "zstd")
    frames: deque[bytes | None] = deque([*first, large[1], first[1], None])
    responses: list[bytes] = []

    def refuse(_: int) -> None:
        raise Overloaded("receive memory exhausted")

    call: Any = SimpleNamespace(
        metadata=(("iskander-errors", "in-band"),),
        deadline_ns=None,
        source=Source(),
        has_input=True,
        is_blocked=False,
        receive=frames.popleft,
        send=lambda *parts: responses.append(b"".join(parts)),
        charge_memory=refuse,
        release_memory=lambda _: None,
        caller=None,
    )
    stream = exchange_of(call, models=SimpleNamespace(revision=-1))
    stream.target.lane = lane_of(contract=CONTRACT)
    limits = structs.replace(Config().limits, bytes=1000 if cause == "limits.bytes" else 1 << 20)
    stream._codec = StreamCodec(
        Plan(bytes(read_flight_data(schema).header), CONTRACT, limits), limits
    )

    with pytest.raises(IskanderError, match=cause):
        await stream.run()

    kinds = [ipc.read_message(read_flight_data(each).header).kind for each in responses]
    assert kinds == [ipc.DICTIONARY_BATCH, ipc.RECORD_BATCH]


@in_loop
async def test_descriptor_is_limited() -> None:
    """A stream keeps its descriptor, to look the lane up again."""
    frames: deque[bytes | None] = deque([field(1, bytes(DESCRIPTOR_BYTES_MAX + 1)), None])
    call: Any = SimpleNamespace(
        metadata=(), deadline_ns=None, source=Source(), has_input=True, is_blocked=False,
        receive=frames.popleft, caller="caller",
    )  # fmt: skip
    stream = exchange_of(call, models=SimpleNamespace(revision=1))

    with pytest.raises(LimitExceeded, match=f"descriptor has {DESCRIPTOR_BYTES_MAX + 1} bytes"):
        await stream.run()


@pytest.mark.parametrize("ends_early", [False, True])
@in_loop
async def test_plan_is_built_on_a_thread_and_released_with_its_stream(ends_early: bool) -> None:
    """Also if the stream ends while it is built."""
    schema, *_ = frames_of("a")
    frames: deque[bytes | None] = deque([field(1, b"") + schema, None])
    sent_frames: list[Any] = []
    call: Any = SimpleNamespace(
        metadata=(), deadline_ns=None, source=Source(), has_input=True, is_blocked=False,
        receive=frames.popleft, send=lambda *parts: sent_frames.append(parts), caller="caller",
    )  # fmt: skip
    plans = new_plans()
    lane = SimpleNamespace(
        contract=CONTRACT, model=SimpleNamespace(key=1), require_worker=lambda: None
    )
    stream = exchange_of(call, plans, find=lambda *_: lane, models=SimpleNamespace(revision=1))
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(0)
    assert stream._codec is None and stream._admission is not None
    if ends_early:
        running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not plans.threads._waiting)

    assert len(sent_frames) == (0 if ends_early else 1)
    plans.configure(Config().limits)
    assert not plans.charged_bytes


@pytest.mark.parametrize(
    ("end_error", "expected"),
    [(Unauthenticated("revoked"), Unauthenticated), (None, Draining)],
)
@in_loop
async def test_split_batch_that_waits_for_memory_fails_with_the_reason_of_the_end(
    end_error: IskanderError | None, expected: type[IskanderError]
) -> None:
    call = SimpleNamespace(metadata=(), deadline_ns=None, source=Source(), is_blocked=False)

    async def wait_for_memory(*_: object) -> None:
        stream._end_error = end_error
        await asyncio.get_running_loop().create_future()

    entry = SimpleNamespace(enter=lambda _: False, enter_later=wait_for_memory)
    stream = exchange_of(call, entry=entry)
    failures: list[IskanderError] = []
    split: Any = SimpleNamespace(
        requests=[object()],
        error=None,
        held_bytes=0,
        fail=lambda _, error: failures.append(error),
    )
    task = asyncio.create_task(stream._admit_portions(split))
    await until(lambda: stream._unwritten)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [type(error) for error in failures] == [expected]


def frames_of(*values: str, compression: str | None = None) -> list[bytes]:
    """Returns the messages of a batch without rows: schema, dictionary, batch."""
    column = pa.DictionaryArray.from_arrays(pa.array([], pa.int8()), pa.array(values))
    batch = pa.record_batch({"x": pa.array([], pa.int64()), "d": column})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return [
        field(2, bytes(message.metadata)) + field(1000, bytes(message.body or b""))
        for message in pa.ipc.MessageReader.open_stream(sink.getvalue())
    ]


async def sent(*responses: list[bytes]) -> list[bytes]:
    """Returns the messages that a client receives if all responses are ready together."""
    peer = Peer()
    peer.feed(settings(window=1 << 24), window_update(0, 1 << 24))
    peer.open()
    (call,) = peer.calls.values()
    stream = exchange_of(call)
    stream._codec = SimpleNamespace(  # type: ignore[assignment]
        frames=lambda response: [(each,) for each in response],
        is_slow_to_render=lambda _: False,
    )
    running = asyncio.create_task(stream.run())
    await asyncio.sleep(0)
    for response in responses:
        batch = RejectedBatch(None)  # type: ignore[arg-type]
        batch.response = response  # type: ignore[assignment]
        stream._append(batch)
    stream._write_soon()
    await until(lambda: not stream._unwritten)
    running.cancel()
    return peer.answer().messages
