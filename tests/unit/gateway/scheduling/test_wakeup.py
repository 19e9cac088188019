"""Wake-ups of the dispatcher: alarm and busy polling."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.gateway.scheduling import wakeup
from iskander.gateway.scheduling.request import NEVER_NS
from iskander.gateway.scheduling.wakeup import Alarm, BusyPolling


def run(test: Any) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await test()

    return asyncio.run(bounded())


def test_alarm_fires_once_at_the_earliest_time() -> None:
    async def test() -> list[int]:
        fired_ns: list[int] = []
        alarm = Alarm(lambda: fired_ns.append(now_ns()))
        now = now_ns()
        alarm.set(now + 500 * NS_PER_MS, now)
        alarm.set(now + 20 * NS_PER_MS, now)
        alarm.set(now + 300 * NS_PER_MS, now)
        alarm.set(NEVER_NS, now)
        await asyncio.sleep(0.1)
        assert len(fired_ns) == 1
        assert fired_ns[0] >= now + 20 * NS_PER_MS
        # It can be set again, also to a later time.
        now = now_ns()
        alarm.set(now + NS_PER_MS, now)
        await asyncio.sleep(0.05)
        return fired_ns

    assert len(run(test)) == 2


def test_cleared_alarm_does_not_fire() -> None:
    async def test() -> None:
        alarm = Alarm(lambda: pytest.fail("the alarm fired"))
        now = now_ns()
        alarm.set(now + NS_PER_MS, now)
        alarm.clear()
        alarm.clear()
        await asyncio.sleep(0.02)

    run(test)


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    called_ns: list[int] = []
    sched_yield = os.sched_yield

    def record_and_yield() -> None:
        called_ns.append(now_ns())
        sched_yield()

    monkeypatch.setattr(os, "sched_yield", record_and_yield)
    return called_ns


def test_busy_polling_lasts_for_the_spell_after_the_last_work(
    yields: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0
    monkeypatch.setattr(wakeup, "now_ns", lambda: now)

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
        assert await turns(5) == 5  # One yield per iteration, regardless of the number of notes.
        now = 2000
        polling.note(now)
        now = 4999
        assert await turns(5) == 5
        now = 5000
        assert await turns(5) == 0
        polling.note(now)
        assert await turns(5) == 5

    run(test)


def test_no_busy_polling_with_a_spell_of_zero(yields: list[int]) -> None:
    async def test() -> None:
        polling = BusyPolling(0)
        polling.note(now_ns())
        await asyncio.sleep(0.01)

    run(test)
    assert not yields
