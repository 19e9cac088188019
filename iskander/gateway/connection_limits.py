"""What the connections of all listeners of this process share: memory, turns, timeouts, counts.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from iskander.config import Config
from iskander.gateway.machine_memory import receive_bytes
from iskander.gateway.receive_budget import ReceiveBudget
from iskander.gateway.turns import TurnScheduler


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
