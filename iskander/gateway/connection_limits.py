"""What the connections of all listeners of this process share: memory, turns, timeouts, counts.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from iskander.config import Config
from iskander.gateway.allocator import return_free_memory
from iskander.gateway.machine_memory import receive_bytes
from iskander.gateway.receive_budget import ReceiveBudget
from iskander.gateway.turns import TurnScheduler

EXCESS_S: Final = 2.0
"""How often memory that is free is looked for."""


class ConnectionLimits:
    """Limits over all connections.

    Args:
        config: Of the server.

    Attributes:
        budget: The memory of received bytes.
        turns: Where connections wait whose input was not all processed.
        timeouts: The settings.
        ended: Connections and messages that the server ended, by reason.
    """

    def __init__(self, config: Config) -> None:
        self.budget = ReceiveBudget(receive_bytes(config))
        self.turns = TurnScheduler(asyncio.get_running_loop())
        self.timeouts = config.timeouts
        self.ended: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to give memory back to the system that received bytes need no more."""
        self._timer = self._loop.call_later(EXCESS_S, self._look_after)

    def stop(self) -> None:
        """End that."""
        if self._timer is not None:
            self._timer.cancel()

    def _look_after(self) -> None:
        if self.budget.has_excess():
            # By a thread: it is long, and holds the allocator's lock and not the interpreter's.
            self._loop.run_in_executor(None, return_free_memory)
        self.start()
