"""What the connections of all listeners of this process share: memory, turns, timeouts, places.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from iskander.config.schema import Config
from iskander.transport.allocator import return_free_memory
from iskander.transport.descriptors import Descriptors
from iskander.transport.machine_memory import receive_bytes
from iskander.transport.receive_budget import ReceiveBudget
from iskander.transport.turn_scheduler import TurnScheduler

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
        source_percent: Of a listener's connections that one source may hold where they are scarce.
        descriptors: How many connections there may be.
        open_count: Open connections of all listeners.
    """

    def __init__(self, config: Config) -> None:
        self.budget = ReceiveBudget(receive_bytes(config))
        self.turns = TurnScheduler(asyncio.get_running_loop())
        self.timeouts = config.timeouts
        self.ended: Counter[str] = Counter()
        self.source_percent = config.limits.source_percent
        self.descriptors = Descriptors()
        self.open_count = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are descriptors for no more connections."""
        return self.open_count >= self.descriptors.connections_max

    def count_ended(self, reason: str) -> None:
        """Count a connection, or a message, that the server ended."""
        self.ended[reason] += 1

    def start(self) -> None:
        """Begin to give memory back to the system that received bytes need no more."""
        self.descriptors.measure(self.open_count)
        self._look_again()

    def _look_again(self) -> None:
        self._timer = self._loop.call_later(EXCESS_S, self._look_after)

    def stop(self) -> None:
        """End that."""
        if self._timer is not None:
            self._timer.cancel()
        self.descriptors.close()

    def _look_after(self) -> None:
        if self.budget.has_excess():
            # By a thread: it is long, and holds the allocator's lock and not the interpreter's.
            self._loop.run_in_executor(None, return_free_memory)
        self._look_again()
