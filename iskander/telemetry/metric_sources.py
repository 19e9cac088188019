"""What is looked at from outside: the live objects that the metrics and the stats are read from.

Nothing is copied or kept here, and nothing in the path of a batch knows that it is looked at.

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
    """One gateway.

    Attributes:
        started_ns: When it was.
        models: Their lanes, the workers, and whether they are ready.
        input_arena: Of the gateway.
        input_backing: What memory it is.
        streams: Those of Flight that are open.
        calls: Those of other protocols that are.
        regions: Bytes of each region of memory that is lent to a client.
        counts: What the dispatcher counts.
        loop_lag_ns: How late the loop was, each time that was looked.
        clients: Of Inferential, that are connected.
        outcomes: Of Inferential's observations.
        budget: The memory of received bytes.
        connections_ended: Connections and messages that the server ended, by reason.
        refused: Calls that showed no token that was enough, by the errors' codes.
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
        """Seconds since it was started."""
        return (now_ns() - self.started_ns) / NS_PER_S
