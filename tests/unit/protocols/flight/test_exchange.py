"""Flight streams: order of their messages, their error, and their memory."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from support.http2 import Peer, settings, until, window_update
from support.input_arena import in_loop

from iskander.auth.source import Source
from iskander.config.schema import Config
from iskander.errors import LimitExceeded
from iskander.protocols.flight.exchange import Exchange, RejectedBatch


def exchange_of(call: Any) -> Exchange:
    unused: Any = None
    return Exchange(
        call,
        input_arena=unused,
        dispatcher=SimpleNamespace(tracer=None, uses_contexts=False),  # type: ignore[arg-type]
        limits=Config().limits,
        find=unused,
        region=unused,
        plan=unused,
        models=unused,
    )


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


async def sent(*responses: list[bytes]) -> list[bytes]:
    """Returns the messages that a client receives if all responses are ready together."""
    peer = Peer()
    peer.feed(settings(window=1 << 24), window_update(0, 1 << 24))
    peer.open()
    (call,) = peer.calls.values()
    stream = exchange_of(call)
    stream._codec = SimpleNamespace(  # type: ignore[assignment]
        frames=lambda response: [(each,) for each in response]
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
