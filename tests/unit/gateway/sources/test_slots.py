"""Slots of reader processes: shares of callers, turns and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

import pytest

from iskander.foundation.clock import now_ns
from iskander.gateway.auth.shares import IDLE_NS
from iskander.gateway.auth.source import Source
from iskander.gateway.sources.slots import CHECK_S, FairSlots, SlotsFull

LONG_S = 5.0
GREEDY, OTHER, THIRD = Source("greedy"), Source("other"), Source("third")

Take = Callable[[str, Source], Awaitable[asyncio.Event]]


def holding(
    test: Callable[[FairSlots, list[str], Take], Coroutine[None, None, None]],
    count: int = 2,
    waiting_max: int = 16,
) -> None:
    """Run a test with a function that starts a holder, and the names of those that got a slot."""

    async def run() -> None:
        slots, served = FairSlots(count, waiting_max), list[str]()
        tasks = list[asyncio.Task[None]]()

        async def take(name: str, source: Source) -> asyncio.Event:
            done = asyncio.Event()

            async def hold() -> None:
                async with slots.hold(source, LONG_S):
                    served.append(name)
                    await done.wait()

            tasks.append(asyncio.create_task(hold()))
            await settle()
            return done

        await test(slots, served, take)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.waiting == 0
        async with asyncio.timeout(LONG_S), slots.hold(THIRD, LONG_S):
            pass

    asyncio.run(run())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_last_slot_is_for_a_caller_without_any() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        for name in ("a", "b", "c"):
            await take(name, GREEDY)
        assert (served, slots.waiting) == (["a"], 2)
        await take("d", OTHER)
        assert served == ["a", "d"]

    holding(test)


def test_number_of_slots_changes() -> None:
    """More serve waiting calls at once; fewer take none away."""

    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        held = [await take(name, OTHER if name == "b" else GREEDY) for name in ("a", "b", "c")]
        assert (served, slots.waiting) == (["a", "b"], 1)
        slots.resize(4)
        await settle()
        assert (served, slots.waiting) == (["a", "b", "c"], 0)
        slots.resize(1)
        await take("d", THIRD)
        for done in held[:2]:
            done.set()
            await settle()
            assert slots.waiting == 1
        held[2].set()
        await settle()
        assert served == ["a", "b", "c", "d"]

    holding(test)


def test_single_slot_is_for_everybody() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        first = await take("a", GREEDY)
        await take("b", GREEDY)
        first.set()
        await settle()
        assert (served, slots.waiting) == (["a", "b"], 0)

    holding(test, count=1)


def test_waiting_callers_take_turns() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        held = [await take("a", THIRD)]
        for name, source in (("b", GREEDY), ("c", GREEDY), ("d", OTHER), ("e", GREEDY)):
            held.append(await take(name, source))
        for done in held:
            done.set()
            await settle()
        assert served == ["a", "b", "d", "c", "e"]

    holding(test, count=1)


def test_connections_without_a_token_are_callers() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        await take("a", Source(connection=1))
        await take("b", Source(connection=1))
        await take("c", Source(connection=2))
        assert served == ["a", "c"]

    holding(test)


def test_last_places_to_wait_are_for_callers_with_few() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        await take("a", THIRD)
        for number in range(14):
            await take(str(number), GREEDY)
        with pytest.raises(SlotsFull) as error:
            async with slots.hold(GREEDY, LONG_S):
                pass
        assert (error.value.waiting, error.value.is_late) == (14, False)
        await take("o", OTHER)
        assert slots.waiting == 15

    holding(test, count=1)


def test_wait_is_limited() -> None:
    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        await take("a", THIRD)
        with pytest.raises(SlotsFull) as error:
            async with slots.hold(OTHER, 0.001):
                pass
        assert error.value.is_late

    holding(test, count=1)


def test_cancelled_caller_passes_its_slot_on() -> None:
    """It is cancelled in the event loop iteration in which it gets the slot."""

    async def test(slots: FairSlots, served: list[str], take: Take) -> None:
        first = await take("a", THIRD)

        async def hold() -> None:
            async with slots.hold(OTHER, LONG_S):
                served.append("b")

        cancelled = asyncio.create_task(hold())
        await settle()
        await take("c", GREEDY)
        first.set()
        while slots.waiting == 2:
            await asyncio.sleep(0)
        cancelled.cancel()
        await settle()
        assert served == ["a", "c"]

    holding(test, count=1)


class Reading:
    """A read whose client stopped reading at a time."""

    def __init__(self, stalled_since_ns: int) -> None:
        self.stalled_since_ns = stalled_since_ns
        self.gave_way = 0

    def give_way(self) -> None:
        self.gave_way += 1


def test_stalled_slot_is_taken_back_for_a_caller_that_waits() -> None:
    """For one with fewer slots; not while its client reads."""
    unread, read = Reading(now_ns()), Reading(0)

    async def run() -> None:
        slots, served = FairSlots(2, 16), asyncio.Event()

        async def hold(source: Source, held: Reading | None) -> None:
            async with slots.hold(source, LONG_S, held):
                if held is None:
                    served.set()
                await asyncio.Event().wait()

        holders = [(OTHER, read), (GREEDY, unread)]
        tasks = [asyncio.create_task(hold(*each)) for each in holders]
        await settle()
        tasks.append(asyncio.create_task(hold(GREEDY, None)))
        await settle()
        unread.stalled_since_ns -= IDLE_NS
        await asyncio.sleep(2 * CHECK_S)
        assert not served.is_set() and not unread.gave_way
        tasks.append(asyncio.create_task(hold(THIRD, None)))
        async with asyncio.timeout(LONG_S):
            await served.wait()
        assert (unread.gave_way, read.gave_way) == (1, 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert slots.waiting == 0

    asyncio.run(run())
