"""Live objects that metrics and statistics are read from.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import partial

from iskander.foundation.clock import NS_PER_S, now_ns, wall_ns
from iskander.foundation.file_watcher import ReloadStatus
from iskander.foundation.measurement.histogram import Histogram
from iskander.gateway.observation.drift_report import DriftReport
from iskander.gateway.repository.models import Models
from iskander.gateway.shadow.pair import ShadowPair
from iskander.gateway.supervision.gpus.health import GpuState
from iskander.gateway.transport.limits.receive_budget import ReceiveBudget
from iskander.interprocess.memory.arena import Arena
from iskander.interprocess.memory.backing import NO_MEMORY, Backing


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricSources:
    """Metric sources of one gateway; the help texts in `metrics` describe the values.

    `process` is the number of the process, `counts` are those of the dispatcher, `regions` the
    bytes of each shared-memory region, `reloads` the reads of each file. `grants` returns name,
    outstanding rows and counts of each grant with limits. `connections` and `connections_max`
    return the open connections and their limit by file descriptors, `samples_held` the number and
    bytes of held samples, `log_counts` the counts of the prediction log, `expiry_s` the expiry of
    the certificate or 0.
    `gpus` are those of the plan; the first of several processes has their readings.
    """

    started_ns: int
    process: int = 0
    started_wall_ns: int = field(default_factory=wall_ns)
    models: Models
    input_arena: Arena
    streams: Sized
    counts: Mapping[str, int]
    loop_lag_ns: Histogram
    calls: Sized = ()
    regions: Mapping[str, int] = field(default_factory=dict)
    clients: Sized = ()
    outcomes: Mapping[str, int] = field(default_factory=dict)
    spans: Mapping[str, int] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    samples_held: Callable[[], tuple[int, int]] = lambda: (0, 0)
    log_counts: Callable[[], Mapping[str, int]] = dict
    observer_starts: Callable[[], int] = int
    reads: Sized = ()
    read_counts: Mapping[str, int] = field(default_factory=dict)
    shadows: Callable[[], Sequence[ShadowPair]] = tuple
    drift: Callable[[], DriftReport] = DriftReport
    refused: Mapping[str, int] = field(default_factory=dict)
    grants: Callable[[], Iterable[tuple[str, int, Mapping[str, int]]]] = tuple
    audited: Mapping[str, int] = field(default_factory=dict)
    connections: Callable[[], int] = int
    connections_max: Callable[[], int] = int
    connections_ended: Mapping[str, int] = field(default_factory=dict)
    calls_ended: Mapping[tuple[str, str], int] = field(default_factory=dict)
    reloads: Mapping[str, ReloadStatus] = field(default_factory=dict)
    expiry_s: Callable[[], float] = float
    budget: ReceiveBudget = field(default_factory=partial(ReceiveBudget, 0))
    input_backing: Backing = NO_MEMORY
    gpus: Sequence[GpuState] = ()

    @property
    def uptime_s(self) -> float:
        """Seconds since the start."""
        return (now_ns() - self.started_ns) / NS_PER_S
