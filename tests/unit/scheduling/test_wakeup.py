"""When the loop looks again."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from iskander.clock import NS_PER_MS, now_ns
from iskander.scheduling import wakeup as waking
from iskander.scheduling.request import NEVER_NS
from iskander.scheduling.wakeup import Alarm, BusyPolling


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


def test_a_loop_is_kept_awake_for_a_spell_after_the_last_work(
    yields: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0
    monkeypatch.setattr(waking, "now_ns", lambda: now)

    async def turns(count: int) -> int:
        before = len(yields)
        for _ in range(count):
            await asyncio.sleep(0)
        return len(yields) - before

    async def test() -> None:
        nonlocal now
        polling = BusyPolling(3)
        polling.note(now)
        polling.note(now)
        assert await turns(5) == 5  # One each, however often there was work.
        now = 2000
        polling.note(now)
        now = 4999
        assert await turns(5) == 5
        now = 5000
        assert await turns(5) == 0
        polling.note(now)
        assert await turns(5) == 5

    run(test)


def test_it_sleeps_without_a_spell(yields: list[int]) -> None:
    async def test() -> None:
        polling = BusyPolling(0)
        polling.note(now_ns())
        await asyncio.sleep(0.01)

    run(test)
    assert not yields
