"""Timer that samples the history of all models, in small steps.

It always runs with `admin.page`, so that the page shows what happened before someone looked. A
sample costs 20 us for a model with requests and 4 us for an idle one, every 2 s.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from iskander.foundation.clock import NS_PER_S, now_ns
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.telemetry.status.history import INTERVAL_NS, History, tick_at

LANES_PER_STEP = 8


class HistorySampler:
    """Samples the served lanes; `history` has the samples."""

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.history = History()
        self._lanes = lanes
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()

    async def sample(self) -> None:
        """Add one sample of each lane."""
        lanes, tick = list(self._lanes), tick_at(now_ns())
        self.history.keep({(lane.model.name, lane.model.version) for lane in lanes})
        for start in range(0, len(lanes), LANES_PER_STEP):
            for lane in lanes[start : start + LANES_PER_STEP]:
                self.history.sample(lane, tick, now_ns())
            await asyncio.sleep(0)

    async def _run(self) -> None:
        while True:
            next_ns = (tick_at(now_ns()) + 1) * INTERVAL_NS
            await asyncio.sleep((next_ns - now_ns()) / NS_PER_S)
            await self.sample()
