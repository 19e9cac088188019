"""What is looked at from outside: the live objects that the metrics and the stats are read from.

Nothing is copied or kept here, and nothing in the path of a batch knows that it is looked at.

Runs on: gateway loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from iskander.clock import NS_PER_S, now_ns
from iskander.gateway.receive_budget import ReceiveBudget
from iskander.gateway.telemetry.histogram import Histogram
from iskander.memory.arena import Arena
from iskander.memory.backing import NO_MEMORY, Backing

if TYPE_CHECKING:
    from iskander.gateway.models import Models

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
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


def resident_bytes(pid: int) -> int:
    """Memory that a process has, shared memory that it has touched included; 0 without one.

    Source: proc(5), `statm`; takes 10 us.
    """
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, in steps of 10 ms; 0 without one.

    Source: proc(5), `stat`, fields 14 and 15.
    """
    try:
        # The name, which is in parentheses, may have spaces and parentheses in it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
    except (OSError, IndexError):
        return 0.0
