"""Live objects that metrics and statistics are read from.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial

from iskander.clock import NS_PER_S, now_ns
from iskander.measurement.histogram import Histogram
from iskander.memory.arena import Arena
from iskander.memory.backing import NO_MEMORY, Backing
from iskander.repository.models import Models
from iskander.transport.receive_budget import ReceiveBudget


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSources:
    """Metric sources of one gateway; the help texts in `metrics` describe the values.

    `counts` are those of the dispatcher, `regions` the bytes of each shared-memory region.
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
