"""Requests for a small input arena, and event loop iterations."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable

from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import IskanderError
from iskander.foundation.clock import now_ns
from iskander.gateway.scheduling.entry import Entry
from iskander.gateway.scheduling.input_arena import InputArena
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.request import Request, Terms
from iskander.gateway.supervision.worker import SlotPlan, Worker
from iskander.interprocess.memory.arena import GRAIN_BYTES
from iskander.interprocess.memory.backing import ANY_MEMORY, BackingOptions
from support.lanes import lane_of, queue

QUEUE_REQUESTS = 64
GRAINS = 4
FOR_EVER = LimitsConfig(arena_wait_ms=3_600_000)
"""Longer than any test."""

CONTRACT = Contract(
    inputs=(
        TensorSpec("id", "id", ColumnType("int64"), ()),
        TensorSpec("flag", "flag", ColumnType("bool"), ()),
    ),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
)


class NullCaller:
    """A caller without responses: no worker runs here."""

    def deliver(self, request: Request, results: bytes | memoryview) -> None:
        raise AssertionError("delivered")

    def fail(self, request: Request, error: IskanderError) -> None:
        raise AssertionError("failed")


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test in its own event loop."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(test(*args, **kwargs))  # type: ignore[arg-type]

    return run


async def turn() -> None:
    """Run one event loop iteration."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    loop.call_soon(over.set_result, None)
    await over


async def turns() -> None:
    """Enough iterations for every chain of wake-ups here."""
    for _ in range(8):
        await turn()


def open_lane() -> Lane:
    lane = lane_of(contract=CONTRACT, rows_max=1 << 20, queue_requests=QUEUE_REQUESTS)
    lane.workers[1] = Worker(SlotPlan(0, 0, (0,), None))
    return lane


class EntryArena(InputArena):
    """An input arena with its entry, which queues nothing."""

    def __init__(
        self, capacity_bytes: int, limits: LimitsConfig, options: BackingOptions = ANY_MEMORY
    ) -> None:
        super().__init__(capacity_bytes, options)
        self.entry = Entry(self, lambda request, victims: None, limits)

    def admit(self, request: Request) -> bool:
        """Check and place a request."""
        return self.entry.enter(request)

    async def admit_later(self, request: Request) -> None:
        """Place a request when there is memory."""
        await self.entry.enter_later(request)


def submit(request: Request) -> None:
    """Queue a request that is in the arena, as a dispatcher does."""
    queue(request.lane, request, now_ns())


async def admit(input_arena: EntryArena, request: Request) -> None:
    """Admit and queue a request, as a stream does."""
    if not input_arena.admit(request):
        await input_arena.admit_later(request)
    submit(request)


def request_of(lane: Lane, grains: int = 1, terms: Terms | None = None) -> Request:
    """A request of a number of the arena's grains."""
    rows = (grains * GRAIN_BYTES - 1024) // 9 // 64 * 64
    ids, flags = bytes(8 * rows), bytes(rows // 8)
    request = Request(
        lane,
        NullCaller(),
        rows,
        [memoryview(ids), memoryview(flags)],
        terms=terms or Terms(),
        arrived_ns=now_ns(),
    )
    taken = -(-lane.layout(rows).input_bytes // GRAIN_BYTES)
    assert taken == grains
    return request
