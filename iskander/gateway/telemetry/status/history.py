"""Recent history of each model: rates and latency percentiles at a fixed interval.

A sample is the difference of two readings of the counters and histograms of a lane, so the path of
a batch records nothing for it. Each model has arrays of a fixed length:

    tick      ... 871  872  873  874 ...      monotonic time / interval: equal in all processes
    index     ... 121  122  123  124 ...      tick modulo `SAMPLES`

Pure: `history_sampler` supplies the time.

Runs on: gateway loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from math import isnan, nan
from typing import NamedTuple

from iskander.foundation.clock import NS_PER_MS, NS_PER_S
from iskander.foundation.measurement.histogram import LATENCY_BOUNDS_NS, percentiles
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.scheduling.lanes.metrics import LaneMetrics

INTERVAL_S = 2
INTERVAL_NS = INTERVAL_S * NS_PER_S
SAMPLES = 150
"""Five minutes; 13 KiB for each model."""
MODELS_MAX = 100
"""Models with a history; later ones have none."""

KINDS = ("wait", "run", "total")
PERCENTS = (50, 95, 99)
PERCENTILES = tuple(f"{kind}_p{percent}_ms" for kind in KINDS for percent in PERCENTS)
SERIES = ("requests_per_s", "rows_per_s", *PERCENTILES)

ModelVersion = tuple[str, str]
Counts = tuple[int, ...]

_ZEROS = (0,) * (len(LATENCY_BOUNDS_NS) + 1)


def tick_at(now_ns: int) -> int:
    """Return the tick nearest to a time: timers are up to a millisecond early."""
    return (now_ns + INTERVAL_NS // 2) // INTERVAL_NS


def complete_tick(now_ns: int) -> int:
    """Return the last tick that all processes have sampled."""
    return (now_ns - INTERVAL_NS // 8) // INTERVAL_NS


class _Reading(NamedTuple):
    """Counters and histograms of a lane at one time."""

    at_ns: int
    requests: int
    rows: int
    wait: Counts
    run: Counts
    total: Counts


class ModelHistory:
    """Samples of one model version; a percentile of no requests is unknown."""

    __slots__ = ("_before", "_metrics", "_values", "tick")

    def __init__(self, tick: int) -> None:
        self.tick = tick
        self._values = {name: array("d", [nan]) * SAMPLES for name in SERIES}
        self._metrics: LaneMetrics | None = None
        self._before = _Reading(0, 0, 0, _ZEROS, _ZEROS, _ZEROS)

    def sample(self, lane: Lane, tick: int, now_ns: int) -> None:
        """Add the sample of a tick."""
        counts, metrics = lane.counts, lane.metrics
        reading = _Reading(
            now_ns,
            counts["requests"],
            counts["rows"],
            metrics.wait_ns.counts,
            metrics.run_ns.counts,
            metrics.total_ns.counts,
        )
        before = self._before
        if metrics is not self._metrics:
            # A lane that inherited nothing counts from 0.
            self._metrics = metrics
            before = _Reading(now_ns - INTERVAL_NS, 0, 0, _ZEROS, _ZEROS, _ZEROS)
        for missed in range(max(self.tick + 1, tick - SAMPLES + 1), tick):
            self._write(missed, [nan] * len(SERIES))
        self._write(tick, _difference(before, reading))
        self.tick, self._before = tick, reading

    def series(self, tick: int) -> dict[str, list[float | None]]:
        """Return the values of each measure, oldest first, up to and including a tick."""
        end = (tick + 1) % SAMPLES
        missing = min(max(tick - self.tick, 0), SAMPLES)
        ordered: dict[str, list[float | None]] = {}
        for name, values in self._values.items():
            kept = [*values[end:], *values[:end]][: SAMPLES - missing]
            ordered[name] = [None if isnan(value) else value for value in kept] + [None] * missing
        return ordered

    def latest(self, name: str) -> float | None:
        """Return the newest value of a measure."""
        value = self._values[name][self.tick % SAMPLES]
        return None if isnan(value) else value

    def _write(self, tick: int, sample: list[float]) -> None:
        index = tick % SAMPLES
        for values, value in zip(self._values.values(), sample, strict=True):
            values[index] = value


class History:
    """Histories by model version."""

    def __init__(self) -> None:
        self.models: dict[ModelVersion, ModelHistory] = {}

    def sample(self, lane: Lane, tick: int, now_ns: int) -> None:
        """Add the sample of a lane, if there is space for its history."""
        key = lane.model.name, lane.model.version
        history = self.models.get(key)
        if history is None:
            if len(self.models) >= MODELS_MAX:
                return
            history = self.models[key] = ModelHistory(tick - 1)
        history.sample(lane, tick, now_ns)

    def keep(self, served: Collection[ModelVersion]) -> None:
        """Remove the histories of all other model versions."""
        for key in self.models.keys() - served:
            del self.models[key]


def _difference(before: _Reading, after: _Reading) -> list[float]:
    """Values of a sample, in the order of `SERIES`."""
    elapsed_s = max(after.at_ns - before.at_ns, 1) / NS_PER_S
    sample = [
        round((after.requests - before.requests) / elapsed_s, 3),
        round((after.rows - before.rows) / elapsed_s, 3),
    ]
    for first, last in zip(before[3:], after[3:], strict=True):
        if first == last:
            sample += [nan] * len(PERCENTS)
            continue
        counts = [end - begin for begin, end in zip(first, last, strict=True)]
        found = percentiles(LATENCY_BOUNDS_NS, counts, PERCENTS)
        sample += [round(value / NS_PER_MS, 3) for value in found]
    return sample
