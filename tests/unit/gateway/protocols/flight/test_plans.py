"""Plans of streams: one for each schema, built on threads, charged until nothing uses them."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from support.http2 import until
from support.input_arena import in_loop

from iskander.arrow import ipc
from iskander.config.schema import LimitsConfig
from iskander.contract.column_types import ColumnType
from iskander.contract.tensors import Contract, TensorSpec
from iskander.errors import ContractError, LimitExceeded, Overloaded
from iskander.gateway.protocols.flight.fair_threads import FairThreads
from iskander.gateway.protocols.flight.plans import IDLE_BYTES_MAX, REST_FROM_NS, Plans
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget

CONTRACT = Contract(
    inputs=(TensorSpec("x", "x", ColumnType("int64"), ()),),
    outputs=(TensorSpec("y", "y", ColumnType("float32"), ()),),
    passthrough="all",
)
LANE: Any = SimpleNamespace(model=SimpleNamespace(key=1), contract=CONTRACT)


def header_of(*names: str) -> bytes:
    return ipc.header_of(pa.schema([(name, pa.int64()) for name in ("x", *names)]).serialize())


def plans_of(limit_bytes: int = 1 << 30) -> tuple[Plans, ReceiveBudget]:
    budget = ReceiveBudget(limit_bytes)
    return Plans(LimitsConfig(), budget), budget


@in_loop
async def test_plan_is_built_once_for_all_streams_and_charged_once() -> None:
    """Also for streams that open together."""
    plans, budget = plans_of()
    header = header_of("a")
    assert plans.find(LANE, header) is None

    built = await asyncio.gather(*(plans.build(LANE, header, number) for number in range(5)))

    assert len({id(plan) for plan in built}) == 1
    assert plans.find(LANE, header) is built[0]
    assert budget.used_bytes == plans.charged_bytes == built[0].memory_bytes
    for plan in (*built, built[0]):
        plans.leave(plan)
    assert budget.used_bytes == built[0].memory_bytes, "it is cached"
    plans.configure(LimitsConfig())
    assert not budget.used_bytes and not len(plans)


@in_loop
async def test_cached_plans_are_limited_in_bytes() -> None:
    plans, budget = plans_of()
    for number in range(200):
        header = header_of(*(f"{number} {column}" for column in range(100)))
        plans.leave(await plans.build(LANE, header, 1))
        assert budget.used_bytes == plans.charged_bytes <= IDLE_BYTES_MAX
    assert 10 < len(plans) < 200
    assert plans.find(LANE, header) is not None, "the one used last is kept"


@in_loop
async def test_plans_of_open_streams_are_charged_until_they_end() -> None:
    plans, budget = plans_of(8 << 20)
    held = []
    with pytest.raises(Overloaded, match=r"`limits\.receive_bytes`"):
        for number in range(100):
            held.append(await plans.build(LANE, header_of(f"{number}"), number))
    assert len(held) > 10
    assert budget.used_bytes == sum(plan.memory_bytes for plan in held) <= 8 << 20

    for plan in held:
        plans.leave(plan)
    assert budget.used_bytes <= budget.limit_bytes // 16, "only cached plans are charged"


@in_loop
async def test_plan_of_old_limits_is_released_with_its_last_stream() -> None:
    plans, budget = plans_of()
    plan = await plans.build(LANE, header_of("a"), 1)
    plans.configure(LimitsConfig(columns=1))
    assert plans.find(LANE, header_of("a")) is None
    with pytest.raises(LimitExceeded):
        await plans.build(LANE, header_of("a"), 1)

    assert budget.used_bytes == plan.memory_bytes
    plans.leave(plan)
    assert not budget.used_bytes


@in_loop
async def test_schema_that_fails_is_not_charged() -> None:
    plans, budget = plans_of()
    with pytest.raises(ContractError):
        await plans.build(LANE, header_of("y"), 1)

    assert not budget.used_bytes and not len(plans)


@in_loop
async def test_callers_take_turns() -> None:
    """One caller's many turns do not delay the only one of another."""
    threads = FairThreads(1)
    order: list[str] = []
    is_open = asyncio.Event()

    async def work(caller: str, name: str) -> None:
        async with threads.turn(caller):
            order.append(name)
            await is_open.wait()

    tasks = [asyncio.create_task(work("many", f"many {number}")) for number in range(4)]
    await asyncio.sleep(0)
    tasks.append(asyncio.create_task(work("other", "other")))
    await asyncio.sleep(0)
    is_open.set()
    await asyncio.gather(*tasks)

    assert order == ["many 0", "many 1", "other", "many 2", "many 3"]


@in_loop
async def test_cancelled_turns_are_given_to_others() -> None:
    """Those that wait, and one whose turn has just come."""
    threads = FairThreads(1)
    is_open = asyncio.Event()
    order: list[int] = []

    async def work(number: int) -> None:
        async with threads.turn(number):
            order.append(number)
            await is_open.wait()

    tasks = [asyncio.create_task(work(number)) for number in range(4)]
    await until(lambda: order)
    tasks[1].cancel()
    await asyncio.sleep(0)
    is_open.set()
    await tasks[0]
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert order[0] == 0 and order[-1] == 3 and 1 not in order
    async with threads.turn("later"):
        assert await threads.run(sum, [1, 2]) == 3


@in_loop
async def test_caller_rests_after_an_expensive_plan() -> None:
    """Meanwhile the threads serve others, and the event loop has the interpreter lock."""
    plans, _ = plans_of()
    wide = header_of(*(f"c{number}" for number in range(1000)))
    await plans.build(LANE, wide, "wide")
    again = asyncio.ensure_future(plans.build(LANE, header_of("b"), "wide"))
    await plans.build(LANE, header_of("c"), "other")
    assert not again.done()
    begun = asyncio.get_running_loop().time()
    await again
    assert asyncio.get_running_loop().time() - begun > 2 * REST_FROM_NS / 1e9


@in_loop
async def test_threads_serve_others_while_a_caller_rests() -> None:
    """A resting caller keeps its place, also behind a thread that becomes free."""
    threads = FairThreads(1)
    order = []

    async def work(name: str, caller: object) -> None:
        async with threads.turn(caller):
            order.append(name)
            await threads.run(pause)

    def pause() -> None:
        time.sleep(0.01)

    first = asyncio.ensure_future(work("first", "a"))
    await asyncio.sleep(0)
    threads.rest("a", 0.1)
    await asyncio.gather(first, work("rested", "a"), work("b1", "b"), work("b2", "b"))
    assert order == ["first", "b1", "b2", "rested"]
    cancelled = asyncio.ensure_future(work("cancelled", "c"))
    threads.rest("c", 0.05)
    await asyncio.sleep(0)
    await work("d", "d")
    await asyncio.sleep(0.1)
    await cancelled
    await asyncio.wait_for(work("last", "c"), 5)
