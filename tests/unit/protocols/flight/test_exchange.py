"""A Flight stream's end: what is kept of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

from iskander.auth.source import Source
from iskander.config.schema import Config
from iskander.errors import LimitExceeded
from iskander.protocols.flight.exchange import Exchange


def exchange(call: Any) -> Exchange:
    unused: Any = None
    return Exchange(
        call,
        input_arena=unused,
        dispatcher=unused,
        limits=Config().limits,
        find=unused,
        region=unused,
        plan=unused,
        models=unused,
    )


async def ended() -> weakref.ref[Exchange]:
    """A stream that ended with an error, which nothing here keeps."""
    call = SimpleNamespace(
        metadata=(), deadline_ns=None, source=Source(), has_input=False, is_blocked=False
    )
    stream = exchange(call)
    asyncio.get_running_loop().call_soon(stream._end, LimitExceeded("too large"))
    try:
        await stream.run()
    except LimitExceeded:
        return weakref.ref(stream)
    raise AssertionError("the stream ended without its error")


def test_the_error_that_ended_a_stream_does_not_keep_the_stream() -> None:
    """Its traceback has the stream's frames: kept there, both wait for a garbage collection."""

    async def play() -> None:
        gc.collect()
        gc.disable()
        try:
            left = await ended()
            await asyncio.sleep(0)
            assert left() is None
        finally:
            gc.enable()

    asyncio.run(play())
