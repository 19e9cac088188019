"""Live objects that metrics and statistics are read from.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from iskander.clock import NS_PER_S, now_ns
from iskander.measurement.histogram import Histogram
from iskander.memory.arena import Arena
from iskander.memory.backing import NO_MEMORY, Backing
from iskander.transport.receive_budget import ReceiveBudget

if TYPE_CHECKING:
    from iskander.repository.models import Models


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSources:
    """Metric sources of one gateway.

    Attributes:
        streams: Open Flight streams.
        calls: Open calls of the other protocols.
        regions: Bytes of each shared-memory region of a client.
        counts: Counters of the dispatcher.
        clients: Connected Inferential clients.
        outcomes: Inferential observations by outcome.
        connections_ended: Connections and messages ended by the server, by reason.
        refused: Calls without a sufficient token, by error code.
    """

    started_ns: int
    models: Models
    input_arena: Arena
    streams: Sized
    counts: Mapping[str, int]
    loop_lag_ns: Histogram
    calls: Sized = ()
    regions: Mapping[str, int] = field(default_factory=dict)
    clients: Sized = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, int] = field(default_factory=dict)
    connections_ended: Mapping[str, int] = field(default_factory=dict)
    budget: ReceiveBudget = field(default_factory=partial(ReceiveBudget, 0))
    input_backing: Backing = NO_MEMORY

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return (now_ns() - self.started_ns) / NS_PER_S
