"""When the loop looks again."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from iskander.clock import NS_PER_MS, now_ns
from iskander.gateway.lanes.request import NEVER_NS
from iskander.gateway.waking import Alarm, BusyPolling


def run(test: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await test()

    return asyncio.run(bounded())


def test_the_sooner_moment_counts_and_rings_once() -> None:
    async def test() -> list[int]:
        rung: list[int] = []
        alarm = Alarm(lambda: rung.append(now_ns()))
        now = now_ns()
        alarm.set(now + 500 * NS_PER_MS, now)
        alarm.set(now + 20 * NS_PER_MS, now)
        alarm.set(now + 300 * NS_PER_MS, now)
        alarm.set(NEVER_NS, now)
        await asyncio.sleep(0.1)
        assert len(rung) == 1
        assert rung[0] >= now + 20 * NS_PER_MS
        # And it can be set again, for later too.
        now = now_ns()
        alarm.set(now + NS_PER_MS, now)
        await asyncio.sleep(0.05)
        return rung

    assert len(run(test)) == 2


def test_an_alarm_that_is_cleared_is_silent() -> None:
    async def test() -> None:
        alarm = Alarm(lambda: pytest.fail("it rang"))
        now = now_ns()
        alarm.set(now + NS_PER_MS, now)
        alarm.clear()
        alarm.clear()
        await asyncio.sleep(0.02)

    run(test)


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    real = os.sched_yield

    def counted() -> None:
        found.append(now_ns())
        real()

    monkeypatch.setattr(os, "sched_yield", counted)
    return found


def test_a_loop_is_kept_awake_for_a_spell_after_the_last_work(yields: list[int]) -> None:
    async def test() -> int:
        polling = BusyPolling(3000)
        polling.note(now_ns())
        await asyncio.sleep(0.001)
        last = now_ns()
        polling.note(last)
        await asyncio.sleep(0.05)
        return last

    last = run(test)
    assert len(yields) > 2
    assert yields[-1] <= last + 5 * NS_PER_MS
    assert yields == sorted(set(yields))  # One turn at a time, however often there was work.


def test_it_sleeps_without_a_spell(yields: list[int]) -> None:
    async def test() -> None:
        polling = BusyPolling(0)
        polling.note(now_ns())
        await asyncio.sleep(0.01)

    run(test)
    assert not yields


def test_others_have_their_turn_meanwhile(yields: list[int]) -> None:
    async def test() -> list[int]:
        polling = BusyPolling(10_000)
        polling.note(now_ns())
        seen = []
        for _ in range(20):
            await asyncio.sleep(0)
            seen.append(len(yields))
        return seen

    seen = run(test)
    assert seen[0] <= 1
    assert len(set(seen)) > 1
