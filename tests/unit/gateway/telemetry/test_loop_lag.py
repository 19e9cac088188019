"""Measurement of the event loop lag."""

from __future__ import annotations

import asyncio
import time

from support.input_arena import in_loop

from iskander.foundation.clock import NS_PER_MS
from iskander.gateway.telemetry.loop_lag import TICK_S, LoopLag

BLOCKED_S = 0.2


@in_loop
async def test_blocking_step_is_measured() -> None:
    lag = LoopLag()
    lag.start()

    time.sleep(BLOCKED_S)
    while not len(lag.lag_ns):
        await asyncio.sleep(0.001)

    assert lag.lag_ns.max >= (BLOCKED_S - TICK_S) * 1000 * NS_PER_MS
    lag.stop()


@in_loop
async def test_measurement_ends_at_stop() -> None:
    lag = LoopLag()
    lag.start()
    while len(lag.lag_ns) < 2:
        await asyncio.sleep(0.001)

    lag.stop()
    count = len(lag.lag_ns)
    await asyncio.sleep(2 * TICK_S)

    assert len(lag.lag_ns) == count
