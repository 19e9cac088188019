"""A request submitter with an input arena and a scripted dispatcher."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np

from iskander.config.schema import LimitsConfig
from iskander.foundation.clock import now_ns
from iskander.gateway.protocols.submit import RequestSubmitter
from iskander.gateway.protocols.tensors import RequestTensors, Tensor, read_inputs
from iskander.gateway.scheduling.dispatch import Dispatcher
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request
from iskander.interprocess.memory.arena import GRAIN_BYTES
from support.input_arena import CONTRACT, open_lane, turns

LIMITS = LimitsConfig(streams=2)
ARENA_BYTES = 4 * GRAIN_BYTES


class ScriptedDispatcher(Dispatcher):
    """Accepts requests, and responds as the test scripts it."""

    def __init__(self, input_arena: InputArena) -> None:
        self.input_arena = input_arena
        self.submitted: list[Request] = []
        self.withdrawn: list[Request] = []
        self.tracer = None
        self.observer = None

    def submit(self, request: Request, victims: list[Request]) -> None:
        request.lane.put(request, now_ns(), victims)
        self.submitted.append(request)

    def withdraw(self, request: Request) -> None:
        self.withdrawn.append(request)
        if request.lease is not None:
            self.input_arena.give_back(request)

    def answer(self, request: Request, output: bytes) -> None:
        self.input_arena.give_back(request)
        request.is_over = True
        request.caller.deliver(request, output)


class SubmitterHarness:
    """A request submitter with its arena, dispatcher and lane."""

    def __init__(self) -> None:
        self.input_arena = InputArena(ARENA_BYTES)
        self.dispatcher = ScriptedDispatcher(self.input_arena)
        self.entry = Entry(self.input_arena, self._queue, LimitsConfig())
        self.submitter = RequestSubmitter(self.entry, self.dispatcher, LIMITS)
        self.lane: Lane = open_lane()

    def _queue(self, request: Request, victims: list[Request]) -> None:
        self.dispatcher.submit(request, victims)

    def infer(self, rows: int = 4, **terms: object) -> asyncio.Task[bytes | memoryview]:
        return asyncio.create_task(self.submitter.infer(self.lane, offered(rows), **terms))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def submitter_harness() -> AsyncIterator[SubmitterHarness]:
    harness = SubmitterHarness()
    try:
        yield harness
        await turns()
        assert not harness.submitter.calls
        assert harness.input_arena.arena.leased_bytes == 0
    finally:
        harness.input_arena.close()


def offered(rows: int) -> RequestTensors:
    ids = memoryview(np.arange(rows).tobytes())
    flags = memoryview(bytes(rows))
    tensors = [Tensor("id", "INT64", (rows,), ids), Tensor("flag", "BOOL", (rows,), flags)]
    return read_inputs(CONTRACT, tensors, LimitsConfig())
