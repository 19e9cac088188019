"""A request submitter with an input arena and a scripted dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from iskander.clock import now_ns
from iskander.config.schema import LimitsConfig
from iskander.memory.arena import GRAIN_BYTES
from iskander.protocols.submit import RequestSubmitter
from iskander.protocols.tensors import RequestTensors, Tensor, read_inputs
from iskander.scheduling.dispatch import Dispatcher
from iskander.scheduling.input_arena import InputArena
from iskander.scheduling.lane import Lane
from iskander.scheduling.request import Request
from support.intake import CONTRACT, open_lane, turns

LIMITS = LimitsConfig(streams=2)
ARENA_BYTES = 4 * GRAIN_BYTES


class PlayedDispatcher(Dispatcher):
    """Accepts requests, and responds as the test scripts it."""

    def __init__(self, intake: InputArena) -> None:
        self.intake = intake
        self.asked: list[Request] = []
        self.withdrawn: list[Request] = []

    def submit(self, request: Request) -> None:
        request.lane.put(request, now_ns())
        self.asked.append(request)

    def withdraw(self, request: Request) -> None:
        self.withdrawn.append(request)
        if request.lease is not None:
            self.intake.give_back(request)

    def answer(self, request: Request, output: bytes) -> None:
        self.intake.give_back(request)
        request.is_over = True
        request.caller.deliver(request, output)


class Office:
    """A request submitter with its arena, dispatcher and lane."""

    def __init__(self) -> None:
        self.intake = InputArena(ARENA_BYTES, LimitsConfig())
        self.dispatcher = PlayedDispatcher(self.intake)
        self.desk = RequestSubmitter(self.intake, self.dispatcher, LIMITS)
        self.lane: Lane = open_lane()

    def ask(self, rows: int = 4, **terms: object) -> asyncio.Task[bytes | memoryview]:
        return asyncio.create_task(self.desk.ask(self.lane, offered(rows), **terms))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def office() -> AsyncIterator[Office]:
    made = Office()
    try:
        yield made
        await turns()
        assert not made.desk.calls
        assert made.intake.arena.leased_bytes == 0
    finally:
        made.intake.close()


def offered(rows: int) -> RequestTensors:
    ids = memoryview(np.arange(rows).tobytes())
    flags = memoryview(bytes(rows))
    tensors = [Tensor("id", "INT64", (rows,), ids), Tensor("flag", "BOOL", (rows,), flags)]
    return read_inputs(CONTRACT, tensors, LimitsConfig())
