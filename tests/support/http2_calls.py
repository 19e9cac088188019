"""Calls, handlers and frames of tests of HTTP/2 connections."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from iskander.config.schema import TimeoutsConfig
from iskander.gateway.transport.http2.call import Call
from iskander.gateway.transport.http2.status import RpcError
from support.http2 import (
    Peer,
)

TIMEOUTS = TimeoutsConfig()
WINDOW_DEFAULT = 65_535
FRAME_DEFAULT = 16_384
MIB = 1 << 20


async def echo(call: Call) -> None:
    while (raw := await call.read()) is not None:
        await call.write(raw)


class Reader:
    """Handler that records the messages of its call, and their end.

    Attributes:
        messages: Messages read.
        has_ended: Whether the end of the input was read.
        error: Error of the last read.
    """

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.has_ended = False
        self.error: RpcError | None = None

    async def __call__(self, call: Call) -> None:
        try:
            while (raw := await call.read()) is not None:
                self.messages.append(bytes(raw))
        except RpcError as error:
            self.error = error
            raise
        self.has_ended = True


def writer(*messages: bytes) -> Callable[[Call], asyncio.Future[None]]:
    """Returns a handler that writes messages without reading."""

    async def write(call: Call) -> None:
        for each in messages:
            await call.write(each)

    return write  # type: ignore[return-value]


def calls_in_memory(peer: Peer) -> list[Call]:
    """Returns the calls of a connection that are not garbage-collected."""
    gc.collect()
    calls = [each for each in gc.get_objects() if type(each) is Call]
    return [call for call in calls if call._streams is peer.connection.streams]


def blocked_calls(peer: Peer) -> int:
    """Returns the number of calls with bytes to send and no window."""
    return len(peer.connection.output._blocked)


async def wait(call: Call) -> None:
    await call.read()
