"""The lag of a loop: what holds it is seen, and it ends when it is told to."""

from __future__ import annotations

import asyncio
import time

from support.input_arena import in_loop

from iskander.clock import NS_PER_MS
from iskander.telemetry.loop_lag import TICK_S, LoopLag

HELD_S = 0.2


@in_loop
async def test_a_step_that_holds_the_loop_is_seen() -> None:
    lag = LoopLag()
    lag.start()

    time.sleep(HELD_S)
    while not len(lag.lag_ns):
        await asyncio.sleep(0.001)

    assert lag.lag_ns.max >= (HELD_S - TICK_S) * 1000 * NS_PER_MS
    lag.stop()


@in_loop
async def test_it_goes_on_until_it_is_stopped() -> None:
    lag = LoopLag()
    lag.start()
    while len(lag.lag_ns) < 2:
        await asyncio.sleep(0.001)

    lag.stop()
    seen = len(lag.lag_ns)
    await asyncio.sleep(2 * TICK_S)

    assert len(lag.lag_ns) == seen
