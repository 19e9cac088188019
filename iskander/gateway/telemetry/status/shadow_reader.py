"""Reads the figures of shadow versions for the status document.

Runs on: gateway loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from iskander.foundation.clock import NS_PER_MS, now_ns
from iskander.gateway.scheduling.lanes.lane import Lane
from iskander.gateway.shadow.comparison import Differences, EqualityComparison, FloatComparison
from iskander.gateway.shadow.pair import ShadowPair
from iskander.gateway.telemetry.status.events import shorten
from iskander.gateway.telemetry.status.shadow_status import (
    PAIRS_MAX,
    DifferenceStatus,
    OutputStatus,
    ShadowStatus,
    differences,
    percent_of,
    rounded,
    with_percents,
)


class RunTimes(NamedTuple):
    """Run time of a batch of `rows` rows in both versions by their cost models; None: unknown."""

    rows: int
    served_ns: int | None
    candidate_ns: int | None


def read_shadow(pair: ShadowPair) -> ShadowStatus:
    """Return the figures of a pair of versions."""
    served, candidate, comparison = pair.served.model, pair.candidate.model, pair.comparison
    state, reason = pair.state(now_ns())
    rows = comparison.rows if comparison is not None else 0
    disagreeing = comparison.disagreeing if comparison is not None else 0
    times = run_times(pair)
    return ShadowStatus(
        name=served.name,
        served=served.version,
        candidate=candidate.version,
        state=state,
        reason=shorten(reason),
        share=pair.share,
        rows=rows,
        disagreeing=disagreeing,
        disagreeing_percent=percent_of(disagreeing, rows),
        dropped=dict(pair.dropped),
        run_rows=times.rows,
        served_run_ms=None if times.served_ns is None else rounded(times.served_ns / NS_PER_MS),
        candidate_run_ms=(
            None if times.candidate_ns is None else rounded(times.candidate_ns / NS_PER_MS)
        ),
    )


def read_outputs(pair: ShadowPair) -> Iterator[OutputStatus]:
    """Yield the figures of each output of a pair of versions."""
    comparison = pair.comparison
    for each in comparison.outputs if comparison is not None else ():
        assert comparison is not None
        status = OutputStatus(
            name=pair.served.model.name,
            served=pair.served.model.version,
            candidate=pair.candidate.model.version,
            output=each.match.name,
            kind=each.match.kind,
            rows=comparison.rows,
            disagreeing=each.disagreeing,
        )
        yield with_percents(_with_statistics(status, each))


def _with_statistics(
    status: OutputStatus, found: FloatComparison | EqualityComparison
) -> OutputStatus:
    if isinstance(found, EqualityComparison):
        pairs = found.top_pairs(PAIRS_MAX)
        return replace(status, pairs={f"{ours} > {theirs}": rows for ours, theirs, rows in pairs})
    return replace(
        status,
        values=found.values,
        unmatched=found.unmatched,
        bias=rounded(found.bias / found.values) if found.values else None,
        absolute=_differences(found.absolute),
        relative=_differences(found.relative),
    )


def _differences(found: Differences) -> DifferenceStatus:
    return differences(found.sparse(), found.highest)


def run_times(pair: ShadowPair) -> RunTimes:
    """Return the run times of a batch with the mean rows of the served version."""
    rows = max(round(pair.served.metrics.batch_rows.mean), 1)
    return RunTimes(rows, _run_ns(pair.served, rows), _run_ns(pair.candidate, rows))


def _run_ns(lane: Lane, rows: int) -> int | None:
    costs = [cost for cost in lane.costs.values() if cost.samples]
    run_rows = lane.rules.run_rows(rows)
    return max((cost.predict_ns(run_rows) for cost in costs), default=None)
