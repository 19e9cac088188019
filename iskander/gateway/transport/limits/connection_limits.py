"""Limits shared by the connections of all listeners: memory, turns, timeouts, descriptors.

Runs on: gateway loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from iskander.config.schema import Config
from iskander.foundation.machine_memory import memory_bytes
from iskander.gateway.transport.limits.allocator import return_free_memory
from iskander.gateway.transport.limits.descriptors import Descriptors
from iskander.gateway.transport.limits.handshakes import HandshakeTurns
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget
from iskander.gateway.transport.limits.turn_scheduler import TurnScheduler

RECEIVE_SHARE: Final = 8
"""Default of `limits.receive_bytes`: memory / 8."""
TRIM_INTERVAL_S: Final = 2.0
"""Period of the check for excess heap memory."""


class ConnectionLimits:
    """Limits over all connections of this process; counts of ended ones by reason.

    The listeners read the limits here for each use, so that a reload applies to open connections.

    Attributes:
        calls_ended: Ended calls by protocol and status.
    """

    def __init__(self, config: Config) -> None:
        self._message_bytes = 0
        self.budget = ReceiveBudget(self._receive_bytes(config))
        self._read(config)
        self.turns = TurnScheduler(asyncio.get_running_loop())
        self.handshakes = HandshakeTurns()
        self.ended: Counter[str] = Counter()
        self.calls_ended: Counter[tuple[str, str]] = Counter()
        self.descriptors = Descriptors()
        self.open_count = 0
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, config: Config) -> None:
        """Apply the live settings, the age of a connection to new ones."""
        self._read(config)
        self.budget.set_limit(self._receive_bytes(config))

    def _read(self, config: Config) -> None:
        self.timeouts = config.timeouts
        self.max_age_s = config.server.max_connection_age_s
        self.max_age_grace_s = config.server.max_connection_age_grace_s
        self.source_percent = config.limits.source_percent

    def _receive_bytes(self, config: Config) -> int:
        # Open calls keep their limit of a message, and the memory must suffice for two of them.
        self._message_bytes = max(self._message_bytes, config.limits.message_bytes)
        total = config.limits.receive_bytes or memory_bytes() // RECEIVE_SHARE
        return max(total // config.server.processes, 2 * self._message_bytes)

    def count_ended(self, reason: str) -> None:
        """Count a connection or a message that the server ended."""
        self.ended[reason] += 1

    def start(self) -> None:
        """Measure the descriptors in use; start the heap trim timer."""
        self.descriptors.measure(self.open_count)
        self._timer = self._loop.call_later(TRIM_INTERVAL_S, self._trim)

    def stop(self) -> None:
        """Stop the timer and close the spare descriptors."""
        if self._timer is not None:
            self._timer.cancel()
        self.descriptors.close()

    def _trim(self) -> None:
        """Trim the heap if memory use has fallen; restart the timer."""
        if self.budget.has_excess():
            # In a thread: it is slow, and holds the allocator's lock but not the GIL.
            self._loop.run_in_executor(None, return_free_memory)
        self._timer = self._loop.call_later(TRIM_INTERVAL_S, self._trim)
